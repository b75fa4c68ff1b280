"""Rows that XLA keeps on the chip on a GPU: reductions of a row, and the one thing that is made of them along the same row.

XLA looks for diamonds before it fuses anything else: a map of what a row reduction reduces, and of its result repeated
along the row. It makes one kernel of each, and of what can be computed with them along the row. Such a kernel has one result:
where several are wanted, each has a kernel of its own, which reduces the rows again. A reduction whose result is wanted for
something else than its row stays alone, and so do all that read it. (XLA's rewriter of softmaxes; found from the programs that
XLA compiles for an H100, for 80 functions.)
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, postorder, reads_in
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.price.xla_habits import Habits
from pallasfuse.price.xla_products import places
from pallasfuse.price.xla_reductions import is_product

Loop = tuple[Nest, Expr]
"""A nest that XLA computes in a loop, and its body over what is in memory."""


def space_of(nest: Nest) -> frozenset[Axis]:
    """The axes of the points that a nest runs over."""
    return frozenset((*nest.axes, *nest.reduced))


def inner_reductions(
    loops: Sequence[Loop], of_diamonds: Set[str], outside: Collection[str], habits: Habits
) -> frozenset[str]:  # fmt: skip
    """Returns the reductions that are computed inside of all that reads their results, along the same row.

    of_diamonds: what is computed inside of them; outside: tensors that something else than these loops reads: libraries,
    operations without a nest, the caller.
    """
    rows = {
        nest.name: (nest, body) for nest, body in loops
        if nest.name in of_diamonds and nest.name not in outside and _is_row(nest, body, habits)
    }  # fmt: skip
    readers: dict[str, list[Loop]] = {name: [] for name in rows}
    for loop in loops:
        for tensor in rows.keys() & loop[1].tensors:
            readers[tensor].append(loop)
    found = frozenset(n for n, row in rows.items() if readers[n] and all(_along(row, r, habits) for r in readers[n]))
    return found | _ended(loops, found, outside, habits)


def _ended(loops: Sequence[Loop], inner: Set[str], outside: Collection[str], habits: Habits) -> frozenset[str]:
    """Returns the reductions of what inner ones make which are read by one map, a number of each row: the kernel ends with it."""
    last = {
        nest.name: nest for nest, body in loops
        if nest.name not in inner and nest.name not in outside and not inner.isdisjoint(body.tensors)
        and _is_row(nest, body, habits) and volume(nest.axes) > 1
    }  # fmt: skip
    readers: dict[str, list[Nest]] = {name: [] for name in last}
    for nest, body in loops:
        for tensor in last.keys() & body.tensors:
            readers[tensor].append(nest)
    return frozenset(
        name for name, nest in last.items()
        if len(readers[name]) == 1 and not readers[name][0].is_reduction and readers[name][0].axes == nest.axes
    )  # fmt: skip


def row_fusions(loops: Sequence[Loop], inner: Collection[str]) -> Iterator[LoopFusion]:
    """Yields the kernels of the loops that read inner reductions and are none themselves: each with all those that it needs."""
    inside = {nest.name: (nest, body) for nest, body in loops if nest.name in inner}
    for nest, body in loops:
        if nest.name in inside or inside.keys().isdisjoint(body.tensors):
            continue
        needed: dict[str, Loop] = {}
        waiting = [body]
        while waiting:
            for tensor in sorted(inside.keys() & waiting.pop().tensors - needed.keys()):
                needed[tensor] = inside[tensor]
                waiting.append(inside[tensor][1])
        parts = [part for part in inside.values() if part[0].name in needed]
        fusion = LoopFusion([n for n, _ in (*parts, (nest, body))], [b for _, b in (*parts, (nest, body))], is_row=True)
        for part in fusion.bodies:
            fusion.reads |= dict(places(part))
        fusion.inside = frozenset(needed)
        yield fusion


def _is_row(nest: Nest, body: Expr, habits: Habits) -> bool:
    """Does a nest reduce rows whose elements are neighbours in memory, and which are short enough for a block? Rows of values that
    no tensor holds lie nowhere, and are as good."""
    if not nest.is_reduction or nest.picks or volume(nest.reduced) > habits.longest_row:
        return False
    if is_product(nest):
        return False
    space, row = space_of(nest), frozenset(nest.reduced)
    return all(frozenset(axes[-len(row) :]) == row for (_, axes), _ in places(body) if frozenset(axes) == space)


def _along(row: Loop, reader: Loop, habits: Habits) -> bool:
    """Does a loop read a row reduction along the same row, and what it reduces, too?"""
    nest, body = row
    space = space_of(nest)
    if space_of(reader[0]) != space or frozenset(reader[0].reduced) not in (frozenset(nest.reduced), frozenset()):
        return False
    if reader[0].is_reduction and not _is_row(*reader, habits):
        return False
    if volume(nest.axes) == 1 and _computes_number(reader[1], nest.name):
        return False
    return not _read_over(body, space).isdisjoint(_read_over(reader[1], space)) or not (
        _computed_over(body, space).isdisjoint(_computed_over(reader[1], space))
    )


@lru_cache(1 << 10)
def _computes_number(body: Expr, reduced: str) -> bool:
    """Is anything but a cast computed of the number that the only row is reduced to, before the row reads it?

    XLA's rewriter then finds no diamond. (66 functions of one row and of two, compiled for an H100: 2 differ.)
    """
    return any(
        isinstance(n, Apply) and n.op != "convert" and reduced in n.tensors and volume(n.axes) == 1
        for n in postorder(body)
    )


@lru_cache(1 << 10)
def _read_over(body: Expr, space: frozenset[Axis]) -> frozenset[object]:
    """The places that an expression reads at every point of a space."""
    return frozenset(place for place, _ in places(body) if frozenset(place[1]) == space)


@lru_cache(1 << 10)
def _computed_over(body: Expr, space: frozenset[Axis]) -> frozenset[Expr]:
    """The values in an expression that differ from point to point of a space."""
    return frozenset(n for n in postorder(body) if isinstance(n, Apply) and n.axes == space)


# --- diamonds that are stored, as something else than their row is read from them


_MOST_SOURCES = 64
"""The tensors through which a map and a reduction are asked for what both are made of."""


@dataclass(frozen=True, slots=True)
class _Diamond:
    """A map of what row reductions reduce, and of their results."""

    nest: Nest
    reductions: tuple[Nest, ...]


@dataclass(frozen=True, slots=True)
class _Program:
    """The diamonds of a program, in order, and the nests that read each tensor."""

    diamonds: tuple[_Diamond, ...]
    users: Mapping[str, Sequence[Nest | External]]

    def readers(self, tensor: str, needed: Collection[str]) -> Iterator[Nest | External]:
        return (u for u in self.users.get(tensor, ()) if u.name in needed)


@dataclass(frozen=True, slots=True)
class Diamonds:
    """The diamonds that XLA finds in a program."""

    stored: frozenset[str] = frozenset()
    """The maps that end one and are written to memory: something is read from them that is not of their row."""
    inner: frozenset[str] = frozenset()
    """The reductions that are computed inside of one, and the maps of their results."""


def diamonds_in(program: LoopProgram, needed: Collection[str], kept: Set[str], habits: Habits) -> Diamonds:
    """Returns the diamonds. needed: the nests that are computed; kept: the tensors that are stored in any case."""
    if not habits.longest_row:
        return Diamonds()
    found: set[str] = set()
    inside: set[str] = set()
    of = _program(program)
    for one in reversed(of.diamonds):
        stored = kept | found
        if one.nest.name not in needed:
            continue
        inner = {r: _for_its_row(r, of, needed, stored) for r in one.reductions if _is_row(r, r.body, habits)}
        inside.update(*inner.values())
        rows = {frozenset(r.reduced) for r, found_inside in inner.items() if found_inside}
        if rows and one.nest.name not in stored and not _stays_in_row(one.nest, rows, of, needed, stored):
            found.add(_last_map(one.nest, of, needed, stored))
    return Diamonds(frozenset(found), frozenset(inside))


def _find(program: LoopProgram) -> _Program:
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    users: dict[str, list[Nest | External]] = {}
    for node in program.nests:
        for tensor in node.reads:
            users.setdefault(tensor, []).append(node)
    made_of: dict[str, frozenset[str]] = {}
    """The reductions that are made into a tensor point by point, with no more axes than their results."""
    found: list[_Diamond] = []
    for nest in nests.values():
        own = frozenset(nest.axes)
        reads = [n for n in reads_in(nest.body) if n.tensor in made_of]
        if nest.is_reduction:
            made_of[nest.name] = frozenset() if nest.picks or is_product(nest) else frozenset((nest.name,))
            continue
        made_of[nest.name] = frozenset[str]().union(*(made_of[r.tensor] for r in reads if frozenset(r.indices) == own))
        repeated = frozenset[str]().union(*(made_of[r.tensor] for r in reads if frozenset(r.indices) < own))
        reduced = tuple(nests[name] for name in sorted(repeated) if space_of(nests[name]) == own)
        if any(not _sources(nest, own, nests).isdisjoint(_sources(r, own, nests)) for r in reduced):
            found.append(_Diamond(nest, reduced))
    return _Program(tuple(found), users)


_program = Recent(_find)


def _sources(nest: Nest, space: frozenset[Axis], nests: Mapping[str, Nest]) -> set[str]:
    """Returns the tensors of which a nest, or a map that it reads, reads an element at every point of a space."""
    found: set[str] = set()
    waiting = [nest]
    while waiting and len(found) < _MOST_SOURCES:
        for tensor in sorted(_read_at_every_point(waiting.pop().body, space) - found):
            found.add(tensor)
            if tensor in nests and not nests[tensor].is_reduction:
                waiting.append(nests[tensor])
    return found


def _read_at_every_point(body: Expr, space: frozenset[Axis]) -> set[str]:
    return {n.tensor for n in reads_in(body) if frozenset(n.indices) == space}


def _for_its_row(reduction: Nest, of: _Program, needed: Collection[str], stored: Set[str]) -> set[str]:
    """A reduction and the maps of its result, each made of the one before, if the last is repeated along the row; else nothing."""
    if reduction.name not in needed or reduction.name in stored:
        return set()
    space, last = space_of(reduction), reduction
    found = {reduction.name}
    while True:
        users = list(of.readers(last.name, needed))
        if users and all(isinstance(u, Nest) and space_of(u) == space for u in users):
            return found
        if len(users) != 1 or not isinstance(users[0], Nest) or users[0].is_reduction or users[0].name in stored:
            return set()
        last = users[0]
        if frozenset(last.axes) != frozenset(reduction.axes):
            return set()
        found.add(last.name)


def _stays_in_row(
    nest: Nest, rows: Collection[frozenset[Axis]], of: _Program, needed: Collection[str], stored: Set[str]
) -> bool:  # fmt: skip
    """Is everything that is read from a diamond made along its row, or stored as a map of it?"""
    space = frozenset(nest.axes)
    waiting, seen = [nest.name], set[str]()
    while waiting:
        tensor = waiting.pop()
        for user in of.readers(tensor, needed):
            if isinstance(user, External):
                return False
            at_every_point = tensor in _read_at_every_point(user.body, space)
            if is_product(user) and at_every_point:
                continue
            if not at_every_point or space_of(user) != space or user.picks:
                return False
            if user.is_reduction and frozenset(user.reduced) not in rows:
                return False
            if not user.is_reduction and user.name not in stored and user.name not in seen:
                seen.add(user.name)
                waiting.append(user.name)
    return True


def _last_map(nest: Nest, of: _Program, needed: Collection[str], stored: Set[str]) -> str:
    """Returns the name of the last of the maps that are made of a diamond, each of the one before and read by one alone."""
    while True:
        users = list(of.readers(nest.name, needed))
        if len(users) != 1 or not isinstance(users[0], Nest) or users[0].is_reduction:
            return nest.name
        user = users[0]
        if frozenset(user.axes) != frozenset(nest.axes) or user.name in stored:
            return nest.name
        nest = user
