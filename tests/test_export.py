"""Exported programs, and programs for machines that are not at hand."""

import re
import warnings

import jax
import numpy as np
import pytest
from jax import export

import pallasfuse as pf
from tests.programs_by_name import attention, softmax

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without a GPU")

X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")
QKV = tuple(np.random.default_rng(n).normal(size=(64, 32)).astype("float32") for n in range(3))


def same(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def exported(function, *args, **how):
    """The exported program, and the warnings of making it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = export.export(jax.jit(function), **how)(*args)
    return result, [str(w.message) for w in caught if "Triton backend is deprecated" not in str(w.message)]


def calls_kernels(program):
    return re.search(r"custom_call @\S*(triton|mosaic_gpu)", program.mlir_module()) is not None


# --- symbolic shapes


def symbolic(text):
    return jax.ShapeDtypeStruct(export.symbolic_shape(text), "float32")


def test_symbolic_shapes_stay_with_xla_with_one_warning():
    fused = pf.fuse(softmax)
    program, told = exported(fused, symbolic("n, m"), platforms=("cpu", "tpu"))
    assert told == ["softmax is not fused for symbolic shapes: XLA compiles it as it is. Static shapes are fused."]
    same(program.call(X), softmax(X))
    same(program.call(X[:2, :3]), softmax(X[:2, :3]))
    program, told = exported(fused, symbolic("2*n, 7"))
    assert told == []
    same(program.call(X[:, :7]), softmax(X[:, :7]))


def test_symbolic_shapes_of_what_is_around_the_fused_function():
    def function(x):
        return jax.vmap(pf.fuse(softmax))(x), jax.grad(lambda x: (pf.fuse(softmax)(x) ** 2).sum())(x)

    program, _ = exported(function, symbolic("b, 6, 40"))
    for got, want in zip(program.call(X[None]), function(X[None]), strict=True):
        same(got, want)


def test_a_nested_function_for_symbolic_shapes():
    inner = pf.fuse(softmax)
    program, _ = exported(pf.fuse(lambda x: inner(x) * 2), symbolic("n, 40"))
    same(program.call(X), softmax(X) * 2)


@pytest.mark.parametrize("verify", [None, "stages"])
def test_the_plan_says_that_lengths_are_not_known(verify):
    plan = pf.fuse(softmax, options=pf.FuseOptions(verify=verify)).explain(symbolic("n, 40"))
    assert plan.kernels == ()
    assert {f.reason for f in plan.fallbacks} == {"the length n is not known yet: only static shapes are planned"}
    assert "only static shapes are planned" in str(plan)


def test_what_asks_for_a_plan_is_refused():
    with pytest.raises(pf.FusionError, match="only static shapes are planned"):
        exported(pf.fuse(softmax, strict=True), symbolic("n, 40"))
    with pytest.raises(pf.TraceError, match="static shapes"):
        pf.verify(pf.fuse(softmax), symbolic("n, 40"))
    with pytest.raises(pf.TraceError, match="static shapes"):
        pf.fold(lambda x: softmax(x).sum(1), axis=1).init(symbolic("n, 40"))


# --- other platforms


def test_the_exported_program_of_this_platform_is_fused():
    program, told = exported(pf.fuse(attention, options=pf.FuseOptions(tiles=(("l", 16),))), *QKV)
    assert told == []
    assert "while" in program.mlir_module()
    same(program.call(*QKV), attention(*QKV))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_for_a_gpu_that_is_not_at_hand_it_is_left_to_xla(platform):
    fused = pf.fuse(attention)
    program, told = exported(fused, *QKV, platforms=("cpu", platform))
    (message,) = told
    assert message.startswith(
        f"attention is lowered for {platform} without kernels, and left to XLA: no GPU is at hand"
    )
    assert not calls_kernels(program)
    same(program.call(*QKV), attention(*QKV))
    assert exported(fused, *QKV, platforms=(platform,))[1] == []


def test_nothing_is_said_where_there_would_be_no_kernel():
    program, told = exported(pf.fuse(lambda x: x + 1), X, platforms=("cuda",))
    assert told == []
    assert not calls_kernels(program)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("target", ["triton", "mosaic_gpu"])
def test_a_target_by_name_is_lowered_for_the_gpu_of_its_plan(target):
    arrays = [jax.ShapeDtypeStruct((512, 64), "float16")] * 3
    unchecked = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")] if target == "triton" else []
    fused = pf.fuse(attention, target=target)
    program, told = exported(fused, *arrays, platforms=("cuda",), disabled_checks=unchecked)
    assert told == []
    assert calls_kernels(program)
    lowered = jax.jit(fused).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call") == program.mlir_module().count("custom_call")


def on_h100():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def test_kernels_that_cannot_be_exported_are_left_out():
    """Without a target by name, JAX would refuse the whole program."""
    fused = pf.fuse(softmax)
    with on_h100():
        program, told = exported(fused, X, platforms=("cuda",))
        assert not calls_kernels(program)
        (message,) = told
        assert "jax.export gives no guarantee for kernels of Triton" in message
        assert jax.jit(fused).trace(X).lower(lowering_platforms=("cuda",)).as_text().count("triton") > 0


def test_a_gpu_of_another_maker_must_be_named():
    with pytest.raises(pf.TargetError, match=r"none of rocm is at hand.*use_abstract_mesh"):
        exported(pf.fuse(softmax, target="triton"), X, platforms=("rocm",))
