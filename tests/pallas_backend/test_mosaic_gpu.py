"""The emitter for Hopper without one: kernels run in Mosaic's interpreter, which looks for races, and lower for CUDA.

`tests/aot` compiles them through ptxas.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallasfuse as pf
from benchmarks import h100
from pallasfuse import at_hand, execution, placement
from pallasfuse.pallas_backend import interpret, mosaic_gpu, mosaic_rules, mosaic_shape, mosaic_space
from tests.pallas_backend.variants import VARIANTS, capped, causal, plain, scores, weighted

TARGET = "mosaic_gpu"


def kernel_of(function, arrays, **options):
    plan = pf.fuse(function, options=pf.FuseOptions(target=TARGET, **options)).explain(*arrays)
    (kernel,) = plan.kernels
    return plan, kernel


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """Runs the only kernel of a function, and the rest of it, on the CPU; a race is an error."""
    interpret = functools.partial(mosaic_gpu.run, interpret=True)
    monkeypatch.setitem(execution._EMITTERS, TARGET, interpret)

    def run(function, arrays, **options):
        plan, kernel = kernel_of(function, arrays, **options)
        assert kernel.target.name == TARGET, kernel.declined
        results = jax.block_until_ready(execution.execute(plan, [*plan.converted.jaxpr.consts, *arrays]))
        if "RACE DETECTED" in capfd.readouterr().out:
            raise RuntimeError("a race")
        return results

    return run


def in_float64(function, arrays):
    with jax.enable_x64(True):
        wide = [np.asarray(a, bool if a.dtype == bool else np.float64) for a in arrays]
        return [np.asarray(x) for x in jax.tree.leaves(function(*wide))]


INTERPRETED = [
    "causal",
    "deep finite mask",
    "bias",
    "row and head",
    "gate",
    "log sum",
    "shared keys",
    "odd lengths",
    "sum of biased",
    "soft cap",
    "window",
    "half causal",
    "squared",
    "two products",
    "odd mask",
    "mask by head",
    "mask by key",
    "mask by row and key",
]
"""`tests/aot` compiles all of them."""


@pytest.mark.deep  # `test_two_warpgroups_and_what_runs_instead` and `test_split` compare results, too
@pytest.mark.parametrize(("name", "dtype"), [*((n, "bfloat16") for n in INTERPRETED), ("plain", "float16")])
def test_kernels_compute_what_the_function_does(interpreted, name, dtype):
    variant = VARIANTS[name]
    arrays = variant.arrays(dtype)
    exact = in_float64(variant.function, arrays)
    own = jax.tree.leaves(jax.jit(variant.function)(*arrays))
    for ours, theirs, truth in zip(interpreted(variant.function, arrays), own, exact, strict=True):
        ulp = float(jnp.finfo(theirs.dtype).eps) * np.abs(truth).max()
        errors = [np.abs(np.asarray(x, np.float64).reshape(truth.shape) - truth).max() for x in (ours, theirs)]
        assert errors[0] <= 1.5 * errors[1] + ulp


@pytest.mark.deep  # the default tier copies such vectors where `test_every_copy_of_a_vector_begins_where_...` does
def test_vectors_of_two_warpgroups(interpreted):
    """Each has its own rows of a mask, in slots that are longer than they."""
    variant = VARIANTS["mask by row and key"]
    arrays = variant.arrays("bfloat16")
    own = {"tiles": (("i", 128), ("m", 64)), "warps": 8}
    _, kernel = kernel_of(variant.function, arrays, **own)
    assert (kernel.target.name, kernel.program.warps) == (TARGET, 8), kernel.declined
    (exact,) = in_float64(variant.function, arrays)
    ours = interpreted(variant.function, arrays, **own)[0]
    np.testing.assert_allclose(np.asarray(ours, np.float64).reshape(exact.shape), exact, atol=0.02, rtol=0.02)


@pytest.mark.deep  # `test_two_warpgroups_and_what_runs_instead` has several blocks for each instance, too
@pytest.mark.parametrize(
    ("name", "queries", "keys"),
    [("causal", 448, 448), ("window", 448, 448), ("log sum", 300, 130), ("shared keys", 300, 100), ("gate", 160, 192)],
)
def test_instances_that_run_several_blocks(interpreted, monkeypatch, name, queries, keys):
    """Slots, barriers and turns go on from block to block."""
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 2)
    variant = replace(VARIANTS[name], queries=queries, keys=keys)
    arrays = variant.arrays("bfloat16")
    for ours, exact in zip(interpreted(variant.function, arrays), in_float64(variant.function, arrays), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64).reshape(exact.shape), exact, atol=0.02, rtol=0.02)


@pytest.mark.deep
@pytest.mark.parametrize(
    "switches",
    [
        {"ahead": True, "alternate": False},
        {"ahead": True},
        {"alternate": False},
        {"persistent": False},
        {"stages": 1, "ahead": True},
        {"interleave": 2},
    ],
    ids=str,
)
def test_switches_do_not_change_the_result(interpreted, monkeypatch, switches):
    """With one stage, warpgroups neither take turns nor look ahead: they would wait for each other."""
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 3)
    everything = placement.choose
    monkeypatch.setattr(placement, "choose", lambda *args: [replace(s, **switches) for s in everything(*args)])
    arrays = replace(VARIANTS["causal"], queries=448, keys=448).arrays("bfloat16")
    (ours,) = interpreted(causal, arrays)
    (exact,) = in_float64(causal, arrays)
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=0.02, rtol=0.02)


@pytest.mark.deep  # `test_two_warpgroups_and_what_runs_instead` compares results; parts are split in `test_cluster_gpu.py`
@pytest.mark.parametrize("name", ["causal", "log sum"])
def test_split(interpreted, monkeypatch, name):
    """Each part's state, some of parts that see nothing, combined by a kernel of another target."""
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 3)
    monkeypatch.setitem(execution._EMITTERS, "triton", interpret.run)
    variant = replace(VARIANTS[name], queries=160, keys=400)
    arrays = variant.arrays("bfloat16")
    results = interpreted(variant.function, arrays, parts=3)
    for ours, exact in zip(results, in_float64(variant.function, arrays), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64).reshape(exact.shape), exact, atol=0.02, rtol=0.02)


