"""Every kernel that a plan promises for a GPU lowers to one Triton call, on a machine without a GPU.

Lowering reaches Triton's intermediate language: it finds operations, types and tile sizes that the backend refuses.
`tests/aot` goes on to machine code.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from benchmarks import h100
from benchmarks.cases import ATTENTION, all_cases
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.tile_program import Reduce, every
from tests.elementwise_functions import ELEMENTWISE

DTYPES = ["float32", "float16", "bfloat16"]


def shapes(case, length, dtype, **options):
    return jax.eval_shape(lambda: case.arrays(length, jnp.dtype(dtype), **options))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def plan_and_calls(fused, arguments, static=()):
    """The plan for Triton, and the number of Triton calls in what is lowered for CUDA."""
    plan = fused.explain(*arguments, *static, target="triton")
    lowered = h100.lower(lambda *a: fused(*a, *static), arguments)
    return plan, h100.triton_calls(lowered.as_text())


def named(cases):
    return [pytest.param(case, id=case.name.replace(" ", "-")) for case in cases]


@pytest.mark.sampled(13, cover=("dtype", "length"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [61, 1000])
@pytest.mark.parametrize("case", named(all_cases()))
def test_every_case_is_one_kernel(case, length, dtype):
    plan, calls = plan_and_calls(case.fused, shapes(case, length, dtype), case.static)
    assert [str(fallback) for fallback in plan.fallbacks] == []
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))


@pytest.mark.sampled(6, cover=("dtype",))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", named(all_cases()))
def test_a_reduced_axis_of_one_element(case, dtype):
    plan, calls = plan_and_calls(case.fused, shapes(case, 1, dtype), case.static)
    assert calls == sum(len(k.phases) for k in plan.kernels)


@pytest.mark.sampled(18, cover=("dtype",))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("case", named(ATTENTION))
def test_head_dimensions(case, head_dim, dtype):
    case = dataclasses.replace(case.small(), head_dim=head_dim)
    plan, calls = plan_and_calls(case.fused, shapes(case, 61, dtype, batch=2), case.static)
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))


@pytest.mark.sampled(12, cover=("lengths",))
@pytest.mark.parametrize("lengths", [(1, 1000), (8, 1000), (61, 96)], ids=str)
@pytest.mark.parametrize("case", named(ATTENTION))
def test_fewer_queries_than_keys(case, lengths):
    queries, keys = lengths
    arguments = shapes(case.small(), queries, "float16", key_length=keys)
    plan, calls = plan_and_calls(case.fused, arguments, case.small().static)
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))


@pytest.mark.sampled(4, cover=("dtype",))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2, (1, 2), (0, 2)], ids=str)
def test_softmax_over_any_axis(axis, dtype):
    fused = pf.fuse(lambda x: jax.nn.softmax(x, axis=axis))
    plan, calls = plan_and_calls(fused, [array(5, 61, 130, dtype=dtype)])
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))


ROWS = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "log-sum-exp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "variance": lambda x: x.var(-1),
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6),
    "norm of rows, then softmax": lambda x: jax.nn.softmax(x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)),
    "smallest": lambda x: jnp.exp(x.min(-1, keepdims=True) - x).sum(-1),
    "count of the largest": lambda x: (x == x.max(-1, keepdims=True)).sum(-1),
}


@pytest.mark.sampled(18, cover=())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 61), (7, 1000), (2, 50257)], ids=str)
@pytest.mark.parametrize("name", list(ROWS))
def test_rows(name, shape, dtype):
    """Rows that fit into a tile, and rows that are rolled."""
    plan, calls = plan_and_calls(pf.fuse(ROWS[name]), [array(*shape, dtype=dtype)])
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))


def test_cross_entropy_by_gather():
    """The gather is a sum of the same kernel."""

    def loss(logits, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)

    plan, calls = plan_and_calls(pf.fuse(loss), [array(7, 32_000), array(7, dtype="int32")])
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))
    assert plan.fallbacks == ()


SCORES = {
    "bias of scores": (lambda s, b: s + b, array(200, 200)),
    "bias of keys": (lambda s, b: s + b[None, :], array(200)),
    "scalar": (lambda s, b: s * b, array()),
    "mask": (lambda s, b: jnp.where(b, s, -jnp.inf), array(200, 200, dtype="bool")),
    "segments": (lambda s, b: jnp.where(b[:, None] == b[None, :], s, -1e30), array(200, dtype="int32")),
}


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", list(SCORES))
def test_operands_of_scores(name):
    change, operand = SCORES[name]
    fused = pf.fuse(lambda q, k, v, b: jax.nn.softmax(change(q @ k.T / 8, b)) @ v)
    plan, calls = plan_and_calls(fused, [*[array(200, 64)] * 3, operand])
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool"])
def test_reductions_of_other_types(dtype):
    fused = pf.fuse(lambda x: jax.nn.softmax(x.astype(jnp.float32)))
    plan, calls = plan_and_calls(fused, [array(7, 130, dtype=dtype)])
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))


@pytest.mark.sampled(12, cover=("dtype",))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_an_operation_is_fused_or_left_to_xla_but_never_an_error(name, dtype):
    function = ELEMENTWISE[name]
    fused = pf.fuse(lambda x: jax.nn.softmax(function(x).astype(jnp.float32)))
    plan, calls = plan_and_calls(fused, [array(7, 1000, dtype=dtype)])
    assert calls == sum(len(k.phases) for k in plan.kernels)


REDUCTIONS = {
    "product": lambda x: (x / x.max(-1, keepdims=True)).prod(-1),
    "any": lambda x: (x >= x.max(-1, keepdims=True)).any(-1),
    "all": lambda x: (x <= x.max(-1, keepdims=True)).all(-1),
    "integers": lambda x: (x.astype(jnp.int32) - x.astype(jnp.int32).max(-1, keepdims=True)).sum(-1),
}


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("length", [130, 50257])
@pytest.mark.parametrize("name", list(REDUCTIONS))
def test_a_reduction_is_fused_or_left_to_xla_but_never_an_error(name, length):
    plan, calls = plan_and_calls(pf.fuse(REDUCTIONS[name]), [array(7, length)])
    assert calls == sum(len(k.phases) for k in plan.kernels)


def test_under_vmap():
    """The batched program is planned as a whole."""
    fused = pf.fuse(lambda q, k, v: jax.nn.softmax(q @ k.T / 8) @ v)
    arguments = [array(6, 200, 64)] * 3
    assert h100.triton_calls(h100.lower(jax.vmap(fused), arguments).as_text()) == 1


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 8) @ v


def axes_of(arguments):
    """The names of the row axis and of the rolled axis of `attention`."""
    schedule = pf.fuse(attention).explain(*arguments, target="triton").kernels[0].schedule
    return max(schedule.grid, key=lambda pair: pair[0].extent)[0].name, schedule.rolled.name


TILES = [(16, 16), (64, 32), (128, 128), (100, 48), (8, 8), (1, 64)]


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_options_override_the_schedule(tiles):
    arguments = [array(1000, 64)] * 3
    rows, rolled = axes_of(arguments)
    options = pf.FuseOptions(tiles=((rows, tiles[0]), (rolled, tiles[1])), warps=8, stages=1)
    fused = pf.fuse(attention, options=options)
    plan, calls = plan_and_calls(fused, arguments)
    assert (len(plan.kernels), calls) == (1, len(plan.kernels[0].phases))
    (kernel,) = plan.kernels
    assert (kernel.schedule.warps, kernel.schedule.stages) == (8, 1)
    text = h100.lower(fused, arguments).as_text()
    assert "num_warps = 8" in text and "num_stages = 1" in text


def test_an_xla_target_on_a_gpu_has_no_triton_call():
    arguments = [array(200, 64)] * 3
    fused = pf.fuse(attention, target="xla")
    assert h100.triton_calls(h100.lower(fused, arguments).as_text()) == 0


def test_the_triton_target_is_refused_on_a_cpu():
    x = jnp.ones((4, 8))
    with pytest.raises(pf.TargetError, match="runs on cuda"):
        pf.fuse(jax.nn.softmax, target="triton").trace(x).fuse().tile().lower()


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 4, 16, 24])
def test_pages_of_a_cache_are_read_in_the_kernel(size, dtype):
    """The table is an operand of the only kernel, and nothing is gathered before it."""

    def decode(q, k_pages, v_pages, table):
        keys, values = (p[table].reshape(table.shape[0], -1, *p.shape[2:]) for p in (k_pages, v_pages))
        scores = jnp.einsum("bhgd,bnhd->bhgn", q, keys, preferred_element_type=jnp.float32)
        return jnp.einsum("bhgn,bnhd->bhgd", jax.nn.softmax(scores).astype(values.dtype), values)

    pages, table = array(90, size, 2, 64, dtype=dtype), array(3, 30, dtype="int32")
    arguments = array(3, 2, 4, 64, dtype=dtype), pages, pages, table
    fused = pf.fuse(decode, options=pf.FuseOptions(target="triton", check=False, price=False))
    plan, calls = plan_and_calls(fused, arguments)
    (kernel,) = plan.kernels
    assert len(kernel.lookups) == 2
    assert calls == len(kernel.phases)
    assert "stablehlo.gather" not in h100.lower(fused, arguments).as_text()


def test_truths_of_rows_and_remainders_are_part_of_a_kernel():
    """Booleans are reduced as numbers, remainders are written with other operations: Triton has neither."""

    def rows(x, y):
        whole, some = jnp.all(x > 0.1, axis=-1), jnp.any(x > 0.9, axis=-1)
        total = jnp.sum(jnp.where(x > 0.5, x, 0), axis=-1)
        return jnp.where(whole, total, -total) + some * jnp.mod(total, 0.3), jnp.sum(jnp.mod(x, y), axis=-1)

    arguments = array(300, 200), array(300, 200)
    fused = pf.fuse(rows, options=pf.FuseOptions(target="triton", check=False, price=False))
    plan, calls = plan_and_calls(fused, arguments)
    assert (len(plan.kernels), calls) == (1, 1)
    program = plan.kernels[0].phases[0].program
    assert {str(s.reducer) for s in every(program.body) if isinstance(s, Reduce)} == {"sum", "min", "max"}
    x, y = (np.random.default_rng(n).random((300, 200)) for n in range(2))
    names = {t.name: {"x": x, "y": y}[t.name] for t in program.inputs}
    found = evaluate_tiles(program, names).values()
    for wanted in rows(x, y):  # in which order the kernel stores them does not matter
        assert any(np.allclose(one.ravel(), wanted, rtol=1e-5) for one in found)
