"""Concatenations along a reduced axis are parts of that axis: what reduces them reduces the parts, and joins the results.

`max(concat(a, b))` becomes `max(max(a), max(b))`, a product over a concatenated axis a sum of products, and a slice that takes one
part reads that part. So the concatenated array, and everything that is computed of it element by element, need not exist. A padding
is a concatenation with a constant. It is a rewrite of a flat jaxpr, where one part is long and the others are a few elements: of
these each becomes a part of its own, so that no loop is left over it, and the reduction of the long one is a fold that other terms
join. Nothing is computed otherwise than before but for the order in which sums are added up.

`whole` finds where it applies: `_Cuts` says where the dimensions of every variable are cut, `_Parts` computes parts of variables.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.ir import dtypes
from pallasfuse.jaxpr_frontend import elementwise
from pallasfuse.jaxpr_frontend.added_equations import AddedEquations, Atom
from pallasfuse.jaxpr_frontend.inlining import live
from pallasfuse.jaxpr_frontend.plans import dtype_of, shape_of

MOST_APART = 8
"""Elements beside the longest part. Each is a term of its own in whatever reads the axis."""
MOST_CUTS = 2 * MOST_APART
"""Places at which a dimension is cut, for all concatenations together that become parts of it: as many as two of them have. Windows
that move along an axis, one after the other, would cut it in more and more parts, and each is equations of its own."""
LEAST_LONG = 16
"""Elements of the longest part: a shorter axis is no loop anyway."""
_MOST_TIMES, _FEW = MOST_APART + 1, 64
"""A jaxpr in parts has at most so many times as many equations, as if one concatenation cut all of them, and so many more."""
_DEEPEST = 200
"""Equations in a row of which parts are computed; what lies further up is sliced."""
_JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": lax.add, "reduce_prod": lax.mul, "reduce_max": lax.max, "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and, "reduce_or": lax.bitwise_or,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a dimension is cut, and the concatenations that it is cut for, by the numbers of their equations."""

    at: frozenset[int] = frozenset()
    sources: frozenset[int] = frozenset()

    def __or__(self, other: "_Cut") -> "_Cut":
        return _Cut(self.at | other.at, self.sources | other.sources)

    def moved(self, by: int, below: int) -> "_Cut":
        """The cut of what begins `by` further on and has `below` elements; nothing where it is not cut inside."""
        at = frozenset(p for a in self.at if 0 < (p := a + by) < below)
        return _Cut(at, self.sources) if at else _Cut()