@pytest.mark.deep
@pytest.mark.parametrize("queries", [256, 300])
def test_states_without_a_buffer_leave_from_registers(interpreted, monkeypatch, queries):
    """Sums in float32 are as large as both tiles of keys."""
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 2)
    monkeypatch.setitem(execution._EMITTERS, "triton", interpret.run)
    arrays = replace(VARIANTS["plain"], queries=queries, keys=512, sizes=(128, 128)).arrays("bfloat16")
    rolled = kernel_of(plain, arrays)[1].schedule.rolled.name
    options = {"parts": 2, "tiles": (("i", 128), (rolled, 128))}
    program = kernel_of(plain, arrays, **options)[1].program
    shape = mosaic_rules.examine(program)
    assert len(mosaic_space.direct(program, shape)) == 1
    assert mosaic_space.shared_bytes(program, shape) <= mosaic_space.SHARED_BYTES
    (ours,) = interpreted(plain, arrays, **options)
    (exact,) = in_float64(plain, arrays)
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=0.02, rtol=0.02)


@pytest.mark.deep  # `test_two_warpgroups_and_what_runs_instead` has rows of large scores, too
@pytest.mark.parametrize(("name", "size"), [("plain", 2.0**24), ("causal", 2.0**40), ("log sum", 2.0**80)])
def test_rows_with_large_scores(interpreted, monkeypatch, name, size):
    """Products that are not rounded before a difference would overflow: the blocks run again with those that are."""
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 2)
    variant = replace(VARIANTS[name], queries=300, keys=260)
    q, *rest = variant.arrays("bfloat16")
    arrays = [q.at[:, 40:50].multiply(size).at[:, 290].multiply(-size), *rest]
    for ours, exact in zip(interpreted(variant.function, arrays), in_float64(variant.function, arrays), strict=True):
        assert np.isfinite(exact).all()
        np.testing.assert_allclose(np.asarray(ours, np.float64).reshape(exact.shape), exact, atol=0.02, rtol=0.02)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["causal", "log sum"])
def test_parts_with_large_scores(interpreted, monkeypatch, name):
    """Some blocks' states come from rounded products, others' do not."""
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 100)
    monkeypatch.setitem(execution._EMITTERS, "triton", interpret.run)
    variant = replace(VARIANTS[name], queries=192, keys=400)
    q, k, v = variant.arrays("bfloat16")
    arrays = [q.at[70:100].multiply(2.0**10), k.at[140:250].multiply(2.0**20), v]
    assert kernel_of(variant.function, arrays, parts=3)[1].program.instead is not None
    results = interpreted(variant.function, arrays, parts=3)
    for ours, exact in zip(results, in_float64(variant.function, arrays), strict=True):
        assert np.isfinite(exact).all()
        np.testing.assert_allclose(np.asarray(ours, np.float64).reshape(exact.shape), exact, atol=0.02, rtol=0.02)


