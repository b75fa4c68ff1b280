"""The emitter for Hopper without one: kernels run in Mosaic's interpreter, which looks for races, and lower for CUDA.

`tests/aot` compiles them through ptxas.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallasfuse as pf
from benchmarks import h100
from pallasfuse import pipeline
from pallasfuse.pallas_backend import mosaic_gpu, mosaic_rules
from tests.pallas_backend.variants import VARIANTS, causal, plain

TARGET = "mosaic_gpu"


def kernel_of(function, arrays, **options):
    plan = pf.fuse(function, options=pf.FuseOptions(**options)).explain(*arrays, target=TARGET)
    (kernel,) = plan.kernels
    return plan, kernel


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """Runs the only kernel of a function, and the rest of it, on the CPU; a race is an error."""
    interpret = functools.partial(mosaic_gpu.run, interpret=True)
    monkeypatch.setitem(pipeline._EMITTERS, TARGET, interpret)

    def run(function, arrays):
        plan, kernel = kernel_of(function, arrays)
        assert kernel.target.name == TARGET, kernel.declined
        results = jax.block_until_ready(pipeline.execute(plan, [*plan.converted.jaxpr.consts, *arrays]))
        if "RACE DETECTED" in capfd.readouterr().out:
            raise RuntimeError("a race")
        return results

    return run


def in_float64(function, arrays):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in jax.tree.leaves(function(*(np.asarray(a, np.float64) for a in arrays)))]


INTERPRETED = ["causal", "deep finite mask", "bias", "row and head", "gate", "log sum", "shared keys", "odd lengths"]
"""`tests/aot` compiles all of them."""


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


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_lowers_to_one_kernel(name):
    variant = VARIANTS[name]
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in variant.arrays("bfloat16")]
    _, kernel = kernel_of(variant.function, arrays)
    text = h100.lower(pf.fuse(variant.function, target=TARGET), arrays).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == (kernel.target.name == TARGET)
    assert h100.triton_calls(text) == (kernel.target.name == "triton")
    assert kernel.target.name == ("triton" if name == "few" else TARGET), kernel.declined


def test_a_missing_wait_is_a_race(interpreted, monkeypatch):
    arrays = VARIANTS["plain"].arrays("bfloat16")
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *args, **kwargs: None)
    with pytest.raises(Exception, match=r"(?i)race"):
        interpreted(plain, arrays)


def reason(function, *shapes, dtype="bfloat16", **options):
    _, kernel = kernel_of(function, [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes], **options)
    assert kernel.target.name == "triton"
    (line,) = kernel.declined
    return line


QKV = ((256, 2, 64), (256, 2, 64), (256, 2, 64))


def test_what_does_not_fit_goes_to_another_target_with_the_reason():
    assert "multiplies float32" in reason(plain, *QKV, dtype="float32")
    assert "no multiple of 16" in reason(plain, *(((256, 1, 61),) * 3))
    assert "loops" in reason(lambda x: jax.nn.softmax(x, axis=-1), (256, 4096))
    explained = str(pf.fuse(plain).explain(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in QKV), target=TARGET))
    assert "emitted for triton; mosaic_gpu: " in explained


def test_an_emitter_refuses_what_the_rules_refuse():
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in QKV]
    _, kernel = kernel_of(plain, arrays)
    assert mosaic_rules.problem(kernel.program) is not None
    with pytest.raises(pf.TargetError, match="Mosaic GPU cannot run"):
        mosaic_gpu.run(kernel.program, {})


def test_space_is_counted():
    arrays = [jax.ShapeDtypeStruct((1024, 2, 128), jnp.bfloat16)] * 3
    _, kernel = kernel_of(causal, arrays)
    shape = mosaic_rules.examine(kernel.program)
    rows, keys = 128 * 128 * 2, 128 * 128 * 2
    assert mosaic_rules.shared_bytes(kernel.program, shape) == rows + 2 * 2 * keys + mosaic_rules.RESERVED_BYTES
    assert mosaic_rules.registers(kernel.program, shape) < mosaic_rules.REGISTERS_PER_THREAD
    rolled = kernel.schedule.rolled.name
    _, kernel = kernel_of(causal, arrays, tiles=(("i", 128), (rolled, 256)), stages=4)
    assert kernel.target.name == "triton"
    assert "shared memory" in kernel.declined[0]


def test_a_product_that_is_only_added_accumulates_in_place():
    arrays = [jax.ShapeDtypeStruct((256, 2, 64), jnp.bfloat16)] * 3
    _, kernel = kernel_of(causal, arrays)
    shape = mosaic_rules.examine(kernel.program)
    (target,) = mosaic_rules.accumulated(shape.segment.body).values()
    assert target[0].name.endswith(".acc0.next")


@pytest.mark.parametrize("name", ["window", "gate"])
def test_masks_under_a_branch_are_proven(name):
    variant = VARIANTS[name]
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in variant.arrays("bfloat16")]
    report = pf.verify(pf.fuse(variant.function), *arrays, target=TARGET)
    assert report.equivalent, report
