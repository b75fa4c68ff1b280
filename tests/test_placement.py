"""Which target runs a kernel whose masks only the data know."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import phases, placement
from pallasfuse.decisions import Placed
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.phases import phases_of, refused_alike
from pallasfuse.pipeline import make_plan
from pallasfuse.placement import placed_on
from pallasfuse.targets import MOSAIC_GPU, TRITON
from pallasfuse.tiling.choose import choose
from pallasfuse.tiling.descent import smaller

LENGTH = 8192
HEADS = [jax.ShapeDtypeStruct((1, LENGTH, 16, 128), jnp.bfloat16)] * 3


def attention(visible, q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / 8
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, scores, -1e9), -1).astype(q.dtype), v)


def documents(number, q, k, v):
    return attention((number[:, :, None] == number[:, None])[:, None], q, k, v)


def causal(q, k, v):
    return attention(jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH), q, k, v)


def unmasked(q, k, v):
    return attention(True, q, k, v)


def kernel_of(function, *arrays, **options):
    plan = make_plan(jax.make_jaxpr(function)(*arrays).jaxpr, MOSAIC_GPU, FuseOptions(check=False, **options))
    (kernel,) = plan.kernels
    return kernel


def up_to(last, q, k, v):
    return attention((jnp.arange(LENGTH) <= last[:, :, None])[:, None], q, k, v)


NUMBERS = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)


@pytest.mark.parametrize("function", [documents, up_to])
def test_kernels_that_skip_what_data_hide_run_instead_of_those_that_cannot(function):
    kernel = kernel_of(function, NUMBERS, *HEADS)
    assert (kernel.target.name, kernel.schedule.ranges) == ("triton", True)
    assert "its loops are planned ahead" in kernel.declined[0]
    assert kernel_of(function, NUMBERS, *HEADS, target="mosaic_gpu").target.name == "mosaic_gpu"  # as it was asked for


def test_an_array_may_hide_nothing():
    kernel = kernel_of(attention, jax.ShapeDtypeStruct((LENGTH, LENGTH), bool), *HEADS)
    assert (kernel.target.name, kernel.schedule.ranges) == ("mosaic_gpu", False)


@pytest.mark.parametrize("function", [causal, unmasked])
def test_where_no_data_hide_anything_the_own_target_stays(function):
    kernel = kernel_of(function, *HEADS)
    assert (kernel.target.name, kernel.schedule.ranges) == ("mosaic_gpu", False)


def test_a_cluster_is_as_its_price_likes_it():
    """Rows of 128256 fit into four blocks with room for others beside them; the price is asked about all sizes and tiles."""
    x = jax.ShapeDtypeStruct((4096, 128256), jnp.bfloat16)
    plan = pf.fuse(lambda x: jax.nn.softmax(x, -1), options=pf.FuseOptions(check=False)).explain(x, target="mosaic_gpu")
    (kernel,) = plan.kernels
    assert kernel.target.name == "mosaic_cluster"
    assert (kernel.schedule.parts, kernel.schedule.rolled_tile) == (4, 8192)


def rms_product(x, gain, w):
    normed = x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)) * gain
    return normed.astype(x.dtype) @ w


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("name", ["attention", "product of rows"])
def test_schedules_that_are_refused_unseen_are_refused_when_they_are_lowered(name, rows):
    """A target says so without lowering them; it must be right."""
    if name == "attention":
        heads = [jax.ShapeDtypeStruct((1, n, 8, 64), jnp.bfloat16) for n in (rows, 512, 512)]
        function, arrays = unmasked, heads
    else:
        arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 256), (256,), (256, 128))]
        function = rms_product
    options = FuseOptions(check=False, price=False)
    plan = make_plan(jax.make_jaxpr(function)(*arrays).jaxpr, MOSAIC_GPU, options)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}
    unseen = 0
    for kernel in (k for k in plan.kernels if k.group.folds):
        schedules = [replace(s, warps=w) for s in choose(kernel.group, MOSAIC_GPU) for w in (4, 8)]
        found = [(s, *phases_of(kernel.group, s, MOSAIC_GPU, tensors)) for s in schedules]
        for before in (f for f in found if f[2] is not None):
            alike = [f for f in found if refused_alike(f[0], before, MOSAIC_GPU)]
            assert all(problem is not None for _, _, problem in alike)
            unseen += len(alike)
    assert unseen or rows >= 64


def attended(q, k, v, array):
    """Scores that an array masks, or is added to."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32)
    scores = jnp.where(array, scores, -1e9) if array.dtype == bool else scores + array
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


@pytest.mark.parametrize(
    ("shape", "of_heads", "dtype", "target"),
    [  # microseconds on an H100, with copies for warpgroups and without
        ((8, 12, 197, 64), False, "bool", "triton"),  # 21 and 12
        ((2, 8, 1536, 64), True, "bool", "triton"),  # 90 and 49
        ((2, 8, 1543, 128), True, "bool", "mosaic_gpu"),  # 131 and 151
        ((2, 8, 1543, 128), True, "bfloat16", "mosaic_gpu"),  # 142 and 365
    ],
)
def test_arrays_are_copied_for_warpgroups_where_that_is_faster(shape, of_heads, dtype, target):
    batch, heads, length, _ = shape
    operand = jax.ShapeDtypeStruct(shape, "bfloat16")
    array = jax.ShapeDtypeStruct((batch, heads if of_heads else 1, length, length), dtype)
    arguments = operand, operand, operand, array
    (kernel,) = pf.fuse(attended, options=pf.FuseOptions(check=False)).explain(*arguments, target="mosaic_gpu").kernels
    assert kernel.target.name == target
    assert any("without copies" in reason for reason in kernel.declined) == (target == "triton")
    asked = pf.fuse(attended, options=pf.FuseOptions(check=False, target="mosaic_gpu")).explain(*arguments).kernels
    assert [k.target.name for k in asked] == ["mosaic_gpu"]


def group_of(function, target, *arrays):
    """Returns the only group of a function, and the tensors of its program."""
    plan = make_plan(jax.make_jaxpr(function)(*arrays).jaxpr, target, FuseOptions(check=False, price=False))
    (kernel,) = plan.kernels
    return kernel.group, {t.name: Tensor(t.name, t.axes, t.dtype) for t in plan.converted.program.definitions()}


def test_nothing_is_lowered_between_tiles_where_the_least_ones_are_too_large(monkeypatch):
    rows = jax.ShapeDtypeStruct((4096, 2048), jnp.float32)
    lowered = []

    def phases_of_one(group, schedule, target, tensors):
        lowered.append(schedule)
        return phases_of(group, schedule, target, tensors)

    monkeypatch.setattr(placement, "phases_of", phases_of_one)
    group, tensors = group_of(jax.nn.softmax, TRITON, rows)
    alone = replace(TRITON, otherwise="")
    assert isinstance(placed_on(group, alone, tensors, FuseOptions(check=False)), Placed)
    for module in (placement, phases):
        monkeypatch.setattr(module, "too_large", lambda _: "its tiles are too large")
    lowered.clear()
    assert placed_on(group, alone, tensors, FuseOptions(check=False)) == "its tiles are too large"
    *listed, least = lowered
    assert listed == choose(group, alone)
    assert (least.rolled_tile, least.stages) == (min(s.rolled_tile for s in smaller(listed[0], alone)), 1)
