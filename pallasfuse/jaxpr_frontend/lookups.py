"""Gathers of whole rows that a kernel may do itself: tensors of a program that are other ones, read by a table of indices.

A gather stays an `External` of the loop program, which XLA computes; a `Lookup` says how its elements may be read instead.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Const, Read, const
from pallasfuse.ir.lookup import Lookup, verify
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend.plans import LARGEST, dtype_of, flat, shape_of


def element_by_number(array: Any, number: Any, mode: str = "promise_in_bounds") -> Any:
    """Computes one element of an array of arrays as a gather of one row, which a kernel can do by itself."""
    rank = array.ndim - 1
    numbers = lax.GatherDimensionNumbers(tuple(range(rank)), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(array, number[None], numbers, (1, *array.shape[1:]), mode=mode)


def with_lookups(
    program: LoopProgram, jaxpr: Jaxpr, names: Mapping[Var, str], is_left: Callable[[JaxprEqn], bool]
) -> LoopProgram:
    """The program of a flat jaxpr, with `External.lookup` where one is found.

    names: of the tensors that stand for variables. is_left: does the user ask for XLA here?
    """
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    variable = {n: v for v, n in names.items()}
    in_memory = _in_memory(program)
    computed = {n.name: n for n in program.nests if isinstance(n, Nest)}
    turned = {n for n, v in variable.items() if v in makers and turns(makers[v])}
    if not any(e.primitive.name == "gather" for e in jaxpr.eqns):
        return program

    def found(nest: Nest | External) -> Nest | External:
        if not isinstance(nest, External):
            return nest
        eqn = gather = makers[variable[nest.name]]
        (operand, *_) = eqn.invars or (None,)
        # a reshape that also permutes is no other shape of the same elements in order
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None and isinstance(operand, Var):
            gather = makers.get(operand, eqn)
        if gather.primitive.name != "gather" or is_left(eqn) or is_left(gather):
            return nest
        try:
            lookup = _lookup(nest, gather, shape_of(eqn.outvars[0]), names)
        except InvalidProgramError:  # any doubt means none
            return nest
        lookup = lookup if isinstance(lookup, Refusal) else _as_it_lies(lookup, computed, turned, in_memory)
        if isinstance(lookup, Refusal):
            return nest
        return replace(nest, lookup=lookup)

    return replace(program, nests=tuple(map(found, program.nests)))


def _in_memory(program: LoopProgram) -> frozenset[str]:
    """Finds the tensors that are in memory before a kernel runs: inputs, results of reductions, what XLA makes by itself, and other
    shapes of these with their elements in the same order."""
    found = {t.name for t in program.inputs}
    for nest in program.nests:
        if isinstance(nest, External) or nest.is_reduction:
            found.add(nest.name)
        elif isinstance(nest.body, Read) and nest.body.tensor in found:
            read, made = ([a for a in axes if a.extent != 1] for axes in (nest.body.indices, nest.axes))
            found |= {nest.name} if read == made else set()
    return frozenset(found)


def turns(eqn: JaxprEqn) -> bool:
    """Does an equation give the elements of its operand another order, or another shape, and no more?"""
    match eqn.primitive.name:
        case "reshape":
            return eqn.params["dimensions"] is None
        case "broadcast_in_dim":
            return math.prod(shape_of(eqn.invars[0])) == math.prod(shape_of(eqn.outvars[0]))
        case name:
            return name in ("copy", "expand_dims", "squeeze", "transpose")


def _as_it_lies(
    lookup: Lookup, computed: Mapping[str, Nest], turned: Collection[str], in_memory: Collection[str]
) -> Lookup | Refusal:
    """Returns a lookup whose source lies in memory: what turned axes are made of, in its own order, else what is computed.

    XLA computes elements of a source where they are read; a kernel needs all of them in memory. That is no more work where at least
    as many are read. computed: the nests of the program, by name. turned: the names of those that `turns` says are no more.
    in_memory: as of `_in_memory`.
    """
    source = lookup.source
    while source.name not in in_memory:
        nest = computed[source.name]
        operand = _turned(nest)
        if operand is None or nest.name not in turned:
            break
        read, made, over = ([a for a in axes if a.extent != 1] for axes in (operand.indices, nest.axes, source.axes))
        if [a.extent for a in made] != [a.extent for a in over]:
            break
        by_axis = dict(zip(made, over, strict=True))
        source = Tensor(operand.tensor, tuple(by_axis[a] for a in read), source.dtype)
    if source.name not in in_memory and volume(lookup.source.axes) > volume(lookup.result.axes):
        return Refusal("gather of an array that is computed, and of which less is read")
    return verify(replace(lookup, source=source))


def _turned(nest: Nest) -> Read | None:
    """Returns what a nest reads, where it gives its elements another order and no more."""
    body = nest.body
    if not isinstance(body, Read) or nest.is_reduction or set(body.indices) != set(nest.axes):
        return None
    return body if len(set(body.indices)) == len(body.indices) else None


@dataclass(slots=True)
class _Dims:
    """The axes of the dimensions of the array and of the indices, as far as they are known."""

    of_array: dict[int, tuple[Axis, ...]] = field(default_factory=dict)
    of_indices: dict[int, tuple[Axis, ...]] = field(default_factory=dict)
    block: int = 1
    along: Axis | None = None
    blocks: Axis | None = None


def _lookup(nest: External, gather: JaxprEqn, shape: Sequence[int], names: Mapping[Var, str]) -> Lookup | Refusal:
    """The lookup of a gather whose result has `shape` after a reshape, over the axes of `nest`."""
    array, indices = gather.invars
    numbers, mode = gather.params["dimension_numbers"], gather.params["mode"]
    if not isinstance(array, Var) or not isinstance(indices, Var):
        return Refusal("gather of a literal, or by one")
    fills = mode == GatherScatterMode.FILL_OR_DROP
    if not fills and mode not in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        return Refusal(f"gather with mode {mode}")
    if fills and not dtypes.is_float(nest.dtype):
        return Refusal(f"gather of elements of type {nest.dtype} that fills in numbers of its own")
    if not {dtype_of(array), dtype_of(indices)} <= dtypes.SUPPORTED or not dtypes.is_integer(dtype_of(indices)):
        return Refusal(f"gather of elements of type {dtype_of(array)} by {dtype_of(indices)}")
    if 0 in (*shape, *shape_of(array)) or math.prod(shape_of(array)) > LARGEST or math.prod(shape) > LARGEST:
        return Refusal("gather of an array that is empty or too large")
    by_index = [int(d) for d in numbers.start_index_map]
    if len(by_index) != 1 or [int(d) for d in numbers.collapsed_slice_dims] != by_index:
        return Refusal("gather by several indices")
    dims = _dims(nest, gather, shape)
    if isinstance(dims, Refusal):
        return dims
    (rows_dim,) = by_index
    source = names[array]
    rows = Axis(f"{source}.rows", shape_of(array)[rows_dim] * dims.block)
    over = [(rows,) if d == rows_dim else dims.of_array.get(d, ()) for d in range(len(shape_of(array)))]
    by_table = [dims.of_indices.get(k, ()) for k in range(len(shape_of(indices)) - 1)]
    return verify(Lookup(
        Tensor(nest.name, nest.axes, nest.dtype), Tensor(source, flat(over), nest.dtype),
        Tensor(names[indices], flat(by_table), dtype_of(indices)), rows, dims.block, dims.along, dims.blocks,
        _filled(gather, nest.dtype) if fills else None,
    ))  # fmt: skip


def _filled(gather: JaxprEqn, dtype: str) -> Const:
    """Returns the number that a gather fills in, rounded to its type."""
    fill = gather.params["fill_value"]
    return const(math.nan if fill is None else float(np.asarray(fill, jnp.dtype(dtype))), dtype)


def _dims(nest: External, gather: JaxprEqn, shape: Sequence[int]) -> _Dims | Refusal:
    """The axes of every dimension that the gather reads, where each of them is read as a whole, in order."""
    numbers = gather.params["dimension_numbers"]
    own, out = shape_of(gather.invars[0]), shape_of(gather.outvars[0])
    (rows_dim,) = (int(d) for d in numbers.start_index_map)
    batching = {
        int(i): int(d) for i, d in zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    }
    whole = [d for d in range(len(own)) if d != rows_dim and d not in batching.values()]
    sizes = [int(n) for n in gather.params["slice_sizes"]]
    if sizes[rows_dim] != 1 or any(sizes[d] != own[d] for d in whole):
        return Refusal("gather of parts of rows")
    offsets = [int(d) for d in numbers.offset_dims]
    of_indices = [d for d in range(len(out)) if d not in offsets]
    array_dim = dict(zip(offsets, whole, strict=True))
    index_dim = {d: k for k, d in enumerate(of_indices)}
    dims = _Dims()
    for together, axes in _aligned(out, nest.axes):
        in_array = [array_dim[d] for d in together if d in array_dim]
        in_indices = [index_dim[d] for d in together if d in index_dim]
        first_is_index = together[0] in index_dim
        if len(together) > 1 and (len(axes) != 1 or any(k in batching for k in in_indices)):
            return Refusal("gather whose result is reshaped in another way than rows to a longer axis")
        if len(together) > 1 and not _neighbours(in_array, own):
            return Refusal("gather whose result joins dimensions that are apart in the array")
        if not in_indices:
            dims.of_array[in_array[0]] = axes
        elif not in_array:
            dims.of_indices[in_indices[0]] = axes
            if in_indices[0] in batching:
                dims.of_array[batching[in_indices[0]]] = axes
        else:
            follows = _neighbours([rows_dim, *in_array], own)
            in_order = together == sorted(together, key=lambda d: d in array_dim)
            if not first_is_index or not follows or not in_order:
                return Refusal("gather whose rows are joined with something else than what follows them")
            (dims.along,) = axes
            dims.block = math.prod(own[d] for d in in_array)
            dims.blocks = Axis(f"{dims.along.name}.blocks", dims.along.extent // dims.block)
            dims.of_indices[in_indices[0]] = (dims.blocks,)
    return dims


def _neighbours(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Do dimensions follow each other in memory, but for unit ones between them?"""
    return all(a < b and all(n == 1 for n in shape[a + 1 : b]) for a, b in pairwise(dims))


def _aligned(shape: Sequence[int], axes: Sequence[Axis]) -> list[tuple[list[int], tuple[Axis, ...]]]:
    """The smallest runs of dimensions of a row-major array, without unit ones, that are runs of axes."""
    found: list[tuple[list[int], tuple[Axis, ...]]] = []
    dims = [d for d, n in enumerate(shape) if n != 1]
    waiting = [a for a in axes if a.extent != 1]
    while dims:
        run, over = [dims.pop(0)], [waiting.pop(0)]
        while (left := math.prod(shape[d] for d in run)) != (right := math.prod(a.extent for a in over)):
            if left < right:
                run.append(dims.pop(0))
            else:
                over.append(waiting.pop(0))
        found.append((run, tuple(over)))
    return found
