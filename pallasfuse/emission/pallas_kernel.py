"""TileProgram -> `pl.pallas_call` with whole arrays in memory and masked loads and stores.

Grid blocks are numbered on one grid dimension. Tiles have full, power-of-two sizes; what lies outside an array is read as
zero and never written.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse.emission.elementwise import dot_precision, select
from pallasfuse.emission.interpreter import Array, DynamicSlice, Interpreter, Machine, Scope, Tile
from pallasfuse.emission.lookups import in_range, is_inside, shaped
from pallasfuse.errors import TargetError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.renaming import readable
from pallasfuse.ir.tile_program import Contract, Load, Loop, TileProgram, in_windows
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.resources.exponentials import by_instruction, is_approximate
from pallasfuse.resources.padded_rows import padded_rows, row_of

SMALLEST_DOT = 16
"""Matrix units take tiles of at least this many rows, columns and contracted elements."""

_EVICTION = {"later": "evict_last", "last": "evict_first"}

LARGEST_PRODUCT = 1 << 18
"""Elements of a product without matrix units that one block can hold."""


class _PallasMachine:
    """Loads from and stores to references of whole arrays."""

    def __init__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], lookups: Sequence[Lookup] = (), *,
        padded: Mapping[str, int], interpreted: bool = False,
    ) -> None:  # fmt: skip
        """inputs: also the tables and the sources of lookups, by `_table` and `_source` of the name of what is looked up.

        padded: the lengths of the rows of inputs that are longer than they were given (`resources.padded_rows`).
        """
        self.inputs, self.outputs, self.interpreted, self.padded = inputs, outputs, interpreted, padded
        self.lookups = {x.result.name: x for x in lookups}

    def _view(
        self, ref: Any, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], row: int | None = None
    ) -> tuple[Any, tuple[int, ...], Array | None]:
        """The reference at the current tile, its shape, and the mask of what lies inside the array (None: everything).

        row: the length of the rows, where that is not the extent of their axis.
        """
        from jax.experimental import pallas as pl

        # a static position keeps its dimension: Pallas takes integers as slices, not as indices, in every mode
        kept = [a for a in indices if windows[a].size != 1 or isinstance(windows[a].start, int)]
        shape = tuple(windows[a].size for a in kept)
        at: list[Any] = []
        mask: Array | None = None
        extents = {a: a.extent for a in indices}
        if row is not None and (last := row_of(indices)) is not None:
            extents[indices[last]] = row
        for axis in indices:
            window = windows[axis]
            if axis not in kept:
                at.append(window.start)
                if window.overhangs:  # a piece of a window may begin past the end of the axis
                    at[-1] = jnp.minimum(window.start, extents[axis] - 1)
                    inside = jnp.broadcast_to(window.start < extents[axis], shape)
                    mask = inside if mask is None else mask & inside
                continue
            start = window.start
            if isinstance(start, int) and (start + window.size > extents[axis] or jax.config.jax_enable_x64):
                # a static slice must lie inside (the mask keeps this one there), and positions must be of one type
                start = jnp.int32(start)
            at.append(pl.ds(start, window.size))
            if window.overhangs:
                inside = lax.broadcasted_iota(jnp.int32, shape, kept.index(axis)) + window.start < extents[axis]
                mask = inside if mask is None else mask & inside
        if not indices:
            return ref.at[pl.ds(jnp.int32(0), 1)], (1,), None
        return ref.at[tuple(at)], shape, mask

    def load(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], again: str) -> Array:
        if tensor in self.lookups:
            return self._looked_up(self.lookups[tensor], indices, windows, again)
        ref, _, mask = self._view(self.inputs[tensor], indices, windows, self.padded.get(tensor))
        return _compat.masked_load(ref, mask, _EVICTION.get(again))

    def _looked_up(
        self, lookup: Lookup, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], again: str
    ) -> Array:
        """The tile of a looked-up tensor: every dimension of the source has an index for each element, so the tile is in the order
        of the result's axes whatever the order of the source's. What lies outside is neither read there nor in the table.

        Positions in the table end at its last entry: it is read without a mask. Those in the source go on, hidden by a mask: Triton
        loads neighbours at once where it sees that positions follow each other, and not behind a minimum.
        """
        window = {a: windows[b] for a, b in zip(lookup.result.axes, indices, strict=True)}
        kept = [a for a in lookup.result.axes if window[a].size != 1]
        shape = tuple(window[a].size for a in kept)
        mask: Array | None = None
        zero = lax.broadcasted_iota(jnp.int32, [1] * max(1, len(kept)), 0)  # an index must be no number of Python
        at: dict[Axis, Array] = {}
        for axis, own in window.items():
            at[axis] = zero + own.start if isinstance(own.start, int) else own.start
            if axis in kept:
                along = [own.size if a == axis else 1 for a in kept]
                at[axis] = lax.broadcasted_iota(jnp.int32, along, kept.index(axis)) + own.start
            if own.overhangs:
                inside = jnp.broadcast_to(at[axis] < axis.extent, shape)
                mask = inside if mask is None else mask & inside
        in_table = {a: jnp.minimum(at[a], a.extent - 1) if own.overhangs else at[a] for a, own in window.items()}
        row: Array = 0
        if lookup.along is not None and lookup.blocks is not None:
            along_rows = jnp.asarray(in_table[lookup.along], jnp.int32)
            in_table[lookup.blocks], row = (
                f(along_rows, jnp.full_like(along_rows, lookup.block)) for f in (lax.div, lax.rem)
            )
        table = self.inputs[_table(lookup)]
        entry = _compat.masked_load(table.at[tuple(in_table[a] for a in lookup.table.axes) or (zero,)], None)
        at[lookup.rows] = in_range(entry, lookup.count) * lookup.block + row
        source = self.inputs[_source(lookup)].at[tuple(at[a] for a in lookup.source.axes)]
        found = _compat.masked_load(source, mask, _EVICTION.get(again))
        if lookup.fill is not None:
            found = select(is_inside(entry, lookup.count), found, jnp.asarray(lookup.fill.value, found.dtype))
            if mask is not None:  # what lies outside reads as zero
                found = select(mask, found, jnp.zeros((), found.dtype))
        return found

    def store(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], value: Array) -> None:
        ref, shape, mask = self._view(self.outputs[tensor], indices, windows)
        _compat.masked_store(ref, value.reshape(shape), mask)

    def contract(self, lhs: Tile, rhs: Tile, over: tuple[Axis, ...], dtype: str, precision: str | None) -> Tile:
        kept = [tuple(a for a in t.axes if a not in over) for t in (lhs, rhs)]
        sizes = dict(zip((*lhs.axes, *rhs.axes), (*lhs.array.shape, *rhs.array.shape), strict=True))
        sides = [prod(sizes[a] for a in axes) for axes in (*kept, over)]
        if not _is_matrix_product(over, *kept) or min(sides) < SMALLEST_DOT:
            return _multiply_and_sum(lhs, rhs, over, dtype)
        a, b = (_matrix(t, over[0], first=n == 1) for n, t in enumerate((lhs, rhs)))
        out = jnp.dot(a, b, precision=dot_precision(precision), preferred_element_type=jnp.dtype(dtype))
        axes = (*kept[0], *kept[1])
        return Tile(out if len(axes) == 2 else out.reshape([sizes[x] for x in axes]), axes)

    def pin(self, value: Array) -> Array:
        # there is no barrier in Triton, which computes a value once; XLA, which interprets, may compute it again for each user
        return lax.optimization_barrier(value) if self.interpreted else value

    def loop(
        self,
        start: Array,
        stop: Array,
        body: Callable[[Array, tuple[Array, ...]], tuple[Array, ...]],
        init: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        result: tuple[Array, ...] = lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, init)
        return result


class _AheadInterpreter(Interpreter):
    """Runs statements, with the loads of a loop ahead of the trips that need them."""

    def _loop(self, loop: Loop, scope: Scope) -> None:
        """Runs a loop whose loads begin trips ahead: what they find is carried until the trip that needs it."""
        # there is no segment where masks hide every tile
        ahead = self.program.prefetch_distance if len(loop.segments) == 1 else 0
        loads = [s for g in loop.segments for s in g.body if isinstance(s, Load) and loop.axis in s.indices]
        if not ahead or not loads:
            super()._loop(loop, scope)
            return
        (segment,) = loop.segments
        rest = replace(segment, body=tuple(s for s in segment.body if s not in loads))
        start, stop = (jnp.int32(self.value(bound, scope).array) for bound in (segment.start, segment.stop))

        def place(trip: Array) -> Array:
            return start + stop - 1 - trip if loop.backwards else trip

        def loaded(trip: Array) -> list[Tile]:
            """Runs the loads of a trip. Beyond the last trip it loads what that one does again, which nobody reads."""
            inner = scope.nested()
            begin = jnp.int32(segment.offset) + place(jnp.minimum(trip, stop - 1)) * segment.tile
            inner.windows[loop.axis] = DynamicSlice(begin, segment.tile, segment.edge)
            self.run(tuple(loads), inner)
            return [inner.names[s.name] for s in loads]

        state = self.initial_state(loop, scope)
        first = [tile for n in range(ahead) for tile in loaded(start + n)]
        found = [tile.array for tile in first]

        def trip(number: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            own, waiting = state[: -len(found)], state[-len(found) :]
            begun = [tile.array for tile in loaded(number + ahead)]
            inner = scope.nested()
            for s, array, tile in zip(loads, waiting, first, strict=False):
                inner.names[s.name] = Tile(array, tile.axes)
            return (*self.trip(loop, rest, inner, place(number), own), *waiting[len(loads) :], *begun)

        state = self.machine.loop(start, stop, trip, (*state, *found))
        self.bind_state(loop, state[: -len(found)], scope)


class _KernelInterpreter(_AheadInterpreter):
    """Runs statements for the compiler of Triton, which has no instruction that rounds to integers, and four for `exp2`."""

    def __init__(self, program: TileProgram, machine: Machine) -> None:
        super().__init__(program, machine)
        self.by_instruction = by_instruction(program, rounded=is_approximate((program,)))

    def _apply(self, op: str, args: list[Tile], node: Apply, dtype: str) -> Tile:
        if op == "exp2" and node in self.by_instruction and args[0].axes and not _compat.is_rocm():
            return Tile(_power_of_two(args[0].array), args[0].axes)
        if op in _ROUNDINGS:
            wide = jnp.asarray(
                args[0].array, jnp.promote_types(dtype, jnp.float32)
            )  # integers of half types are theirs, too
            return Tile(_ROUNDINGS[op](wide).astype(dtype), args[0].axes)
        return super()._apply(op, args, node, dtype)


def _power_of_two(x: Array) -> Array:
    """Computes `exp2` of a tile of float32 by the instruction of an NVIDIA GPU."""
    from jax.experimental.pallas import triton

    (found,) = triton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return found


def round_even(x: Array) -> Array:
    """Rounds to the nearest integer, ties to even: a sum beyond 2^p is rounded to one, where p is the length of the mantissa."""
    first = jnp.asarray(2.0 ** jnp.finfo(x.dtype).nmant, x.dtype)
    size = lax.abs(x)
    whole = jnp.where(size < first, (size + first) - first, size)
    return _with_sign(x, whole)


def round_away(x: Array) -> Array:
    """Rounds to the nearest integer, ties away from zero."""
    size = lax.abs(x)
    down = lax.floor(size)
    whole = jnp.where(size - down >= 0.5, down + 1, down)
    return _with_sign(x, whole)


def _with_sign(x: Array, size: Array) -> Array:
    """A size with the sign of x; zero is x itself, as it has a sign."""
    return jnp.where(x == 0, x, jnp.where(x < 0, -size, size))


_ROUNDINGS = {"round_even": round_even, "round_away": round_away}


def _source(lookup: Lookup) -> str:
    return f"{lookup.result.name}.source"


def _table(lookup: Lookup) -> str:
    return f"{lookup.result.name}.table"


def _is_matrix_product(over: Collection[Axis], left: Collection[Axis], right: Collection[Axis]) -> bool:
    """Each side keeps axes of its own: the rows of the left one, together, and the columns of the right one."""
    return len(over) == 1 and bool(left) and bool(right) and set(left).isdisjoint(right)


def _matrix(tile: Tile, over: Axis, *, first: bool) -> Array:
    """The tile with the contracted axis as its first or last dimension, and all others as the other one."""
    array, at = tile.array, tile.axes.index(over)
    if len(tile.axes) == 2:
        return array if (at == 0) == first else array.T
    rest = [d for d in range(len(tile.axes)) if d != at]
    order = [at, *rest] if first else [*rest, at]
    array = array if order == sorted(order) else lax.transpose(array, order)
    length = tile.array.shape[at]
    return array.reshape((length, -1) if first else (-1, length))


def product_too_large(program: TileProgram) -> str | None:
    """Returns why a contraction of the kernel has no instructions; None if all have.

    Such a contraction is no matrix product, and its tiles are too large to be multiplied element by element.
    """

    for s, tiles in in_windows(program.body, dict(program.tiles)):
        if not isinstance(s, Contract):
            continue
        sides = [frozenset(a for a in e.axes if tiles[a] > 1) for e in (s.lhs, s.rhs)]
        over = frozenset(a for a in s.over if tiles[a] > 1)
        kept = [side - over for side in sides]
        if _is_matrix_product(over, *kept):
            continue
        sizes = {a.name: tiles[a] for a in sorted(sides[0] | sides[1])}
        if prod(sizes.values()) > LARGEST_PRODUCT:
            return f"{s.name}, a product over tiles of {' x '.join(f'{a}:{n}' for a, n in sizes.items())}, is no matrix product"
    return None


def _multiply_and_sum(lhs: Tile, rhs: Tile, over: tuple[Axis, ...], dtype: str) -> Tile:
    """A contraction without matrix units."""
    axes = tuple(dict.fromkeys((*lhs.axes, *rhs.axes)))
    sizes = dict(zip((*lhs.axes, *rhs.axes), (*lhs.array.shape, *rhs.array.shape), strict=True))
    if prod(sizes.values()) > LARGEST_PRODUCT:
        raise TargetError(f"a product over tiles of {' x '.join(f'{a}:{n}' for a, n in sizes.items())} elements has no matrix "
                          "instruction: tile at most one grid axis (FuseOptions.tiles)")  # fmt: skip
    spread = []
    for tile in (lhs, rhs):
        order = sorted(range(len(tile.axes)), key=lambda d, t=tile: axes.index(t.axes[d]))  # type: ignore[misc]
        array = lax.transpose(tile.array, order) if order != list(range(len(order))) else tile.array
        missing = tuple(d for d, a in enumerate(axes) if a not in tile.axes)
        spread.append(lax.convert_element_type(lax.expand_dims(array, missing), jnp.dtype(dtype)))
    dims = tuple(d for d, a in enumerate(axes) if a in over)
    return Tile(jnp.sum(spread[0] * spread[1], axis=dims), tuple(a for a in axes if a not in over))


def block_starts(program: TileProgram, number: Array) -> dict[Axis, Array]:
    """Returns the first position of a numbered grid block along every grid axis.

    The last axis runs fastest, but for `interleave`.

    number: an int, or a traced int32.
    """
    counts = {a: -(-a.extent // t) for a, t in program.grid}
    if program.interleave > 1:
        last = counts[program.grid[-1][0]]
        group, rest = _divide(number, last * program.interleave)
        position, member = _divide(rest, program.interleave)
        number = (group * program.interleave + member) * last + position
    starts: dict[Axis, Array] = {}
    for axis, tile in reversed(program.grid):
        count = counts[axis]
        number, position = _divide(number, count)
        if axis in program.descending:
            position = count - 1 - position
        starts[axis] = position * tile
    return starts


def _divide(number: Array, by: int) -> tuple[Array, Array]:
    if isinstance(number, int):
        return divmod(number, by)
    return (lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))) if by > 1 else (number, jnp.int32(0))


def _with_rows(array: jax.Array, row: int) -> jax.Array:
    """An array whose rows, along its last dimension with several positions, are made longer by zeros."""
    last = max(n for n, extent in enumerate(array.shape) if extent > 1)
    zero = jnp.zeros((), array.dtype)
    return lax.pad(array, zero, [(0, row - e if n == last else 0, 0) for n, e in enumerate(array.shape)])


def call(
    program: TileProgram, inputs: Mapping[str, jax.Array], *, interpret: bool = False, compiler_params: Any = None
) -> dict[str, jax.Array]:
    """Every output of the kernel, by name. `inputs[name]` has one dimension per axis of the tensor."""
    from jax.experimental import pallas as pl  # planning asks this module what fits, and needs no Pallas

    known = {t.name: inputs[t.name] for t in program.inputs if all(t != x.result for x in program.lookups)}
    for x in program.lookups:
        known |= {
            _source(x): shaped(inputs[x.source.name], x.source.axes),
            _table(x): shaped(inputs[x.table.name], x.table.axes),
        }
    names_in, names_out = [*known], [t.name for t in program.outputs]
    counts = [-(-a.extent // t) for a, t in program.grid]
    own = as_threads_run_it(program)
    padded = padded_rows(own.program)
    known |= {name: _with_rows(known[name], row) for name, row in padded.items()}
    runner = _AheadInterpreter if interpret else _KernelInterpreter  # XLA, which interprets, cancels what rounds

    def body(*refs: Any) -> None:
        machine = _PallasMachine(
            dict(zip(names_in, refs, strict=False)),
            dict(zip(names_out, refs[len(names_in) :], strict=True)),
            program.lookups,
            padded=padded,
            interpreted=interpret,
        )
        runner(own.program, machine).run_block(block_starts(program, pl.program_id(0)) | dict(own.positions))

    # scalars have no tile: they travel as arrays of one element
    arrays = [x.reshape((1,)) if x.ndim == 0 else x for x in known.values()]
    out_shape = [
        jax.ShapeDtypeStruct(tuple(a.extent for a in t.axes) or (1,), jnp.dtype(t.dtype)) for t in program.outputs
    ]
    results = pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=(prod(counts),),
        interpret=interpret,
        name=readable(program.name)[:60],
        compiler_params=compiler_params,
    )(*arrays)
    return {t.name: r.reshape(tuple(a.extent for a in t.axes)) for t, r in zip(program.outputs, results, strict=True)}