_NO_CUT = _Cut()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A jaxpr that computes the same; `replaced` are the variables of the one before that others stand for."""

    jaxpr: Jaxpr
    replaced: Mapping[Var, Atom]


def in_parts(jaxpr: Jaxpr, left: Callable[[JaxprEqn], bool] = lambda eqn: False) -> Rewritten | None:
    """Returns a flat jaxpr that reduces the parts of concatenated axes, and else is the same; None where it has no such reductions.

    None also where that would be several times as many equations.

    left: is an equation to stay as it is? Variables keep their names.
    """
    if not any(e.primitive.name in ("concatenate", "pad") for e in jaxpr.eqns):
        return None
    wanted = _Cuts(jaxpr, [n for n, e in enumerate(jaxpr.eqns) if not left(e)]).wanted()
    while wanted:
        cuts = _Cuts(jaxpr, wanted)
        crowded = cuts.crowded()
        if not crowded:
            found = _Parts(jaxpr, cuts).rewritten()
            return found if found is None or len(found.jaxpr.eqns) <= _MOST_TIMES * len(jaxpr.eqns) + _FEW else None
        wanted -= crowded
    return None


class _Cuts:
    """Where the dimensions of the variables of a jaxpr are cut, for the concatenations `allowed`."""

    def __init__(self, jaxpr: Jaxpr, allowed: Collection[int]) -> None:
        self._of: dict[Var, tuple[_Cut, ...]] = {}
        self._tied: dict[int, int] = {}
        self._reduced: set[int] = set()
        self._allowed = allowed
        for number, eqn in enumerate(jaxpr.eqns):
            if len(eqn.outvars) == 1 and not eqn.effects:
                found = self._found(eqn, number)
                if any(c.at for c in found):
                    self._of[eqn.outvars[0]] = found

    def of(self, atom: Atom) -> tuple[_Cut, ...]:
        """The cut of every dimension."""
        known = self._of.get(atom) if isinstance(atom, Var) else None
        return known or (_NO_CUT,) * len(shape_of(atom))

    def wanted(self) -> frozenset[int]:
        """The concatenations that something other than a product reduces, and those that go with them.

        A product alone gains nothing by being taken apart: its operands are arrays that it reads as they are.
        """
        roots = {self._root(s) for s in self._reduced}
        return frozenset(s for s in self._tied if self._root(s) in roots)

    def crowded(self) -> frozenset[int]:
        """Returns the concatenations for which dimensions are cut at more than `MOST_CUTS` places, and those that go with them."""
        many = {s for cuts in self._of.values() for c in cuts if len(c.at) > MOST_CUTS for s in c.sources}
        roots = set(map(self._root, many))
        return frozenset(s for s in self._tied if self._root(s) in roots)

    def _root(self, source: int) -> int:
        while self._tied[source] != source:
            source = self._tied[source]
        return source

    def _joined(self, *cuts: _Cut) -> _Cut:
        """The cuts of dimensions that are one axis."""
        together = reduce(_Cut.__or__, cuts, _NO_CUT)
        for a, b in pairwise(sorted(together.sources)):
            self._tied[self._root(b)] = self._root(a)
        return together

    def _found(self, eqn: JaxprEqn, number: int) -> tuple[_Cut, ...]:
        name, out = eqn.primitive.name, shape_of(eqn.outvars[0])
        none = (_NO_CUT,) * len(out)
        match name:
            case "concatenate" | "pad":
                return self._sources(eqn, number)
            case "broadcast_in_dim":
                maps = {int(to): d for d, to in enumerate(eqn.params["broadcast_dimensions"])}
            case "transpose":
                maps = {to: int(d) for to, d in enumerate(eqn.params["permutation"])}
            case _ if moves_units(eqn):
                maps = _same_dims(shape_of(eqn.invars[0]), out)
            case "slice" if _steps_one(eqn):
                starts = [int(s) for s in eqn.params["start_indices"]]
                return tuple(c.moved(-s, n) for c, s, n in zip(self.of(eqn.invars[0]), starts, out, strict=True))
            case "dot_general":
                return self._product(eqn)
            case _ if name in _JOINS:
                axes = {int(a) for a in eqn.params["axes"]}
                cuts = self.of(eqn.invars[0])
                self._reduced.update(s for a in axes for s in cuts[a].sources if cuts[a].at)
                return tuple(c for d, c in enumerate(cuts) if d not in axes)
            case _ if is_pointwise(eqn):
                operands = [a for a in eqn.invars if len(shape_of(a)) == len(out)]
                return tuple(
                    self._joined(*(self.of(a)[d] for a in operands if shape_of(a)[d] == n)) for d, n in enumerate(out)
                )
            case _:
                return none
        source = eqn.invars[0]
        cuts = self.of(source)
        return tuple(
            cuts[maps[d]] if d in maps and shape_of(source)[maps[d]] == n else _NO_CUT for d, n in enumerate(out)
        )

    def _sources(self, eqn: JaxprEqn, number: int) -> tuple[_Cut, ...]:
        out = shape_of(eqn.outvars[0])
        pieces = _pieces(eqn)
        if pieces is None:
            return (_NO_CUT,) * len(out)
        along, parts = pieces
        cut = self._short(number, [n for _, n in parts])
        at = 0
        operands = []
        for operand, length in parts:
            if operand is not None:
                inside = self.of(operand)
                cut = self._joined(cut, inside[along].moved(at, at + length) if cut.at else _NO_CUT)
                operands.append(inside)
            at += length
        return tuple(cut if d == along else self._joined(*(o[d] for o in operands)) for d in range(len(out)))

    def _short(self, number: int, lengths: Sequence[int]) -> _Cut:
        """The cut by one long part and a few elements, each by itself."""
        longest = max(lengths)
        if number not in self._allowed or longest < LEAST_LONG or not 0 < sum(lengths) - longest <= MOST_APART:
            return _NO_CUT
        self._tied.setdefault(number, number)
        long = lengths.index(longest)
        ends = list(accumulate(lengths, initial=0))
        inside = {*range(ends[long] + 1), *range(ends[long + 1], ends[-1])} - {0, ends[-1]}
        return _Cut(frozenset(inside), frozenset((number,)))

    def _product(self, eqn: JaxprEqn) -> tuple[_Cut, ...]:
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
        lhs, rhs = self.of(eqn.invars[0]), self.of(eqn.invars[1])
        for a, b in zip(lhs_sum, rhs_sum, strict=True):
            self._joined(lhs[int(a)], rhs[int(b)])
        batch = [self._joined(lhs[int(a)], rhs[int(b)]) for a, b in zip(lhs_batch, rhs_batch, strict=True)]
        left = [c for d, c in enumerate(lhs) if d not in {*map(int, lhs_sum), *map(int, lhs_batch)}]
        right = [c for d, c in enumerate(rhs) if d not in {*map(int, rhs_sum), *map(int, rhs_batch)}]
        return (*batch, *left, *right)


def moves_units(eqn: JaxprEqn) -> bool:
    """Returns whether the result has the same elements in the same order."""
    return eqn.primitive.name in ("squeeze", "expand_dims") or (
        eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is None
    )


def is_pointwise(eqn: JaxprEqn) -> bool:
    """Returns whether every element is computed from the same element of the operands."""
    if eqn.primitive.name not in elementwise.RULES or _compat.is_sharding_constraint(eqn):
        return False
    out = shape_of(eqn.outvars[0])
    return all(
        not shape_of(a)
        or (len(shape_of(a)) == len(out) and all(n in (1, m) for n, m in zip(shape_of(a), out, strict=True)))
        for a in eqn.invars
    )


def _steps_one(eqn: JaxprEqn) -> bool:
    strides = eqn.params["strides"]
    return strides is None or all(int(s) == 1 for s in strides)


def _same_dims(before: Sequence[int], after: Sequence[int]) -> dict[int, int]:
    """The dimensions of the new shape that run over the same elements as one of the old shape, by number."""

    def places(shape: Sequence[int]) -> dict[tuple[int, int], int]:
        return {(prod(shape[d + 1 :]), n): d for d, n in enumerate(shape) if n != 1}

    old = places(before)
    return {d: old[key] for key, d in places(after).items() if key in old}


def _pieces(eqn: JaxprEqn) -> tuple[int, list[tuple[Any, int]]] | None:
    """The dimension along which an equation joins pieces, with each piece and its length; None is the value of a padding."""
    if eqn.primitive.name == "concatenate":
        along = int(eqn.params["dimension"])
        return along, [(a, shape_of(a)[along]) for a in eqn.invars]
    padded = [(d, tuple(map(int, c))) for d, c in enumerate(eqn.params["padding_config"]) if any(c)]
    if len(padded) != 1 or min(padded[0][1]) < 0 or padded[0][1][2]:
        return None
    ((along, (low, high, _)),) = padded
    operand = eqn.invars[0]
    pieces = [(None, low), (operand, shape_of(operand)[along]), (None, high)]
    return along, [p for p in pieces if p[1]]


@dataclass
class _Parts:
    """The new equations, and the variables that stand for parts of others."""

    jaxpr: Jaxpr
    cuts: _Cuts
    added: AddedEquations = field(default_factory=AddedEquations)
    known: dict[tuple[Any, ...], Atom] = field(default_factory=dict)
    instead: dict[Var, Atom] = field(default_factory=dict)
    """Variables that others stand for: reductions of parts, and slices that are parts."""

    def rewritten(self) -> Rewritten:
        self.makers = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        for eqn in self.jaxpr.eqns:
            part = self._in_parts(eqn)
            if part is None:
                self.added.eqns.append(eqn.replace(invars=[self._now(a) for a in eqn.invars]))
            else:
                self.instead[eqn.outvars[0]] = part
        jaxpr, results = self.jaxpr, [self._now(a) for a in self.jaxpr.outvars]
        eqns, _ = live(self.added.eqns, results)
        found = _compat.replace_jaxpr(jaxpr, list(jaxpr.constvars), list(jaxpr.consts), eqns, results)
        return Rewritten(found, self.instead)

    def _now(self, atom: Atom) -> Atom:
        return self.instead.get(atom, atom) if isinstance(atom, Var) else atom

    def _in_parts(self, eqn: JaxprEqn) -> Atom | None:
        """Returns what replaces an equation that reduces or slices something cut; None for all other equations."""
        if len(eqn.outvars) != 1 or eqn.effects:
            return None
        name = eqn.primitive.name
        if name in _JOINS:
            cuts = self.cuts.of(eqn.invars[0])
            dims = [d for d in map(int, eqn.params["axes"]) if cuts[d].at]
            return self._reduced(eqn, dims[0], cuts[dims[0]]) if dims else None
        if name == "dot_general":
            lhs, rhs = self.cuts.of(eqn.invars[0]), self.cuts.of(eqn.invars[1])
            (lhs_sum, rhs_sum), _ = eqn.params["dimension_numbers"]
            for a, b in zip(map(int, lhs_sum), map(int, rhs_sum), strict=True):
                if lhs[a].at or rhs[b].at:
                    return self._contracted(eqn, a, b, lhs[a] | rhs[b])
        if name == "slice" and _steps_one(eqn):
            whole, cuts = shape_of(eqn.invars[0]), self.cuts.of(eqn.invars[0])
            ranges = list(
                zip(map(int, eqn.params["start_indices"]), map(int, eqn.params["limit_indices"]), strict=True)
            )
            cut = [d for d, (r, n) in enumerate(zip(ranges, whole, strict=True)) if r != (0, n)]
            if len(cut) == 1 and cuts[cut[0]].at:
                start, stop = ranges[cut[0]]
                ends = {0, whole[cut[0]], *cuts[cut[0]].at}
                if {start, stop} <= ends and not any(
                    start < a < stop for a in ends
                ):  # of several parts it is one more concatenation
                    return self.part(eqn.invars[0], cut[0], start, stop)
        return None

    def _reduced(self, eqn: JaxprEqn, dim: int, cut: _Cut) -> Atom:
        operand = eqn.invars[0]
        dtype = dtype_of(operand)
        wide = dtypes.accumulator(dtype) if eqn.primitive.name in ("reduce_sum", "reduce_prod") else dtype

        run = partial(_widely, eqn.primitive, wide, **eqn.params)
        parts = [self.added.add(eqn, run, self.part(operand, dim, a, b)) for a, b in _longest_first(operand, dim, cut)]
        return self._joined(eqn, _JOINS[eqn.primitive.name], parts, dtype)

    def _contracted(self, eqn: JaxprEqn, left: int, right: int, cut: _Cut) -> Atom:
        parts = [
            self.added.product(eqn, self.part(eqn.invars[0], left, a, b), self.part(eqn.invars[1], right, a, b))
            for a, b in _longest_first(eqn.invars[0], left, cut)
        ]
        return self._joined(eqn, lax.add, parts, dtype_of(eqn.outvars[0]))

    def _joined(self, eqn: JaxprEqn, join: Callable[[Any, Any], Any], parts: Sequence[Atom], dtype: str) -> Atom:
        total = reduce(lambda a, b: self.added.add(eqn, partial(join), a, b), parts)
        return self.added.converted(eqn, dtype, total)

    # --- parts of variables

    def part(self, atom: Atom, dim: int, start: int, stop: int, depth: int = 0) -> Atom:
        """Returns the variable that stands for `atom[start:stop]` along a dimension."""
        if (start, stop) == (0, shape_of(atom)[dim]):
            return self._now(atom)
        key = atom, dim, start, stop
        if key not in self.known:
            made = self._made(atom, dim, start, stop, depth) if depth < _DEEPEST else None
            self.known[key] = self._sliced(atom, dim, start, stop) if made is None else made
        return self.known[key]

    def _sliced(self, atom: Atom, dim: int, start: int, stop: int) -> Atom:
        like = self.makers.get(atom) if isinstance(atom, Var) else None
        return self.added.add(
            like, partial(lax.slice_in_dim, start_index=start, limit_index=stop, axis=dim), self._now(atom)
        )

    def _made(self, atom: Atom, dim: int, start: int, stop: int, depth: int) -> Atom | None:
        """A part computed from parts of what the variable is computed from; None where it is to be sliced."""
        eqn = self.makers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or atom in self.instead or len(eqn.outvars) != 1 or eqn.effects:
            return None
        name, out = eqn.primitive.name, shape_of(atom)
        of = partial(self._part_of, start=start, stop=stop, depth=depth + 1)
        shape = tuple(stop - start if d == dim else n for d, n in enumerate(out))
        match name:
            case "concatenate" | "pad":
                return self._piece(eqn, dim, start, stop, depth)
            case "iota" if not eqn.invars:
                first = start if int(eqn.params["dimension"]) == dim else 0
                return self.added.add(eqn, partial(_positions, eqn, shape, first))
            case "broadcast_in_dim" if len(eqn.invars) == 1:
                dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
                operand = of(eqn.invars[0], dims.index(dim) if dim in dims else None, out[dim])
                return self.added.add(eqn, partial(eqn.primitive.bind, **{**eqn.params, "shape": shape}), operand)
            case "transpose":
                operand = of(eqn.invars[0], int(eqn.params["permutation"][dim]), out[dim])
                return self.added.add(eqn, partial(eqn.primitive.bind, **eqn.params), operand)
            case _ if moves_units(eqn):
                before = _same_dims(shape_of(eqn.invars[0]), out).get(dim)
                if before is None:
                    return None
                return self.added.add(eqn, partial(lax.reshape, new_sizes=shape), of(eqn.invars[0], before, out[dim]))
            case "slice" if _steps_one(eqn):
                first = int(eqn.params["start_indices"][dim])
                if any(
                    (n == m) == (d == dim) for d, (n, m) in enumerate(zip(shape_of(eqn.invars[0]), out, strict=True))
                ):
                    return None  # along other dimensions, too
                return self.part(eqn.invars[0], dim, start + first, stop + first, depth + 1)
            case "dot_general":
                return self._product(eqn, dim, of)
            case _ if name in _JOINS:
                axes = {int(a) for a in eqn.params["axes"]}
                kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in axes]
                return self.added.add(
                    eqn, partial(eqn.primitive.bind, **eqn.params), of(eqn.invars[0], kept[dim], out[dim])
                )
            case _ if is_pointwise(eqn):
                operands = [of(a, dim if shape_of(a) else None, out[dim]) for a in eqn.invars]
                return self.added.add(eqn, partial(eqn.primitive.bind, **eqn.params), *operands)
        return None

    def _part_of(self, atom: Atom, dim: int | None, extent: int, *, start: int, stop: int, depth: int) -> Atom:
        """The part of an operand, whole where it does not have the dimension, or stretches along it."""
        if dim is None or shape_of(atom)[dim] != extent:
            return self._now(atom)
        return self.part(atom, dim, start, stop, depth)

    def _piece(self, eqn: JaxprEqn, dim: int, start: int, stop: int, depth: int) -> Atom | None:
        pieces = _pieces(eqn)
        if pieces is None or pieces[0] != dim:
            return None
        at = 0
        for operand, length in pieces[1]:
            if at <= start and stop <= at + length:
                if operand is not None:
                    return self.part(operand, dim, start - at, stop - at, depth + 1)
                shape = tuple(stop - start if d == dim else n for d, n in enumerate(shape_of(eqn.outvars[0])))
                return self.added.add(eqn, partial(lax.broadcast, sizes=shape), self._now(eqn.invars[1]))
            at += length
        return None

    def _product(self, eqn: JaxprEqn, dim: int, of: Callable[..., Atom]) -> Atom:
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = (
            [tuple(map(int, s)) for s in p] for p in eqn.params["dimension_numbers"]
        )
        lhs, rhs = eqn.invars
        left = [d for d in range(len(shape_of(lhs))) if d not in (*lhs_sum, *lhs_batch)]
        right = [d for d in range(len(shape_of(rhs))) if d not in (*rhs_sum, *rhs_batch)]
        n = shape_of(eqn.outvars[0])[dim]
        dims = [*zip(lhs_batch, rhs_batch, strict=True), *((d, None) for d in left), *((None, d) for d in right)]
        run = partial(eqn.primitive.bind, **eqn.params)
        return self.added.add(eqn, run, of(lhs, dims[dim][0], n), of(rhs, dims[dim][1], n))


def _widely(primitive: Any, dtype: str, x: Any, **params: Any) -> Any:
    """A reduction whose operand is converted first."""
    return primitive.bind(lax.convert_element_type(x, dtype), **params)


def _positions(iota: JaxprEqn, shape: Sequence[int], first: int) -> Any:
    """The positions of an iota, counted from `first` on: as integers, since a float may not have them all."""
    dtype = iota.params["dtype"]
    result = iota.primitive.bind(**{**iota.params, "shape": tuple(shape), "dtype": np.dtype(np.int32)})
    return lax.convert_element_type(result + np.int32(first), dtype)


def _longest_first(atom: Atom, dim: int, cut: _Cut) -> list[tuple[int, int]]:
    """The parts of a dimension, from where to where."""
    return sorted(pairwise((0, *sorted(cut.at), shape_of(atom)[dim])), key=lambda r: r[0] - r[1])
