"""Emits what Pallas cannot say in a kernel of Mosaic GPU: sums that each thread makes of its own elements, how the blocks of a
cluster tell each other numbers, and `exp` at once.

A meeting is one phase of an mbarrier in every block, which expects the bytes that all blocks of the cluster write to it. A block
writes with `st.async`, which counts its bytes at the barrier of the block it writes to: no fence waits for memory, and nobody waits
but for numbers. The barriers exist everywhere before the first number leaves: a barrier of the cluster begins at the kernel's
start, and is awaited only there. (PTX ISA, `st.async`, `mbarrier.try_wait`, `barrier.cluster`.)
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors

from pallasfuse.pallas_backend.cluster_rules import MEETING_WORDS
from pallasfuse.pallas_backend.mosaic_space import THREADS

_ir: Any = ir
_arith: Any = arith
_llvm: Any = llvm
_vector: Any = vectors
_utils: Any = mosaic.utils

BY_THREADS = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
"""The layout of a vector of which every thread has one element."""
_SEND = """{
.reg .b32 there, barrier;
mapa.shared::cluster.u32 there, $0, $2;
mapa.shared::cluster.u32 barrier, $1, $2;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $3, [barrier];
}"""
_WAIT = """{
.reg .pred done;
again:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;
@!done bra again;
}"""


def prepare_meetings(barriers: Any, expected: Sequence[int]) -> None:
    """Makes the barriers of a block's meetings, each of which expects some bytes, and tells the cluster; all threads call it.

    barriers: int32[`MEETING_WORDS` * meetings] in shared memory.
    """

    def prepare(_: Any, barriers: Any) -> None:
        one = _utils.single_thread_predicate()
        for number, size in enumerate(expected):
            at = _barrier(barriers, number)
            _utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", at, predicate=one)
            _utils.inline_ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", at, _word(size), predicate=one)
        _utils.inline_ptx("fence.mbarrier_init.release.cluster;", predicate=one)
        _utils.inline_ptx("barrier.cluster.arrive.relaxed;", has_side_effects=True, convergent=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(prepare)(barriers)


def await_preparation() -> None:
    """Waits until all blocks of the cluster have made their barriers; all threads call it, once."""

    def wait(_: Any) -> None:
        _utils.inline_ptx("barrier.cluster.wait.acquire;", has_side_effects=True, convergent=True)

    plgpu.inline_mgpu()(wait)()


def tell_cluster(
    board: Any, places: Sequence[int], at: Any, values: Sequence[Any], barriers: Any, meeting: int, blocks: int
) -> None:
    """Writes `board[place + at] = value` for each place and its value in all blocks of a one-dimensional cluster.

    By a warpgroup for which all these are uniform. A block sees what was written to it after `meet`.
    """
    splat = plgpu.Layout.WG_SPLAT(())

    def tell(_: Any, board: Any, barriers: Any, at: Any, values: Any) -> None:
        i32, index = _ir.IntegerType.get_signless(32), _ir.IndexType.get()
        number = at.registers.item()
        number = number if number.type == index else _arith.index_cast(index, number)
        # each of the first threads writes to a block of its own
        peer = _arith.remui(_utils.thread_idx(), _word(THREADS))
        with mosaic.when(_arith.cmpi(_arith.CmpIPredicate.ult, peer, _word(blocks))):
            for place, value in zip(places, values, strict=True):
                here = _address(board, _arith.addi(number, _arith.constant(index, place)))
                word = value.registers.item()
                word = word if word.type == i32 else _arith.bitcast(i32, word)
                _utils.inline_ptx(_SEND, here, _barrier(barriers, meeting), peer, word, has_side_effects=True)

    types = (plgpu.RefType(), plgpu.RefType(), splat, [splat] * len(values))
    plgpu.inline_mgpu(arg_types=types)(tell)(board, barriers, at, list(values))


def meet(barriers: Any, meeting: int) -> None:
    """Waits until everything that a block expects at a meeting was written to it; all threads call it, once."""

    def wait(_: Any, barriers: Any) -> None:
        _utils.inline_ptx(_WAIT, _barrier(barriers, meeting), has_side_effects=True, convergent=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(wait)(barriers)


def reduced_by_threads(value: Any, combine: str, vector: int) -> Any:
    """Combines the elements that each thread has of a vector of float32.

    value: [tile], of which a thread has `vector` neighbours at a time. combine: 'add', 'max' or 'min'. Returns [`THREADS`].
    """
    function = {"add": lambda x, y: x + y, "max": lambda x, y: x.max(y), "min": lambda x, y: x.min(y)}[combine]

    def of_registers(registers: Sequence[Any], width: int) -> Any:
        layout = mosaic.WGStridedFragLayout((THREADS * width,), width)
        found = [_fragmented([r], layout) for r in registers]
        while len(found) > 1:
            found = [function(*pair) if len(pair) == 2 else pair[0] for pair in itertools.batched(found, 2)]
        return found[0]

    def reduce(_: Any, x: Any) -> Any:
        whole = of_registers(list(x.registers.flat), vector).registers.item()
        return of_registers([_utils.vector_slice(whole, slice(n, n + 1)) for n in range(vector)], 1)

    result = plgpu.ShapeDtypeStruct((THREADS,), value.dtype, layout=BY_THREADS)
    layout = plgpu.Layout.WG_STRIDED(value.shape, vec_size=vector)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(reduce)(value)


def repeated_by_threads(value: Any, tile: int, vector: int) -> Any:
    """Gives every element of a vector the number of the thread that has it.

    value: [`THREADS`]. Returns [tile], of which a thread has `vector` neighbours at a time.
    """

    def repeat(_: Any, x: Any) -> Any:
        element = _element(x.registers.item(), 0)
        register = _vector.broadcast(_ir.VectorType.get((vector,), element.type), element)
        layout = mosaic.WGStridedFragLayout((tile,), vector)
        return _fragmented([register] * (tile // (THREADS * vector)), layout, x.is_signed)

    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=vector)
    result = plgpu.ShapeDtypeStruct((tile,), value.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(BY_THREADS,), return_type=result)(repeat)(value)


def approximately(operation: str, value: Any, layout: Any) -> Any:
    """Computes `exp` or `exp2` of a vector of float32 by an instruction that is right to 22 bits; below 2^-126 it is zero."""

    def call(_: Any, x: Any) -> Any:
        return getattr(x, operation)(approx=True)

    result = plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(call)(value)


def _fragmented(registers: Sequence[Any], layout: Any, is_signed: bool | None = None) -> Any:
    """Returns the array whose elements a thread has in these registers."""
    array = np.empty(len(registers), object)
    array[:] = registers
    return mosaic.FragmentedArray(_registers=array, _layout=layout, _is_signed=is_signed)


def _element(register: Any, number: int) -> Any:
    """Returns one element of a register, which is a vector."""
    return _vector.extract(register, dynamic_position=[], static_position=[number])


def _barrier(barriers: Any, meeting: int) -> Any:
    """Returns the address of a meeting's barrier."""
    return _address(barriers, _arith.constant(_ir.IndexType.get(), MEETING_WORDS * meeting))


def _address(array: Any, at: Any) -> Any:
    """Returns the address of an element in this block's shared memory, as 32 bits."""
    return _llvm.ptrtoint(_ir.IntegerType.get_signless(32), _utils.memref_ptr(_utils.memref_slice(array, at)))


def _word(number: int) -> Any:
    """Returns a constant of 32 bits."""
    return _arith.constant(_ir.IntegerType.get_signless(32), number)
