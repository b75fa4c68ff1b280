"""Kernels of a GPU that are lowered once for all programs: the same kernels, and none where types say more than shapes."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

import pallasfuse as pf
from pallasfuse import lowered_once

X = jax.ShapeDtypeStruct((512, 256), "float32")
QKV = [jax.ShapeDtypeStruct((512, 64), "float16")] * 3
H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 8, axis=-1) @ v


@pytest.fixture
def kernels(monkeypatch):
    """No kernel was exported so far."""
    found = lowered_once._Kernels()
    monkeypatch.setattr(lowered_once, "_kernels", found)
    return found


@pytest.fixture
def at_hand(monkeypatch, kernels):
    """As with an H100 at hand: programs are lowered for it here, and are not run."""
    monkeypatch.setattr(lowered_once, "_is_at_hand", lambda arrays: True)
    return kernels


def lowered(function, *types):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))


def custom_calls(operation):
    """Yields the custom calls inside an operation of MLIR."""
    for block in (b for region in operation.regions for b in region):
        for inner in (o.operation for o in block):
            if inner.name == "stablehlo.custom_call":
                yield inner
            yield from custom_calls(inner)


def kernels_of(program):
    """Returns what a lowered program hands to the runtime for its kernels, but for the lines of code that they come from."""
    found = []
    for call in custom_calls(program.compiler_ir("stablehlo").operation):
        attributes = {
            name: str(call.attributes[name]) for name in ("call_target_name", "operand_layouts", "result_layouts")
        }
        for entry in call.attributes["mhlo.backend_config"]:
            if entry.name == "ir":
                context = ir.Context()
                triton.register_dialect(context)
                module = ir.Module.parse(ir.StringAttr(entry.attr).value_bytes, context)
                attributes["ir"] = module.operation.get_asm(enable_debug_info=False)
            elif entry.name == "module":
                attributes["bytes"] = len(ir.StringAttr(entry.attr).value_bytes)
            elif entry.name != "kernel_hash":
                attributes[entry.name] = str(entry.attr)
        found.append(attributes)
    return found


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(("target", "function", "types"), [
    ("triton", softmax, [X]), ("mosaic_gpu", attention, QKV), ("triton", attention, QKV),
])  # fmt: skip
def test_programs_call_the_kernel_that_they_would_have(monkeypatch, kernels, target, function, types):
    direct = lowered(pf.fuse(function, target=target), *types)
    assert not kernels.known  # no GPU is at hand
    monkeypatch.setattr(lowered_once, "_is_at_hand", lambda arrays: True)
    once = lowered(pf.fuse(function, target=target), *types)
    assert len(kernels.known) == 1
    assert "call_exported" in once.as_text()
    assert kernels_of(once) == kernels_of(direct)
    assert len(kernels_of(once)) == 1


def test_a_kernel_is_lowered_once_for_several_programs(monkeypatch, at_hand):
    exported, original = [], lowered_once._exported
    monkeypatch.setattr(lowered_once, "_exported", lambda *args: exported.append(args[1]) or original(*args))
    fused = pf.fuse(softmax, target="triton")
    texts = {lowered(lambda x, n=n: fused(x) + n, X).as_text() for n in range(3)}
    assert len(texts) == 3
    assert len(exported) == 1
    lowered(fused, jax.ShapeDtypeStruct((512, 128), "float32"))
    assert len(exported) == 2


def test_what_users_export_has_kernels_for_other_versions_of_jax(at_hand):
    """JAX lowers them otherwise, and a function that was traced for another program is no answer."""
    fused = pf.fuse(attention, target="mosaic_gpu")
    assert "call_exported" in lowered(fused, *QKV).as_text()
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        module = jax.export.export(jax.jit(fused), platforms=("cuda",))(*QKV).mlir_module()
    assert "call_exported" not in module
    assert module.count("mosaic_gpu") > 0
    assert len(at_hand.known) == 1


def test_equal_kernels_of_what_users_export_are_their_own_too(at_hand):
    """They are calls of one function, another one for each purpose."""

    def layers(x, w):
        for _ in range(12):
            x = jnp.tanh(x + jax.nn.softmax(x @ w @ x.T, -1) @ x)
        return x

    fused = pf.fuse(layers, target="triton")
    arguments = jax.ShapeDtypeStruct((2048, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    assert fused.explain(*arguments).repeated

    def export():
        unchecked = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
            return jax.export.export(jax.jit(fused), platforms=("cuda",), disabled_checks=unchecked)(
                *arguments
            ).mlir_module()

    assert "call_exported" not in export()
    assert "call_exported" in lowered(fused, *arguments).as_text()
    assert "call_exported" not in export()


def test_what_cannot_be_exported_is_lowered_as_it_is(monkeypatch, at_hand):
    def fails(*args, **how):
        raise ValueError("not in this version")

    monkeypatch.setattr(lowered_once.export, "export", fails)
    program = lowered(pf.fuse(softmax, target="triton"), X)
    assert "call_exported" not in program.as_text()
    assert len(kernels_of(program)) == 1


# --- who runs what is exported


class Phase(SimpleNamespace):
    """Stands for a phase of a kernel that reads two arrays."""


def phase(*, writes_kernels=True):
    program = SimpleNamespace(given=[SimpleNamespace(name="x"), SimpleNamespace(name="y")])
    return Phase(program=program, target=SimpleNamespace(writes_kernels=writes_kernels))


PHASE = phase()


def sums(phases, arrays):
    return {"sum": arrays["x"] + arrays["y"], "product": arrays["x"] * arrays["y"]}


@pytest.fixture
def on_cpu(monkeypatch, at_hand):
    monkeypatch.setattr(lowered_once, "_PLATFORM", "cpu")
    return at_hand


def test_what_is_exported_stores_the_same(on_cpu):
    x, y = np.arange(4.0, dtype=np.float32), np.ones(4, np.float32)
    program = jax.make_jaxpr(lambda y, x: lowered_once.run([PHASE], {"y": y, "x": x}, sums))(y, x)
    assert "call_exported" in str(program)
    for _ in range(2):
        found = lowered_once.run([PHASE], {"x": x, "y": y}, sums)
        assert list(found) == ["sum", "product"]
        np.testing.assert_array_equal(found["sum"], x + y)
        np.testing.assert_array_equal(found["product"], x)


def test_other_types_and_settings_are_other_kernels(on_cpu):
    x = jnp.arange(4, dtype=jnp.int16)
    lowered_once.run([PHASE], {"x": x, "y": x}, sums)
    with jax.default_matmul_precision("highest"):
        lowered_once.run([PHASE], {"x": x, "y": x}, sums)
    with jax.enable_x64(True):
        lowered_once.run([PHASE], {"x": x, "y": x}, sums)
    found = lowered_once.run([PHASE], {"x": x.astype(jnp.int8), "y": x.astype(jnp.int8)}, sums)
    assert len(on_cpu.known) == 4
    assert found["sum"].dtype == jnp.int8


def test_kernels_of_equal_types_are_not_taken_for_each_other(on_cpu):
    x = np.arange(4.0, dtype=np.float32)

    def product(phases, arrays):
        return {"sum": arrays["x"] * arrays["y"]}

    lowered_once.run([PHASE], {"x": x, "y": x}, sums)
    found = lowered_once.run([phase()], {"x": x, "y": x}, product)
    np.testing.assert_array_equal(found["sum"], x * x)


@pytest.mark.parametrize("fails", [False, True])
def test_phases_live_as_long_as_their_kernel_is_kept(on_cpu, monkeypatch, fails):
    """Another phase may get the identity of one that is gone."""
    if fails:
        monkeypatch.setattr(lowered_once.export, "export", lambda *_, **__: 1 / 0)
    gc.freeze()  # what other tests have left is not looked through
    x, own = np.ones(4, np.float32), phase()
    alive = weakref.ref(own)
    lowered_once.run([own], {"x": x, "y": x}, sums)
    del own
    gc.collect()
    assert alive() is not None
    on_cpu.known.clear()
    gc.collect()
    assert alive() is None


def test_only_the_last_kernels_are_kept(monkeypatch, on_cpu):
    monkeypatch.setattr(lowered_once, "_MOST", 2)
    arrays = [np.ones(n, np.float32) for n in (1, 2, 1, 3)]
    for x in arrays:
        lowered_once.run([PHASE], {"x": x, "y": x}, sums)
    assert [key[2][0][0] for key in on_cpu.known] == [(1,), (3,)]


def test_who_asks_while_it_is_exported_waits(kernels):
    together, made = Barrier(4, timeout=20), []

    def ask(_):
        together.wait()
        return kernels.get("kernel", lambda: made.append(1) or "exported")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["exported"] * 4
    assert made == [1]


def test_an_interrupted_export_keeps_nobody_waiting(kernels):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kernels.get("kernel", interrupted)
    assert kernels.get("kernel", lambda: "exported") == "exported"


def test_kernels_of_xla_are_not_exported(at_hand):
    x = np.ones(4, np.float32)
    lowered_once.run([PHASE, phase(writes_kernels=False)], {"x": x, "y": x}, sums)
    assert not at_hand.known


@pytest.mark.parametrize(("platform", "rocm"), [("gpu", False), ("gpu", True), ("cpu", False)])
def test_meshes_and_devices_by_name_ask_for_kernels_of_their_own(monkeypatch, platform, rocm):
    x = jnp.ones(4)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(lowered_once._compat, "is_rocm", lambda: rocm)
    assert lowered_once._is_at_hand([x]) == (platform == "gpu" and not rocm)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        assert not lowered_once._is_at_hand([x])
    told = []
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    inside = jax.shard_map(
        lambda x: told.append(lowered_once._is_at_hand([x])) or x, mesh=mesh, in_specs=spec, out_specs=spec
    )
    jax.eval_shape(inside, x)
    assert told == [False]


def test_no_module_of_tritons_dialect_is_searched_for(monkeypatch):
    searched = []

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            searched.append(name)

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    fused = pf.fuse(softmax, target="triton")
    lowered(fused, X)
    lowered(lambda x: fused(x) + 1, X)
    assert len([name for name in searched if name.endswith(".tt")]) <= 1  # before there is one
