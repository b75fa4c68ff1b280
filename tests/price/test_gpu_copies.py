"""What XLA copies beside a kernel: for warpgroups the price foretells what the emitter asks for."""

from math import prod

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.device import find
from pallasfuse.ir import dtypes
from pallasfuse.options import FuseOptions
from pallasfuse.pallas_backend.mosaic_gpu import Kernel
from pallasfuse.pallas_backend.mosaic_rules import examine
from pallasfuse.pipeline import make_plan
from pallasfuse.price.gpu_copies import Copied, copied, with_longer_rows
from pallasfuse.targets import MOSAIC_GPU, TRITON


def attend(q, k, v):
    scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(scores).astype(q.dtype), v)


def masked(q, k, v, mask):
    scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(q.dtype), v)


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def programs(function, *arguments):
    plan = make_plan(jax.make_jaxpr(function)(*arguments), MOSAIC_GPU, FuseOptions(price=False, target=MOSAIC_GPU.name))
    return [p.program for k in plan.kernels for p in k.phases if p.target.name == MOSAIC_GPU.name]


def asked_for(program):
    """The bytes of all arrays that the emitter pads or converts, before and after."""
    kernel = Kernel(program, examine(program), interpret=False)
    found = []
    for tensor in (*program.inputs, *program.outputs):
        before, after = tuple(a.extent for a in tensor.axes), kernel.extents(tensor) if tensor.axes else ()
        if tensor.dtype == "bool" or before != after:
            found.append(dtypes.itemsize_bytes(tensor.dtype) * (prod(before) + prod(after)))
    return found


@pytest.mark.parametrize(("length", "size", "tensors"), [(1024, 64, 0), (1021, 64, 4), (1024, 72, 4), (1024, 80, 0)])
def test_rows_and_columns_are_padded_to_small_tiles(length, size, tensors):
    """Eight rows, and as many columns as the widest swizzle that divides a row of the tile: 16 of 80, so that 72 are padded."""
    (program,) = programs(attend, *[struct(16, length, size)] * 3)
    assert len(copied(program)) == tensors
    assert sorted(c.bytes for c in copied(program)) == sorted(asked_for(program))


def test_booleans_become_bytes_and_vectors_are_padded_to_their_tiles():
    (program,) = programs(masked, *[struct(16, 1024, 64)] * 3, struct(1024, 1024, dtype="bool"))
    (copy,) = copied(program)
    assert [copy.bytes] == asked_for(program) == [2 * 1024 * 1024] and copy.elements == 1024 * 1024


def test_a_copy_takes_as_long_as_its_threads_begin_or_its_memory():
    """Bytes: a thread writes four elements, and one begins in each clock."""
    device = find("NVIDIA H200", "gpu")
    begin_us = 1e-3 * 2**20 / (device.multiprocessors * device.clock_ghz)
    assert Copied(bytes=2.0 * 2**22, elements=2.0**22).us(device) == pytest.approx(begin_us)
    assert Copied(bytes=8.0 * 2**22, elements=2.0**22).us(device) == pytest.approx(8e-3 * 2**22 / device.memory_gb_s)


@pytest.mark.parametrize(("columns", "elements"), [(1501, [16 * 1024 * 1504]), (1502, [])])
def test_longer_rows_are_copies_too(columns, elements):
    def biased(q, k, bias):
        scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
        return jnp.einsum("hij,hjd->hid", jax.nn.softmax(scores).astype(q.dtype), k)

    arguments = struct(16, 1024, 64), struct(16, columns, 64), struct(16, 1024, columns)
    options = FuseOptions(price=False, target=TRITON.name)
    (kernel,) = make_plan(jax.make_jaxpr(biased)(*arguments), TRITON, options).kernels
    found = with_longer_rows([p.program for p in kernel.phases])
    assert [c.elements for c in found] == elements
    assert kernel.price.us > sum(c.us(TRITON.device) for c in found)
