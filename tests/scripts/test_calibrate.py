"""`scripts/calibrate.py`, without a GPU: what it finds, compares and writes; its loops against their definitions."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse import device
from scripts import calibrate
from scripts.calibration import clock, cpu, device_files, gpu, hlo, triton_loops
from scripts.calibration.found import Found, measure

TINY = cpu.Sizes(
    memory_bytes=1 << 23, cache_bytes=(1 << 20, 1 << 21), product=384, points=1 << 14, operations=32, trips=50,
    page_bytes=1 << 22, kept_bytes=(1 << 20, 1 << 21),
)  # fmt: skip


# --- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in device_files.FOLDER.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    return tmp_path


def test_what_was_measured_is_written_and_the_rest_stays(folder):
    old = device_files.read("NVIDIA H200", "gpu", folder)
    found = [Found("memory_gb_s", 4321.98765, "a copy"), Found("matmul_tflop_s", {"int8": 1500.123}, "products")]
    new = device_files.merged(old, [*found, Found("launch_us", 0.9, "chains")], "script, date", keep=["launch_us"])
    path = device_files.write(new, folder)
    assert path == folder / "nvidia_h200.json"
    again = json.loads(path.read_text())
    assert again["memory_gb_s"] == 4322.0 and again["how"]["memory_gb_s"] == "a copy (script, date)"
    assert again["matmul_tflop_s"] == {**old["matmul_tflop_s"], "int8": 1500.0}
    assert again["launch_us"] == old["launch_us"] and "launch_us" not in again["how"]
    assert again["latency_us"] == old["latency_us"]
    measured, estimated = again["source"].split(";")
    assert "memory_gb_s" in measured and "latency_us" in estimated and "page_gb_s" not in again["source"]


def test_a_device_without_a_file_gets_one_that_is_whole(folder):
    old = device_files.read("ACME Accelerator (16 GB)", "gpu", folder)
    path = device_files.write(device_files.merged(old, [Found("memory_gb_s", 100.0, "a copy")], "script"), folder)
    assert path.name == "acme_accelerator_16_gb.json"
    numbers = json.loads(path.read_text())
    numbers.pop("how")
    assert device.Device(**numbers).memory_gb_s == 100.0 and numbers["kind"] == "ACME Accelerator (16 GB)"


def test_a_file_that_lacks_fields_is_not_written(folder):
    with pytest.raises(TypeError, match="memory_gb_s"):
        device_files.write({"kind": "NVIDIA H200", "platform": "gpu", "source": ""}, folder)
    assert device_files.read("NVIDIA H200", "gpu", folder)["memory_gb_s"] > 0


def test_old_and_new_numbers_stand_side_by_side():
    old = {"kind": "x", "kernel_us": 2.0, "matmul_tflop_s": {"float32": 1.0}}
    lines = device_files.comparison(old, {**old, "kernel_us": 3.0, "trip_us": 1.0, "how": {"kernel_us": "so"}})
    rows = {line[:30].strip(): line[30:].split() for line in lines[1:]}
    assert rows["kernel_us"] == ["2", "3", "1.50", "so"]
    assert rows["trip_us"][:3] == ["-", "1", "-"]
    assert rows["matmul_tflop_s float32"][2] == "1.00"


def test_a_measurement_that_fails_leaves_the_others_alone():
    def fails(known):
        raise OSError("no driver")

    def works(known):
        yield Found("kernel_us", len(known) + 1.0, "")

    found, missing = measure([works, fails, works], seconds=60)
    assert [f.value for f in found] == [1.0, 2.0]
    assert [(m.name, m.reason) for m in missing] == [("fails", "OSError: no driver")]
    assert [m.reason for m in measure([works], seconds=-1)[1]] == ["no time was left"]


# --- the error of the price


def results(pairs, kind="NVIDIA H200"):
    kernels = [{"predicted_us": p, "alone": {"us": m, "own_us": m}} for p, m in pairs]
    return {
        "device": kind,
        "rows": [{"name": "a", "kernels": kernels[:3]}, {"name": "b", "kernels": kernels[3:]}, {"name": "c"}],
    }


def test_the_error_of_the_price_is_the_factor_within_which_a_share_of_kernels_are(tmp_path, folder, capsys):
    file = tmp_path / "rows.out"
    file.write_text(json.dumps(results([(1, 1), (1.1, 1), (1, 1.2), (1.3, 1), (1, 9)])))
    calibrate.main(["--check", str(file), "--share", "0.8", "--folder", str(folder), "--write"])
    numbers = json.loads((folder / "nvidia_h200.json").read_text())
    assert numbers["price_error"] == pytest.approx(1.3)
    assert "80% of 5 kernels of rows.out" in numbers["how"]["price_error"]
    assert "5 kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [(results([(1, 1)], "ACME"), "'ACME'"), (results([]), "no kernel"), ({"rows": []}, "device ''")],
)
def test_results_that_say_nothing_about_a_device_are_refused(tmp_path, folder, content, message):
    file = tmp_path / "rows.out"
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=message):
        calibrate.main(["--check", str(file), "--folder", str(folder), "--write"])


def test_factors_are_symmetric_and_cover_the_share():
    assert device_files.factor_within([(2, 1), (1, 2)], 0.5) == pytest.approx(2.0)
    assert device_files.factor_within([(1, 1), (3, 1)], 0.5) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no kernel"):
        device_files.factor_within([], 0.8)


# --- the CPU


@pytest.mark.deep  # the others see what is made of measurements
@pytest.mark.any_jax
def test_all_numbers_of_a_cpu_are_measured_and_sensible():
    found, missing = measure(cpu.steps(clock.Clock(0.05), TINY), seconds=60)
    values = {f.field: f.value for f in found}
    # what is tiny may drown in noise, and says so
    assert all("noise" in m.reason for m in missing), [m.reason for m in missing]
    assert values["multiprocessors"] == cpu.number_of_cores()
    assert {"memory_gb_s", "matmul_tflop_s", "kept_bytes"} <= values.keys()
    measured = {
        "cache": "cache_gb_s",
        "arithmetic": "special_gop_s",
        "thunks": "kernel_us",
        "trips": "trip_us",
        "pages": "page_gb_s",
    }
    assert {m.name for m in missing} == {step for step, name in measured.items() if name not in values}
    # spreading a thunk over the cores may cost nothing that can be seen
    not_positive = {n for n, v in values.items() if isinstance(v, float) and not (v > 0 and math.isfinite(v))}
    assert not_positive <= {"launch_us"}
    assert values.get("launch_us", 0.0) >= 0
    assert all(f.how for f in found)


def test_the_edge_of_a_cache_is_where_the_rate_falls_towards_that_of_memory():
    assert cpu.edge_of_cache([1, 2, 4, 8, 16], [50.0, 90.0, 80.0, 30.0, 28.0], 25.0) == 4
    assert cpu.edge_of_cache([1, 2], [50.0, 90.0], 25.0) == 2
    assert [cpu.size_bytes(t) for t in ("32768K\n", "2M", "123", "?")] == [32 << 20, 2 << 20, 123, 0]


def test_a_slope_hidden_by_noise_is_no_number():
    assert clock.slope([10.0, 30.0], [1.0, 5.0]) == 5.0
    with pytest.raises(RuntimeError, match="noise"):
        clock.slope([10.0, 9.0], [1.0, 5.0])


def test_kernels_are_counted_in_the_entry_and_in_loops():
    text = """HloModule jit_f

