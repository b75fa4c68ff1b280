"""What XLA copies beside a kernel: for warpgroups the price foretells what the emitter asks for."""

from math import prod

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.device import find
from pallasfuse.emission import pallas_kernel
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


def biased(q, k, bias):
    scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(scores).astype(q.dtype), k)


def near(x, y, bias):
    """Sums of three products, which threads write out: there is no matrix product beside the load."""
    return jnp.max(jnp.einsum("ic,jc->ij", x, y) + bias, -1)


@pytest.mark.parametrize(
    ("function", "arguments", "elements"),
    [
        (biased, (struct(16, 1024, 64), struct(16, 1501, 64), struct(16, 1024, 1501)), [16 * 1024 * 1504]),
        (biased, (struct(16, 1024, 64), struct(16, 1502, 64), struct(16, 1024, 1502)), []),
        (near, [struct(*s, dtype="float32") for s in ((4096, 3), (1501, 3), (4096, 1501))], []),
    ],
)
def test_longer_rows_are_copies_too(function, arguments, elements, monkeypatch):
    options = FuseOptions(price=False, target=TRITON.name)
    (kernel,) = make_plan(jax.make_jaxpr(function)(*arguments), TRITON, options).kernels
    phase = kernel.phases[0]  # those that merge parts load nothing beside products
    assert [c.elements for c in with_longer_rows(phase.program)] == elements
    terms = {t.name: t.us for t in kernel.price.terms}
    start_us = TRITON.device.kernel_us + TRITON.device.launch_us
    expected = sum(c.us(TRITON.device) + start_us for c in with_longer_rows(phase.program))
    assert terms.get("copies of arguments", 0.0) == pytest.approx(expected)
    made, longer = [], pallas_kernel._with_rows
    monkeypatch.setattr(pallas_kernel, "_with_rows", lambda x, row: made.append(longer(x, row)) or made[-1])
    inputs = {t.name: jax.ShapeDtypeStruct([a.extent for a in t.axes], t.dtype) for t in phase.program.inputs}
    results = jax.eval_shape(lambda given: pallas_kernel.call(phase.program, given, interpret=True), inputs)
    assert results.keys() == {t.name for t in phase.program.outputs}
    assert [x.size for x in made] == elements