def after_a_while(q, k, v):
    """Rows without keys come first, and blocks of them make no trip."""
    s = scores(q, k)
    i, j = jnp.arange(s.shape[1])[:, None], jnp.arange(s.shape[2])
    s = jnp.where(j <= i - 140, s, -jnp.inf)
    m = s.max(-1, keepdims=True)
    p = jnp.exp(s - jnp.where(jnp.isfinite(m), m, 0.0))
    total = p.sum(-1)
    out = jnp.einsum("hij,jhd->ihd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / jnp.where(total == 0, 1.0, total).T[..., None]).astype(v.dtype)


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize(
    ("name", "size", "switches"),
    [
        ("causal", 64, {"eager": True, "alternate": True}),
        ("causal", 64, {"eager": True, "alternate": True, "persistent": False}),
        ("causal", 64, {"ahead": True}),
        ("causal", 64, {"eager": True, "alternate": True, "stages": 1}),
        ("window", 64, {"eager": True, "alternate": True}),
        ("after a while", 64, {"eager": True, "alternate": True}),
        ("after a while", 64, {"ahead": True}),
        ("log sum", 224, {"ahead": True}),  # results leave through the queries' buffer
    ],
)
def test_two_warpgroups_and_what_runs_instead(interpreted, monkeypatch, name, size, switches):
    """Some rows are large; slots and turns go on from the first program to the other one."""
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 2)
    everything, rest = (
        placement.choose,
        {"alternate": False, "ahead": False, "eager": False, "persistent": True, "stages": 2},
    )

    def chosen(*args):
        for s in everything(*args):
            grid = tuple((a, 128 if t > 1 else t) for a, t in s.grid)
            yield replace(s, grid=grid, warps=8, rolled_tile=64, **rest | switches)

    monkeypatch.setattr(placement, "choose", chosen)
    variant = replace(VARIANTS.get(name, VARIANTS["causal"]), queries=280, keys=200, sizes=(size, size))
    function = after_a_while if name == "after a while" else variant.function
    q, *others = variant.arrays("bfloat16")
    arrays = [q.at[240:250].multiply(2.0**40), *others]
    _, kernel = kernel_of(function, arrays)
    assert kernel.program.instead is not None
    for ours, exact in zip(interpreted(function, arrays), in_float64(function, arrays), strict=True):
        largest = np.nanmax(np.abs(exact))
        np.testing.assert_allclose(
            np.asarray(ours, np.float64).reshape(exact.shape), exact, atol=0.02 * largest, rtol=0.02
        )


def test_the_default_for_hopper(monkeypatch):
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in VARIANTS["plain"].arrays("bfloat16")]
    for capabilities, kernels in (({"9.0"}, (1, 0)), ({"8.0"}, (0, 1)), ({"9.0", "8.0"}, (0, 1)), (set(), (0, 1))):
        monkeypatch.setattr(at_hand, "_capabilities", lambda found=capabilities: frozenset(found))
        text = h100.lower(pf.fuse(plain), arrays).as_text()
        assert (len(re.findall(r"custom_call @mosaic_gpu", text)), h100.triton_calls(text)) == kernels


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_other_gpus_are_refused(monkeypatch, capability):
    monkeypatch.setattr(at_hand, "_capabilities", lambda: frozenset({capability}))
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in VARIANTS["plain"].arrays("bfloat16")]
    with pytest.raises(
        pf.TargetError, match=f"compute capability 9.0, but here are some of {capability}: choose target=None"
    ):
        h100.lower(pf.fuse(plain, target=TARGET), arrays)


def test_a_kernel_that_does_not_lower_is_replaced(monkeypatch):
    """Unless its target was asked for."""

    def broken(program, inputs):
        raise ValueError("K must be a multiple of 64")

    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in VARIANTS["plain"].arrays("bfloat16")]
    monkeypatch.setattr(at_hand, "_capabilities", lambda: frozenset({"9.0"}))
    monkeypatch.setitem(execution._EMITTERS, TARGET, broken)
    with pytest.warns(UserWarning, match=r"no kernel of mosaic_gpu could be built.*K must be.*triton is used instead"):
        text = h100.lower(pf.fuse(plain), arrays).as_text()
    assert h100.triton_calls(text) == 1
    with pytest.raises(ValueError, match="K must be"):
        h100.lower(pf.fuse(plain, target=TARGET), arrays)


