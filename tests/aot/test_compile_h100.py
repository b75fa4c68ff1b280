"""Every kernel compiles to machine code for an H100, on a machine without a GPU (`make test-aot`).

This goes on where `tests/triton_gpu/test_lowering.py` ends, through Triton's own compiler and ptxas. It finds tiles
that overflow shared memory, types that a mathematical function lacks, and spilled registers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasfuse as pf
from benchmarks import h100
from benchmarks.cases import ATTENTION, all_cases
from examples.linear_cross_entropy import linear_cross_entropy
from pallasfuse.pallas_backend.kernel_resources import resources
from pallasfuse.targets import TARGETS
from pallasfuse.triton_gpu import kernel as triton_gpu
from pallasfuse.triton_gpu import rules
from tests.elementwise_functions import ELEMENTWISE
from tests.losses import FORMS, LOSSES
from tests.pallas_backend.rows import ROWS as LONG_ROWS
from tests.pallas_backend.variants import VARIANTS
from tests.tiling.test_tree_kernels import KERNELS as TREES
from tests.tiling.test_tree_kernels import SUBJECTS
from tests.tiling.tree_programs import TILES

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not h100.can_compile(), reason="needs requirements/aot-0.11.txt: make test-aot"),
]

HALF_TYPES = ["float16", "bfloat16"]
DTYPES = ["float32", *HALF_TYPES]
MOST_SPILLED_BYTES = 256
"""Tolerated in float32, whose rows are twice as wide as what the tiles are made for."""


def named(cases):
    return [pytest.param(case, id=case.name.replace(" ", "-")) for case in cases]


def shapes(case, length, dtype, **options):
    return jax.eval_shape(lambda: case.arrays(length, jnp.dtype(dtype), **options))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled_kernels(record_property, fused, arguments, static=()):
    """What the fused function's kernels take of the machine; the plan foretells their number."""
    plan = fused.explain(*arguments, *static, target="triton")
    launches = h100.compile_for_h100(lambda *a: fused(*a, *static), arguments).triton_launches
    assert len(launches) == sum(len(k.phases) for k in plan.kernels)
    for launch in launches:
        record_property("kernel", str(dataclasses.asdict(launch)))
        assert launch.shared_bytes <= h100.SHARED_MEMORY_BYTES
    return launches


def assert_registers_suffice(launches, most_spilled_bytes=0):
    assert all((k.spilled_bytes or 0) <= most_spilled_bytes for k in launches), launches


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", named(all_cases()))
def test_cases_at_the_sizes_of_the_benchmarks(record_property, case, dtype):
    launches = compiled_kernels(record_property, case.fused, shapes(case, 1024, dtype), case.static)
    assert len(launches) == 1
    assert_registers_suffice(launches, 0 if dtype in HALF_TYPES else MOST_SPILLED_BYTES)


@pytest.mark.parametrize("length", [1, 61, 1000])
@pytest.mark.parametrize("case", named(all_cases()))
def test_odd_lengths(record_property, case, length):
    case = case.small()
    launches = compiled_kernels(record_property, case.fused, shapes(case, length, "bfloat16"), case.static)
    assert_registers_suffice(launches)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 256])
def test_head_dimensions(record_property, head_dim, dtype):
    case = dataclasses.replace(ATTENTION[1].small(), head_dim=head_dim)
    launches = compiled_kernels(record_property, case.fused, shapes(case, 1000, dtype), case.static)
    assert_registers_suffice(launches, 0 if dtype in HALF_TYPES else MOST_SPILLED_BYTES)


@pytest.mark.parametrize("queries", [1, 8])
def test_few_queries(record_property, queries):
    case = ATTENTION[1]
    launches = compiled_kernels(record_property, case.fused, shapes(case, queries, "float16", key_length=8192))
    assert_registers_suffice(launches)


ROWS = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "softmax of columns": lambda x: jax.nn.softmax(x, axis=0),
    "log-sum-exp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "variance": lambda x: x.var(-1),
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6),
    "norm of rows, then softmax": lambda x: jax.nn.softmax(x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)),
}