%fused_computation (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} reduce(%p, %c), dimensions={0}, to_apply=%max
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f.1 = f32[8]{0} fusion(%g), kind=kLoop, calls=%fused_computation
  %f.2 = f32[8]{0} fusion(%f.1), kind=kLoop, calls=%fused_computation
}

ENTRY %main.3 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_computation
  %w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body
  %d = f32[8]{0} custom-call(%f, %f), custom_call_target="gemm"
  ROOT %b = f32[2,4]{1,0} bitcast(%d)
}
"""
    assert hlo.count_kernels(text) == 4


def test_the_thunks_of_a_chain_are_as_many_as_its_steps():
    import jax

    x = jnp.ones((4, 4))
    counts = [
        hlo.count_kernels(jax.jit(lambda x, k=k: cpu.thunk_chain(x, k)).lower(x).compile().as_text()) for k in (4, 8)
    ]
    assert counts[1] - counts[0] == 4


# --- loops for a GPU, interpreted


def test_loops_of_tiles_read_what_they_should():
    x = jnp.arange(64, dtype=jnp.float32)
    np.testing.assert_array_equal(triton_loops.copy_tiles(x, tile=16, interpret=True), x)
    total = triton_loops.read_tiles(x, blocks=2, trips=3, tile=4, together=2, interpret=True)
    tiles = np.arange(64.0).reshape(16, 4)
    begins = [[(2 * block + 4 * trip) % 15 for trip in range(3)] for block in range(2)]
    expected = [sum(tiles[b] + tiles[b + 1] for b in one) for one in begins]
    np.testing.assert_array_equal(total, np.concatenate(expected))


def test_loads_that_wait_for_each_other_follow_the_addresses():
    x = (jnp.arange(64, dtype=jnp.int32) + 8) % 64
    last = triton_loops.follow(x, blocks=2, trips=3, tile=4, interpret=True)
    np.testing.assert_array_equal(last, (np.arange(8) + 24) % 64)


def test_small_products_and_chains_compute_what_they_say():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s).astype(np.float16) for s in ((4, 32), (32, 4)))
    product = triton_loops.small_products(jnp.asarray(a), jnp.asarray(b), blocks=2, trips=4, interpret=True)
    np.testing.assert_allclose(
        product, np.tile(a.astype(np.float32) @ b.astype(np.float32), (2, 1)), rtol=1e-2, atol=1e-2
    )
    x = jnp.ones(8)
    np.testing.assert_array_equal(triton_loops.additions(x, blocks=1, trips=3, tile=8, number=2, interpret=True), 7 * x)
    powers = triton_loops.exponentials(x, blocks=1, trips=1, tile=8, number=2, interpret=True)
    np.testing.assert_allclose(powers, 4 * x)


def test_the_longest_row_is_found_by_doubling_and_halving():
    asked = []

    def fits(row):
        asked.append(row)
        return row <= 3000

    assert gpu.longest_row(fits, 256, 1 << 16) == 2560 and len(asked) <= 8
    assert gpu.longest_row(lambda row: False, 256, 1 << 16) == 0
    assert gpu.longest_row(lambda row: True, 256, 1 << 16) == 1 << 16
