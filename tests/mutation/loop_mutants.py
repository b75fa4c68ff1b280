"""Mistakes in the kernels of loops: what a trip reads, computes and hands on, and the loads that run ahead of it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from pallasfuse.ir.expr import Apply, Expr, const, read
from pallasfuse.ir.tile_program import Carry, Let, Load, Loop, Reduce, Statement, Store, TileProgram, verify
from tests.mutation.planting import Mutant, Plant, instead_of, result_of, rewrite, value_at

_LOWERING = "pallasfuse.tiling.recurrence"
_KERNEL = f"{_LOWERING}:_Kernel"
_LOOPS = "pallasfuse.recurrences"
_SELECTIONS = "pallasfuse.decompositions.selections"
_PLACES = "pallasfuse.decompositions.computed_places"
_EMITTED = "pallasfuse.emission.pallas_kernel"


def _programs(change: Callable[[TileProgram], TileProgram]) -> Plant:
    """Every kernel of a loop is changed after it is lowered."""
    return result_of(f"{_LOWERING}:lower_recurrence", lambda program, *_: verify(change(program)))


def _statements(change: Callable[[Statement], Statement]) -> Plant:
    """Every statement of a kernel is changed, those of its loop first."""

    def inside(s: Statement) -> Statement:
        if isinstance(s, Loop):
            s = replace(s, segments=tuple(replace(g, body=tuple(map(inside, g.body))) for g in s.segments))
        return change(s)

    return _programs(lambda p: replace(p, body=tuple(map(inside, p.body))))


def _loops(change: Callable[[Loop], Loop]) -> Plant:
    return _statements(lambda s: change(s) if isinstance(s, Loop) else s)


def _carries(change: Callable[[tuple[Carry, ...]], tuple[Carry, ...]]) -> Plant:
    return _loops(lambda s: replace(s, carries=change(s.carries)))


def _turned(values: list[Any]) -> list[Any]:
    return [*values[1:], *values[:1]]


def _of_another(field: str) -> Callable[[tuple[Carry, ...]], tuple[Carry, ...]]:
    """What one carried value has is another one's."""

    def change(carries: tuple[Carry, ...]) -> tuple[Carry, ...]:
        others = _turned([getattr(c, field) for c in carries])
        return tuple(replace(c, **{field: other}) for c, other in zip(carries, others, strict=True))

    return change


def _segments(**changes: Any) -> Callable[[Loop], Loop]:
    return lambda s: replace(s, segments=tuple(replace(g, **changes) for g in s.segments))


def _without_last_trip(s: Loop) -> Loop:
    fewer = const(s.axis.extent - 1, "int32")
    return replace(_segments(stop=fewer)(s), to_visit=fewer)


def _carried_of(s: Loop, store: Store) -> Statement:
    """The store of a slice stores what the trip was handed, of the same axes."""
    same = [c for c in s.carries if set(c.axes) == set(store.indices) - {s.axis}]
    return replace(store, value=read(same[0].name, same[0].axes, same[0].dtype)) if same else store


def _stores_the_old(s: Loop) -> Loop:
    return replace(
        s,
        segments=tuple(
            replace(g, body=tuple(_carried_of(s, x) if isinstance(x, Store) else x for x in g.body)) for g in s.segments
        ),
    )


def _last_is_the_first(p: TileProgram) -> TileProgram:
    (loop,) = (s for s in p.body if isinstance(s, Loop))
    begun = {c.name: c.init for c in loop.carries}
    body = tuple(
        replace(s, value=begun[next(iter(s.value.tensors))])
        if isinstance(s, Store) and s.value.tensors & begun.keys() else s for s in p.body
    )  # fmt: skip
    return replace(p, body=body)


def _keeps_its_state(s: Loop) -> Loop:
    """The first of the carried values is handed on as it was."""
    first, *others = s.carries
    return replace(s, carries=(replace(first, next_name=first.name), *others))


def _not_renamed(s: Statement) -> Statement:
    return replace(s, renamed=()) if isinstance(s, Let) else s


def _finds_numbers(s: Statement) -> Statement:
    """Nothing differs from itself."""

    def step(node: Apply) -> Expr | None:
        return const(False, "bool") if node.op == "ne" and node.args[0] is node.args[1] else None

    return replace(s, value=rewrite(s.value, step)) if isinstance(s, Let | Reduce) else s