@pytest.mark.deep  # `test_the_default_for_hopper` lowers one of them
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_lowers_to_one_kernel(name):
    variant = VARIANTS[name]
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in variant.arrays("bfloat16")]
    _, kernel = kernel_of(variant.function, arrays)
    text = h100.lower(pf.fuse(variant.function, target=TARGET), arrays).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == (kernel.target.name == TARGET)
    assert h100.triton_calls(text) == (kernel.target.name == "triton")
    assert kernel.target.name == ("triton" if name == "few" else TARGET), kernel.declined


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", ["half scores", "half causal"])
def test_rows_of_half_precision_are_carried_while_warpgroups_take_turns(name, dtype="float16"):
    """What the loop carries passes a barrier of the optimiser, which takes no single half-precision value of a register.

    bfloat16 is computed in float32."""
    variant = replace(VARIANTS[name], heads=(16, 16), queries=2048, keys=2048)
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(lambda: variant.arrays(dtype))]
    _, kernel = kernel_of(variant.function, arrays)
    assert kernel.target.name == TARGET, kernel.declined
    loop = mosaic_rules.examine(kernel.program).loop
    assert any(c.dtype == dtype for c in loop.carries)
    assert (kernel.program.alternate, kernel.program.warps) == (True, 8)
    text = h100.lower(pf.fuse(variant.function, target=TARGET), arrays).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1


def test_a_missing_wait_is_a_race(interpreted, monkeypatch):
    arrays = VARIANTS["plain"].arrays("bfloat16")
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *args, **kwargs: None)
    with pytest.raises(Exception, match=r"(?i)race"):
        interpreted(plain, arrays)


def reason(function, *shapes, dtype="bfloat16", **options):
    _, kernel = kernel_of(function, [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes], **options)
    assert kernel.target.name == "triton"
    return kernel.declined[0]


QKV = ((256, 2, 64), (256, 2, 64), (256, 2, 64))


def test_operands_of_a_product_have_one_layout_in_shared_memory():
    """Rows of 128 bytes and of 64: Mosaic finds no layout for their product."""

    def two(x, w, b):
        return x @ w, x @ b

    assert "swizzles of 128 and 64 bytes" in reason(two, (64, 4096), (4096, 256), (4096, 32), warps=4)
    _, kernel = kernel_of(two, [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 4096), (4096, 256), (4096, 64))])
    assert kernel.target.name == "mosaic_gpu"


def test_what_does_not_fit_goes_to_another_target_with_the_reason():
    assert "multiplies float32" in reason(plain, *QKV, dtype="float32")
    rolled = kernel_of(plain, [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in QKV])[1].schedule.rolled.name
    assert "no shape of wgmma" in reason(plain, *QKV, tiles=((rolled, 96),))
    assert "no multiple of 16" in reason(plain, *(((256, 1, 61),) * 3))
    assert "loops" in reason(lambda x: jax.nn.softmax(x, axis=-1), (256, 4096))
    explained = str(pf.fuse(plain).explain(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in QKV), target=TARGET))
    assert "emitted for triton; mosaic_gpu: " in explained


def test_carried_values_that_no_register_layout_holds_are_refused():
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in QKV]
    program = kernel_of(VARIANTS["half scores"].function, arrays)[1].program
    shape = mosaic_rules.examine(program)

    def problem(change):
        carries = tuple(change(c) for c in shape.loop.carries)
        body = tuple(replace(s, carries=carries) if s is shape.loop else s for s in program.body)
        return mosaic_rules.problem(replace(program, body=body, instead=None))

    assert problem(lambda c: c) is None
    assert "carried as int32" in problem(lambda c: replace(c, dtype="int32"))
    assert "carried as bfloat16" in problem(lambda c: replace(c, dtype="bfloat16") if len(c.axes) == 3 else c)
    assert "over []" in problem(lambda c: replace(c, axes=()))


def test_an_emitter_refuses_what_the_rules_refuse():
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in QKV]
    _, kernel = kernel_of(plain, arrays)
    assert mosaic_rules.problem(kernel.program) is not None
    with pytest.raises(pf.TargetError, match="Mosaic GPU cannot run"):
        mosaic_gpu.run(kernel.program, {})


def capped_with_log_sum(q, k, v):
    s = 20 * jnp.tanh(scores(q, k) / 20)
    return weighted(s, v), jax.nn.logsumexp(s, axis=-1)