@pytest.mark.parametrize("shape", [(7, 61), (64, 4096), (2, 50257)], ids=str)
@pytest.mark.parametrize("name", list(ROWS))
def test_rows(record_property, name, shape):
    assert_registers_suffice(compiled_kernels(record_property, pf.fuse(ROWS[name]), [array(*shape)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_an_operation_compiles_or_is_left_to_xla(record_property, name, dtype):
    """Triton's language accepts a half-precision operand of any function; CUDA's library has no such functions."""
    function = ELEMENTWISE[name]
    fused = pf.fuse(lambda x: jax.nn.softmax(function(x).astype(jnp.float32)))
    compiled_kernels(record_property, fused, [array(7, 1000, dtype=dtype)])


def attention(q, k, v):
    p = jax.nn.softmax(jnp.dot(q, k.T, preferred_element_type=jnp.float32) / 8)
    return jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(v.dtype)


def with_tiles(arguments, rows, keys, warps, stages):
    """`attention` with the tiles of its row axis and its rolled axis."""
    schedule = pf.fuse(attention).explain(*arguments, target="triton").kernels[0].schedule
    row_axis = max((axis for axis, _ in schedule.grid), key=lambda axis: axis.extent)
    tiles = ((row_axis.name, rows), (schedule.rolled.name, keys))
    return pf.fuse(attention, options=pf.FuseOptions(tiles=tiles, warps=warps, stages=stages))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("tiles", [(16, 16), (64, 32), (64, 128), (128, 64), (100, 48), (8, 64), (1, 64)], ids=str)
def test_options_override_the_schedule(record_property, tiles, warps, stages):
    arguments = [array(1000, 64, dtype="float16")] * 3
    fused = with_tiles(arguments, *tiles, warps, stages)
    launches = compiled_kernels(record_property, fused, arguments)
    assert launches[0].threads == 32 * warps  # where the keys are split, the kernel that merges the parts follows


def test_tiles_that_overflow_shared_memory_are_found():
    arguments = [array(4096, 256)] * 3
    fused = with_tiles(arguments, 256, 128, 8, 3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit exceeded"):
        h100.compile_for_h100(fused, arguments)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "few"])
def test_kernels_for_warpgroups(name, dtype):
    """Through Mosaic and ptxas: layouts are found, shared memory suffices."""
    variant = VARIANTS[name]
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in variant.arrays(dtype)]
    fused = pf.fuse(variant.function, target="mosaic_gpu")
    (kernel,) = fused.explain(*arguments).kernels
    assert kernel.target.name == "mosaic_gpu", kernel.declined
    h100.compile_for_h100(fused, arguments)


@pytest.mark.parametrize("length", [200, 1000, 8192])
@pytest.mark.parametrize("case", named(ATTENTION))
def test_cases_for_warpgroups(case, length):
    arguments = shapes(case, length, "bfloat16")
    fused = pf.fuse(case.plain, target="mosaic_gpu", static_argnums=case.static_argnums)
    (kernel,) = fused.explain(*arguments, *case.static).kernels
    assert kernel.target.name == "mosaic_gpu", kernel.declined
    h100.compile_for_h100(lambda *a: fused(*a, *case.static), arguments)


@pytest.mark.parametrize("dtype", [*HALF_TYPES, "float32"])
@pytest.mark.parametrize("name", LONG_ROWS)
def test_kernels_of_clusters(name, dtype):
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in LONG_ROWS[name].arrays(8, 33000, dtype)]
    fused = pf.fuse(LONG_ROWS[name].function, options=pf.FuseOptions(target="mosaic_cluster", parts=4))
    (kernel,) = fused.explain(*arguments).kernels
    assert kernel.target.name == "mosaic_cluster", kernel.declined
    h100.compile_for_h100(fused, arguments)


@pytest.mark.parametrize("parts", [1, 2, 8, 16])
def test_clusters_of_any_size(parts):
    arguments = [array(4096, 100000, dtype="float16")]
    options = pf.FuseOptions(target="mosaic_cluster", parts=parts, tiles=(("j", 4096),))
    compiled = h100.compile_for_h100(pf.fuse(LONG_ROWS["softmax"].function, options=options), arguments)
    assert "mosaic_gpu" in compiled.text


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("target", ["mosaic_gpu", "triton"])
def test_a_product_inside_a_loop_is_never_in_memory(target, dtype):
    """Of kernels for warpgroups, the states are; of loops of XLA, a tile."""
    arguments = [array(4096, 4096, dtype=dtype), array(4096, 128256, dtype=dtype), array(4096, dtype="int32")]
    ours, theirs = (
        h100.temporary_bytes(f, arguments)
        for f in (pf.fuse(linear_cross_entropy.__wrapped__, target=target), linear_cross_entropy.__wrapped__)
    )
    assert ours < (0.02 if target == "mosaic_gpu" else 0.05) * theirs


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_products_in_slices_for_warpgroups(function, dtype):
    arguments = [array(1000, 1032, dtype=dtype), array(1032, 32000, dtype=dtype), array(1000, dtype="int32")]
    fused = pf.fuse(function, target="mosaic_gpu")
    (kernel,) = fused.explain(*arguments).kernels
    assert kernel.target.name == "mosaic_gpu", kernel.declined
    h100.compile_for_h100(fused, arguments)


def biased_by_pairs(h, w, b):
    return jax.nn.logsumexp(jnp.einsum("nd,dv->nv", h, w, preferred_element_type=jnp.float32) + b, axis=-1)


@pytest.mark.parametrize("bias", ["float32", "int32"])
def test_what_is_streamed_beside_slices(bias):
    """All of shared memory is taken, with the barriers."""
    arguments = [
        array(512, 1032, dtype="bfloat16"),
        array(1032, 16384, dtype="bfloat16"),
        array(512, 16384, dtype=bias),
    ]
    fused = pf.fuse(biased_by_pairs, target="mosaic_gpu")
    (kernel,) = fused.explain(*arguments).kernels
    assert kernel.target.name == "mosaic_gpu", kernel.declined
    h100.compile_for_h100(fused, arguments)


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_products_in_slices_for_warpgroups(name):
    function, shapes, rows = FORMS[name]
    arguments = [*(array(*s, dtype="bfloat16") for s in shapes), array(*rows, dtype="int32")]
    fused = pf.fuse(function, target="mosaic_gpu")
    (kernel,) = fused.explain(*arguments).kernels
    assert kernel.target.name == "mosaic_gpu", kernel.declined
    h100.compile_for_h100(fused, arguments)


@pytest.mark.parametrize("name", TREES)
def test_no_kernel_of_a_tree_takes_more_shared_memory_than_foretold(name):
    subject, target = SUBJECTS[name[0]], TARGETS["triton"]
    with jax.default_matmul_precision("highest"):
        programs = subject.lowered(TREES[name], TILES["dots"])
    for program in programs:
        foretold = resources((program,), target).shared_bytes
        if rules.problem(program) is not None or foretold > target.shared_memory_bytes:
            continue
        inputs = {t.name: array(*(a.extent for a in t.axes), dtype=t.dtype) for t in program.inputs}
        compiled = h100.compile_for_h100(
            lambda *a, p=program, names=tuple(inputs): triton_gpu.run(p, dict(zip(names, a, strict=True))),
            tuple(inputs.values()),
        )
        (launch,) = (k for k in compiled.launches if k.name == program.name)
        assert launch.shared_bytes <= foretold
