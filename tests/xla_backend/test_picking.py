"""One element of every row, and the product that the rows come from, inside a rolled loop: on the CPU, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import execution, pipeline
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.targets import XLA_CPU
from tests.losses import FORMS, LOSSES, difference, with_everything

FREE = XLA_CPU
"""Whatever is legal is fused."""
PRICED = pf.FuseOptions(price=True)
TILES = (("i", 4), ("j", 4), ("k", 4))


def fused(function, *arguments, tiles=TILES):
    """The results of a plan whose kernels cost nothing, and the plan."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    plan = pipeline.plan_converted(convert(jaxpr), FREE, pf.FuseOptions(tiles=tiles))
    (result,) = jax.jit(lambda *a: execution.execute(plan, [*jaxpr.consts, *a]))(*arguments)
    return np.asarray(result), plan


NUMBERS = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))


def taken(mode, fill=None):
    """What is taken by an index, beside the sum of the row's finite elements."""

    def function(x, n):
        element = lax.gather(x, n[:, None], NUMBERS, (1, 1), mode=mode, fill_value=fill)
        return jnp.stack([element, jnp.where(jnp.isfinite(x), x, 0.0).sum(-1)])

    return function


SPECIAL = np.random.default_rng(0).normal(size=(9, 13)).astype(np.float32)
SPECIAL[:, 3], SPECIAL[:, 5], SPECIAL[:, 8] = np.nan, np.inf, -np.inf


@pytest.mark.sampled(24, cover=("mode",))
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("index", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds", "fill", 0.1])
def test_every_mode_with_every_index(mode, index, dtype):
    """Indices in range, at the ends, outside, and at the limits of their type."""
    limits = np.iinfo(index)
    n = np.array([0, 12, 3, 5, 8, 13, limits.max, limits.min, limits.max // 2 + 4], index)
    with jax.enable_x64(True):
        function = taken(*(("fill", mode) if isinstance(mode, float) else (mode,)))
        x = jnp.asarray(SPECIAL, dtype)
        got, plan = fused(function, x, jnp.asarray(n))
        want = np.asarray(jax.jit(function)(x, n))
    assert any(f.nest.picks for k in plan.kernels for f in k.group.folds)
    got, want = got.astype(float), want.astype(float)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-2 if dtype != np.float32 else 1e-6)


BOUND = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Beside 1.5 times the plain error: of logits of about 10, a few roundings."""


def arguments(rows, features, columns, dtype):
    random = np.random.default_rng(rows)
    h, w = random.normal(size=(rows, features)), random.normal(size=(features, columns)) / features**0.5
    return jnp.asarray(h, dtype), jnp.asarray(3 * w, dtype), jnp.asarray(random.integers(0, columns, rows), jnp.int32)


@pytest.mark.sampled(15, cover=("dtype",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(9, 5, 13), (64, 1030, 67), (33, 1100, 300)], ids=str)
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_products_and_what_is_taken_of_them(function, shape, dtype):
    values = arguments(*shape, dtype)
    got, plan = fused(function, *values, tiles=(("i", 16), ("k", 32)))
    (kernel,) = plan.kernels
    assert plan.fallbacks == () and kernel.group.passes == 1 and len(kernel.group.inner) == 1
    with jax.enable_x64(True):
        h, w, n = (np.asarray(v, np.float64) if v.ndim == 2 else np.asarray(v) for v in values)
        want = np.asarray(function(h, w, n))
    plain = np.abs(np.asarray(jax.jit(function)(*values), np.float64) - want).max()
    assert np.abs(got.astype(np.float64) - want).max() <= max(BOUND[dtype], 1.5 * plain)


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_every_stage_is_proved(function):
    _, plan = fused(function, *arguments(64, 1030, 67, jnp.float32), tiles=(("i", 16), ("k", 32)))
    proof = pipeline.prove_plan(plan, delta=1e-4)
    assert proof.holds, (proof.counterexample, proof.uncovered)


def test_labels_outside_are_not_numbers():
    h, w, n = arguments(9, 5, 13, jnp.float32)
    got, _ = fused(difference, h, w, n.at[2].set(13).at[5].set(-14).at[6].set(-13))
    assert list(np.flatnonzero(np.isnan(got))) == [2, 5]


def test_the_product_is_never_in_memory():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 1280), (1280, 32768))]
    shapes.append(jax.ShapeDtypeStruct((512,), jnp.int32))
    ours, theirs = (jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
                    for f in (pf.fuse(with_everything, target="xla"), with_everything))  # fmt: skip
    assert ours < 0.05 * theirs


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(("target", "dtype"), [("mosaic_gpu", "float32"), ("triton", "bfloat16")])
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_on_a_gpu_xla_multiplies(function, target, dtype):
    """Where no kernel of ours takes the operands slice by slice."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in ((4096, 4096), (4096, 128256))]
    plan = pf.fuse(function, target=target).explain(*shapes, jax.ShapeDtypeStruct((4096,), jnp.int32))
    (kernel,) = plan.kernels
    assert (kernel.target.name, plan.fallbacks) == ("xla_gpu", ())
    assert kernel.declined[-1] == "triton: t0 sums 4096 elements, too many to keep inside a tile"
    tiles = kernel.tiles
    assert tiles["i"] == 4096 and 2 * 4096 * tiles["k"] < 0.05 * 4096 * 128256


def test_few_rows_are_left_to_xla():
    """Their product is the reading of the matrix, and slices of it would be copied."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 4096), (4096, 128256))]
    plan = pf.fuse(difference, target="triton", options=PRICED).explain(*shapes, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert "xla_gpu" not in {k.target.name for k in plan.kernels}
    assert "dot_general" in {f.operation for f in plan.fallbacks}


def two_pass(h, w):
    """The second sum needs the finished first one: the product would be computed twice."""
    logits = h @ w
    return jnp.round(logits / jnp.abs(logits).sum(-1, keepdims=True)).sum(-1)


def test_no_product_is_computed_twice():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 2048), (2048, 32768))]
    for target in ("xla", "triton"):
        plan = pf.fuse(two_pass, target=target, options=PRICED).explain(*shapes)
        assert all(not k.group.inner or k.group.passes == 1 for k in plan.kernels)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("target", "dtype"), [("xla", "float32"), ("mosaic_gpu", "bfloat16")])
@pytest.mark.parametrize("name", FORMS)
def test_other_forms_are_one_kernel(name, target, dtype):
    function, shapes, rows = FORMS[name]
    arrays = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
    plan = pf.fuse(function, target=target).explain(*arrays, jax.ShapeDtypeStruct(rows, jnp.int32))
    (kernel,) = plan.kernels
    assert plan.fallbacks == () and kernel.target.name == target