def through_tanh(q, k, v):
    return jnp.tanh(plain(q, k, v))


def gated_by_tanh(q, k, v):
    return plain(q, k, v) * jnp.tanh(q)


@pytest.mark.parametrize(
    ("function", "rough"),
    [(capped, True), (capped_with_log_sum, False), (through_tanh, False), (gated_by_tanh, False), (plain, None)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_rough_instructions_only_where_results_are_rounded(function, rough):
    plan, kernel = kernel_of(function, [jax.ShapeDtypeStruct(s, jnp.float16) for s in QKV])
    assert kernel.target.name == TARGET, kernel.declined
    assert mosaic_rules.may_approximate(kernel.program) == (rough is not False)
    assert (mosaic_rules.ROUGH_CONDITION in plan.conditions) == bool(rough)


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize(
    ("dtype", "features", "tile"),
    [("bool", 64, 256), ("bool", 64, 64), ("bool", 16, 16), ("int32", 16, 16), ("bfloat16", 32, 32)],
)
def test_every_copy_of_a_vector_begins_where_the_copy_engine_can_write(monkeypatch, dtype, features, tile):
    """At a multiple of 128 bytes: a vector of fewer would put the next slot between them, which is a misaligned address on the
    device, and nothing before notices."""
    made, own = [], plgpu.SMEM

    def recorded(shape, dtype, **more):
        made.append((shape, jnp.dtype(dtype).itemsize))
        return own(shape, dtype, **more)

    monkeypatch.setattr(plgpu, "SMEM", recorded)

    def function(q, k, v, rows, keys):
        s = scores(q, k)
        there = (rows[:, None] * keys).astype(jnp.float32) > 0 if dtype != "bool" else rows[:, None] & keys
        return weighted(jnp.where(there, s, -1e9), v)

    half = jax.ShapeDtypeStruct((2048, 16, features), jnp.bfloat16)
    arrays = [half] * 3 + [jax.ShapeDtypeStruct((2048,), jnp.dtype(dtype))] * 2
    _, kernel = kernel_of(function, arrays)
    rolled = kernel.schedule.rolled.name
    options = pf.FuseOptions(target=TARGET, tiles=((rolled, tile),))
    (kernel,) = pf.fuse(function, options=options).explain(*arrays).kernels
    assert kernel.target.name == TARGET, kernel.declined
    text = h100.lower(pf.fuse(function, options=options), arrays).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    vectors = [(shape, item) for shape, item in made if len(shape) == 2]
    assert len(vectors) >= 2
    assert max(shape[0] for shape, _ in vectors) > 1
    for (_, *size), item in made:
        assert np.prod(size) * item % 128 == 0, size


def test_space_is_counted():
    arrays = [jax.ShapeDtypeStruct((1024, 2, 128), jnp.bfloat16)] * 3
    _, kernel = kernel_of(causal, arrays)
    shape = mosaic_rules.examine(kernel.program)
    rows, keys = 64 * 128 * 2, 128 * 128 * 2  # few blocks: small ones
    barriers = 8 * (2 * (2 * 2 + 1) + 1 + 1)  # two slots of keys and of values, one of queries, and two more
    expected = 2 * rows + 2 * 2 * keys + mosaic_space.RESERVED_BYTES + 1024 + barriers
    assert mosaic_space.shared_bytes(kernel.program, shape) == expected
    assert not mosaic_space.staging(kernel.program, shape)
    assert mosaic_rules.registers(kernel.program, shape) < mosaic_rules.REGISTERS_PER_THREAD
    rolled = kernel.schedule.rolled.name
    _, kernel = kernel_of(causal, arrays, tiles=(("i", 128), (rolled, 256)), stages=4)
    assert kernel.target.name == "triton"
    assert "shared memory" in kernel.declined[0]


def test_a_product_that_is_only_added_accumulates_in_place():
    arrays = [jax.ShapeDtypeStruct((256, 2, 64), jnp.bfloat16)] * 3
    _, kernel = kernel_of(causal, arrays)
    shape = mosaic_rules.examine(kernel.program)
    (target,) = mosaic_shape.accumulated(shape, shape.body).values()
    assert target[0].name.endswith(".acc0.next")


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", ["window", "gate"])
def test_masks_in_several_segments_are_proven(name):
    variant = VARIANTS[name]
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in variant.arrays("bfloat16")]
    report = pf.verify(pf.fuse(variant.function), *arrays, target=TARGET, delta=1e-4)
    assert report.equivalent, report