def _other_slices(p: TileProgram) -> TileProgram:
    """Loads of two tensors of one shape change places."""
    (loop,) = (s for s in p.body if isinstance(s, Loop))
    (segment,) = loop.segments
    loads = [s for s in segment.body if isinstance(s, Load) and loop.axis in s.indices]
    of = {
        a.tensor: b.tensor for a in loads for b in loads if a is not b and (a.indices, a.dtype) == (b.indices, b.dtype)
    }
    body = tuple(replace(s, tensor=of.get(s.tensor, s.tensor)) if isinstance(s, Load) else s for s in segment.body)
    changed = replace(loop, segments=(replace(segment, body=body),))
    return replace(p, body=tuple(changed if s is loop else s for s in p.body))


def _reads_ahead(change: Callable[[Any, Any], Any]) -> Plant:
    """The trip of which slices are loaded ahead is another one."""
    names = {n: getattr(jnp, n) for n in dir(jnp) if not n.startswith("__")}
    return value_at(f"{_EMITTED}:jnp", SimpleNamespace(**{**names, "minimum": change}))


def _in_recurrences(change: Callable[[Any], Any]) -> Plant:
    return result_of(f"{_LOOPS}:recurrence_of", lambda found, *_: (change(found[0]), *found[1:]))


def _one_later(real: Any, self: Any, start: int, length: int, stride: int) -> Any:
    """A part of an axis begins one position later, where the axis has one."""
    later = start + 1 if start + 1 + (length - 1) * stride < self.length else start
    return real(self, later, length, stride)


def _from_zero(carries: tuple[Carry, ...]) -> tuple[Carry, ...]:
    return tuple(replace(c, init=const(0, c.dtype)) for c in carries)


def _forwards(real: Any, self: Any, loop: Loop, scope: Any) -> Any:
    return real(self, replace(loop, backwards=False), scope)


def _one_before_the_last(trip: Any, last: Any) -> Any:
    return jnp.minimum(trip, last - 1)


def _next(trip: Any, last: Any) -> Any:
    return jnp.minimum(trip + 1, last)


def _mutant(name: str, plant: Plant, subject: str) -> Mutant:
    return Mutant(name, "loops", plant, subject, "loop proof")


MUTANTS = (
    _mutant("a transposed state is not renamed", _statements(_not_renamed), "turned"),
    _mutant("a trip hands on another value", _carries(_of_another("next_name")), "states_swap"),
    _mutant("two states begin as each other", _carries(_of_another("init")), "states_rotate"),
    _mutant("a state begins as zero", _carries(_from_zero), "recurrent_network"),
    _mutant("a state stays what it was", _loops(_keeps_its_state), "edit_distance"),
    _mutant("the last state is the first", _programs(_last_is_the_first), "delta_rule"),
    _mutant("a slice is that of the state before", _loops(_stores_the_old), "moving_average"),
    _mutant("a loop goes backwards", _loops(lambda s: replace(s, backwards=True)), "moving_average"),
    _mutant("a loop goes forwards", _loops(lambda s: replace(s, backwards=False)), "discounted_backwards"),
    _mutant("a scan is read in the other direction",
            _in_recurrences(lambda r: replace(r, backwards=not r.backwards)), "states_swap"),
    _mutant("the last trip is left out", _loops(_without_last_trip), "moving_average"),
    _mutant("slices begin one trip later", _loops(_segments(offset=1)), "moving_average"),
    _mutant("slices are those of another tensor", _programs(_other_slices), "selective_state_space"),
    _mutant("sums add what lies beyond their axis", result_of(f"{_KERNEL}._is_padded", lambda *_: False), "row_search"),
    _mutant("the last trip loads the slices of the one before", _reads_ahead(_one_before_the_last), "moving_average"),
    _mutant("a trip loads the slices of the next one", _reads_ahead(_next), "delta_rule"),
    _mutant("loads ahead go forwards in a loop that goes backwards",
            instead_of(f"{_EMITTED}:_AheadInterpreter._loop", _forwards), "discounted_backwards"),
    _mutant("a part begins one position later", instead_of(f"{_SELECTIONS}:View.part", _one_later), "gated_unit"),
    _mutant("parts from the end are in order", result_of(f"{_SELECTIONS}:View.backwards", lambda _, self: self), "repeated"),
    _mutant("the element after the one at a computed place is taken and changed",
            result_of(f"{_PLACES}:_index", lambda found, *_: (found[0] + 1, found[1])), "farthest_points"),
    _mutant("places of what is no number are not asked for", _statements(_finds_numbers), "best_paths"),
    _mutant("results are called by each other's names",
            result_of(f"{_LOOPS}:kernel_of", lambda k, *_: replace(k, results=k.results[::-1])), "states_rotate"),
    _mutant("the kernel is not what is lowered",
            result_of(f"{_LOOPS}:kernel_of", lambda k, *_: replace(k, kernel=_last_is_the_first(k.kernel))), "states_rotate"),
)  # fmt: skip
