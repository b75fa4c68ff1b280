"""Products of sums become sums of products, where the terms of a sum are normalised along what the product sums.

`(softmax(a) - f * softmax(b)) @ v` needs both softmaxes at once, each with a scale of its own that is known only when its sum is
finished. `softmax(a) @ v - (f * softmax(b)) @ v` needs one at a time: each product is accumulated while its scale is repaired. That
is one product more, and no matrix of weights in memory. It is a rewrite of the flat jaxpr; the price decides what it is worth.

Heads that were computed together and are parted before they are subtracted, `w[:, 0] - f * w[:, 1]`, are slices of what is
normalised. So what a term is computed from is sliced instead: operations element by element, reductions along other axes, and
products for each matrix of a batch are computed for the slice alone.

Products of terms may be infinite where the product of their sum is not: where both are, their difference is NaN.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from jax import lax
from jax import numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.ir import dtypes
from pallasfuse.jaxpr_frontend.added_equations import AddedEquations, Atom
from pallasfuse.jaxpr_frontend.axis_parts import Rewritten, is_pointwise, moves_units
from pallasfuse.jaxpr_frontend.inlining import live
from pallasfuse.jaxpr_frontend.plans import dtype_of, shape_of

MOST_TERMS = 4
"""The most terms of a sum that is multiplied out: each is a product of its own."""
_DEEPEST = 200
"""The most equations in a row that are followed from a product to what its terms are computed from."""
_ROUNDED_BYTES = 2
"""The most bytes of a float that matrix units multiply without rounding it."""
_STATISTICS = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
_MOVES = frozenset({"broadcast_in_dim", "transpose", "slice"})

type _Range = tuple[int, int, int]
"""Where a slice of a dimension begins and ends, and its stride."""


def terms_apart(
    jaxpr: Jaxpr, left: Callable[[JaxprEqn], bool] = lambda eqn: False, *, exact: bool, longest: int
) -> Rewritten | None:
    """Returns a flat jaxpr with products of sums as sums of products, where terms are normalised; None where there are none.

    Terms may cancel, and what is left of their products then is as large as the rounding of these. So it is done only for terms
    that were rounded as much before, as the program is written.

    left: is an equation to stay as it is? exact: are products of float32 numbers not rounded to fewer bits, unless they say so?
    longest: the most elements of a row of the result that a kernel accumulates.
    """
    apart = _TermsApart(jaxpr, exact, longest)
    for eqn in jaxpr.eqns:
        found = None if eqn.primitive.name != "dot_general" or left(eqn) else apart.product(eqn)
        if found is None:
            apart.added.eqns.append(eqn.replace(invars=[apart.now(a) for a in eqn.invars]))
        else:
            apart.instead[eqn.outvars[0]] = found
    if not apart.instead:
        return None
    results = [apart.now(a) for a in jaxpr.outvars]
    eqns, _ = live(apart.added.eqns, results)
    made = _compat.replace_jaxpr(jaxpr, list(jaxpr.constvars), list(jaxpr.consts), eqns, results)
    return Rewritten(made, apart.instead)


@dataclass(frozen=True, slots=True)
class _Term:
    """A term of a sum."""

    atom: Atom
    negative: bool
    """The term is subtracted."""


@dataclass
class _TermsApart:
    """The new equations, and the variables that stand for products of sums."""

    jaxpr: Jaxpr
    exact: bool
    """Products of float32 numbers are not rounded to fewer bits, unless they say so."""
    longest: int
    """The most elements of a row of a product that a kernel accumulates."""
    added: AddedEquations = field(default_factory=AddedEquations)
    instead: dict[Var, Atom] = field(default_factory=dict)
    """The atoms that stand for products of sums."""
    makers: dict[Any, JaxprEqn] = field(default_factory=dict)
    """The equations that make the variables of the jaxpr."""
    known: dict[tuple[Any, ...], Atom] = field(default_factory=dict)
    """Slices that were made already, by their variable and its ranges."""

    def __post_init__(self) -> None:
        self.makers = {v: e for e in self.jaxpr.eqns for v in e.outvars if not e.effects and len(e.outvars) == 1}

    def now(self, atom: Atom) -> Atom:
        """Returns the atom that stands for one of the jaxpr; itself where none does."""
        return self.instead.get(atom, atom) if isinstance(atom, Var) else atom

    def product(self, eqn: JaxprEqn) -> Atom | None:
        """Returns the sum of products that a product of a sum is; None where neither operand is a sum of normalised terms."""
        (summed, batch), operands = eqn.params["dimension_numbers"], list(eqn.invars)
        atoms = (*operands, eqn.outvars[0])
        if not all(dtypes.is_float(dtype_of(a)) and prod(shape_of(a)) for a in atoms):
            return None
        for side, dims in enumerate(summed):
            mine, others = (
                set(range(len(shape_of(operands[n])))).difference(summed[n], batch[n]) for n in (side, 1 - side)
            )
            if prod(shape_of(operands[1 - side])[d] for d in others) > self.longest:
                continue
            terms = self._terms(operands[side])
            shape = shape_of(operands[side])
            repeated = any(_is_repeated(t.atom, shape, own) for t in terms for own in (mine, dims))
            if repeated or not 1 < len(terms) <= MOST_TERMS:
                continue
            if self._is_normalised(terms, dims) and self._may_part(eqn, side, terms):
                return self._multiplied(eqn, side, terms)
        return None

    def _terms(self, atom: Atom) -> list[_Term]:
        """Returns the terms of a sum, or the atom alone; none where they are too many. A sum repeats dimensions of length one."""
        found: list[_Term] = []
        waiting = [_Term(atom, negative=False)]
        while waiting:
            if len(waiting) + len(found) > MOST_TERMS:
                return []
            term = waiting.pop()
            parts = self._added(term)
            if parts is None:
                found.append(term)
            else:
                waiting += reversed(parts)
        return found

    def _added(self, term: _Term) -> tuple[_Term, _Term] | None:
        """Returns the two terms whose sum or difference a term is, perhaps rounded or negative; None where it is neither."""
        atom, negative = term.atom, term.negative
        for _ in range(_DEEPEST):
            eqn = self.makers.get(atom) if isinstance(atom, Var) else None
            name = "" if eqn is None else eqn.primitive.name
            if eqn is None or not dtypes.is_float(dtype_of(eqn.invars[0]) if eqn.invars else ""):
                return None
            if name in ("add", "add_any", "sub") and all(map(shape_of, eqn.invars)):
                first, second = eqn.invars
                return _Term(first, negative), _Term(second, negative != (name == "sub"))
            if name not in ("neg", "convert_element_type"):
                return None
            atom, negative = eqn.invars[0], negative != (name == "neg")
        return None

    def _may_part(self, eqn: JaxprEqn, side: int, terms: Sequence[_Term]) -> bool:
        """Were the terms rounded as much as they are when they are multiplied? Else what is left where they cancel is lost."""
        operand, precision = dtype_of(eqn.invars[side]), eqn.params["precision"]
        types = [dtype_of(self._unconverted(t.atom)) for t in terms]
        if not all(dtypes.is_exact_cast(t, operand) for t in types):
            return False  # their sum was rounded, not they
        if precision is not None and not isinstance(precision, tuple):
            return False  # an algorithm, which may round anything
        highest = precision is not None and all(p == lax.Precision.HIGHEST for p in precision)
        return highest or self.exact or all(dtypes.itemsize_bytes(t) <= _ROUNDED_BYTES for t in types)

    def _unconverted(self, atom: Atom) -> Atom:
        """Returns the narrower float that a value is converted from; the value itself where there is none."""
        eqn = self.makers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or eqn.primitive.name != "convert_element_type" or not dtypes.is_float(dtype_of(eqn.invars[0])):
            return atom
        return eqn.invars[0] if dtypes.is_exact_cast(dtype_of(eqn.invars[0]), dtype_of(atom)) else atom

    def _is_normalised(self, terms: Sequence[_Term], dims: Sequence[int]) -> bool:
        """Does a term depend on a statistic of values along what is summed?"""
        return any(self._has_statistic(t.atom, int(d), set()) for t in terms for d in dims)

    def _has_statistic(self, atom: Atom, dim: int, seen: set[tuple[Any, int]]) -> bool:
        """Is a value computed, position by position along a dimension, from a statistic of values along that dimension?"""
        eqn = self.makers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or (atom, dim) in seen or len(seen) > _DEEPEST:
            return False
        seen.add((atom, dim))
        name, extent = eqn.primitive.name, shape_of(atom)[dim]
        source = eqn.invars[0] if eqn.invars else None
        match name:
            case "broadcast_in_dim":
                dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
                if dim in dims and shape_of(source)[dims.index(dim)] == extent:
                    return self._has_statistic(eqn.invars[0], dims.index(dim), seen)
                return self._is_statistic(eqn.invars[0], extent)
            case "transpose":
                return self._has_statistic(eqn.invars[0], int(eqn.params["permutation"][dim]), seen)
            case "slice":
                return shape_of(source)[dim] == extent and self._has_statistic(eqn.invars[0], dim, seen)
            case _ if moves_units(eqn):
                pairs = _same_elements(shape_of(source), shape_of(atom))
                places = [old[0] for old, new in pairs if new == [dim] and len(old) == 1]
                return any(self._has_statistic(eqn.invars[0], d, seen) for d in places)
            case _ if is_pointwise(eqn):
                of_extent = [a for a in eqn.invars if shape_of(a) and shape_of(a)[dim] == extent]
                stretched = [a for a in eqn.invars if shape_of(a) and shape_of(a)[dim] != extent]
                return any(self._has_statistic(a, dim, seen) for a in of_extent) or any(
                    self._is_statistic(a, extent) for a in stretched
                )
        return False

    def _is_statistic(self, atom: Atom, extent: int) -> bool:
        """Is a value computed from a reduction of so many elements?"""
        waiting, seen = [atom], set[Any]()
        while waiting:
            now = waiting.pop()
            eqn = self.makers.get(now) if isinstance(now, Var) and now not in seen else None
            if eqn is None:
                continue
            seen.add(now)
            if eqn.primitive.name in _STATISTICS:
                if any(shape_of(eqn.invars[0])[int(a)] == extent for a in eqn.params["axes"]):
                    return True
            elif eqn.primitive.name in _MOVES or moves_units(eqn) or is_pointwise(eqn):
                waiting += eqn.invars
        return False

    def _multiplied(self, eqn: JaxprEqn, side: int, terms: Sequence[_Term]) -> Atom:
        """Adds a product of each term, and their sum. side: the operand of the product that is the sum of the terms."""
        operand, shape = dtype_of(eqn.invars[side]), shape_of(eqn.invars[side])
        second = self.now(eqn.invars[1 - side])
        total: Atom | None = None
        for term in sorted(terms, key=lambda t: t.negative):
            atom = self.added.converted(eqn, operand, self._restricted(term.atom, _whole(term.atom), 0))
            if shape_of(atom) != shape:
                atom = self.added.add(eqn, partial(jnp.broadcast_to, shape=shape), atom)
            made = self.added.product(eqn, *((atom, second) if side == 0 else (second, atom)))
            if total is None:
                total = self.added.add(eqn, partial(lax.neg), made) if term.negative else made
            else:
                total = self.added.add(eqn, partial(lax.sub if term.negative else lax.add), total, made)
        assert total is not None
        return self.added.converted(eqn, dtype_of(eqn.outvars[0]), total)

    # --- slices of what terms are computed from

    def _restricted(self, atom: Atom, ranges: tuple[_Range, ...], depth: int) -> Atom:
        """Returns the atom that stands for a slice of another one, computed from slices of what that is computed from."""
        key = atom, ranges
        if not isinstance(atom, Var) or not ranges:
            return self.now(atom)
        if key not in self.known:
            made = self._made(atom, ranges, depth) if depth < _DEEPEST and atom not in self.instead else None
            self.known[key] = self._sliced(atom, ranges) if made is None else made
        return self.known[key]

    def _sliced(self, atom: Var, ranges: tuple[_Range, ...]) -> Atom:
        """Returns a slice of what stands for a variable."""
        if ranges == _whole(atom):
            return self.now(atom)
        return self.added.add(self.makers.get(atom), partial(_slice, ranges=ranges), self.now(atom))

    def _made(self, atom: Var, ranges: tuple[_Range, ...], depth: int) -> Atom | None:
        """Adds the equation of a variable on slices of its operands; None where a slice of its result is to be taken instead."""
        eqn = self.makers.get(atom)
        if eqn is None or not eqn.invars or not all(prod(shape_of(a)) for a in (atom, *eqn.invars)):
            return None
        name, source = eqn.primitive.name, eqn.invars[0]
        before = shape_of(source)
        shape = tuple(len(range(*r)) for r in ranges)
        wanted: list[tuple[_Range, ...] | None]
        params = dict(eqn.params)
        match name:
            case "slice":
                firsts = map(int, eqn.params["start_indices"])
                strides = map(int, eqn.params["strides"] or (1,) * len(before))
                moved = zip(ranges, firsts, strides, strict=True)
                return self._restricted(
                    source, tuple(_within(r, first, stride) for r, first, stride in moved), depth + 1
                )
            case "broadcast_in_dim" if len(eqn.invars) == 1:
                dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
                out = shape_of(atom)
                wanted = [tuple(ranges[d] if n == out[d] else (0, n, 1) for d, n in zip(dims, before, strict=True))]
                params["shape"] = shape
            case "transpose":
                order = [int(d) for d in eqn.params["permutation"]]
                wanted = [tuple(ranges[order.index(d)] for d in range(len(before)))]
            case _ if moves_units(eqn):
                wanted = [_reshaped(before, shape_of(atom), ranges)]
            case "dot_general":
                wanted = list(_of_batch(eqn, ranges) or (None, None))
            case _ if name in _STATISTICS:
                axes = {int(a) for a in eqn.params["axes"]}
                kept = iter(ranges)
                wanted = [tuple((0, n, 1) if d in axes else next(kept) for d, n in enumerate(before))]
            case _ if is_pointwise(eqn):
                out = shape_of(atom)
                wanted = [
                    tuple(r if n == m else (0, n, 1) for r, n, m in zip(ranges, shape_of(a), out, strict=True))
                    if shape_of(a)
                    else ()
                    for a in eqn.invars
                ]
            case _:
                return None
        if any(w is None for w in wanted):
            return None
        found = [self._restricted(a, w or (), depth + 1) for a, w in zip(eqn.invars, wanted, strict=True)]
        if ranges == _whole(atom) and all(a is self.now(b) for a, b in zip(found, eqn.invars, strict=True)):
            return self.now(atom)
        if moves_units(eqn):
            return self.added.add(eqn, partial(lax.reshape, new_sizes=shape), *found)
        return self.added.add(eqn, partial(eqn.primitive.bind, **params), *found)


def _is_repeated(atom: Atom, shape: Sequence[int], dims: Collection[int]) -> bool:
    """Is a term of a sum of a shape the same all along some of its dimensions, as the bias of a layer is for its rows?"""
    return any(shape[d] > 1 for d in dims) and all(shape_of(atom)[d] == 1 for d in dims)


def _whole(atom: Atom) -> tuple[_Range, ...]:
    """Returns the ranges of all places of an atom."""
    return tuple((0, n, 1) for n in shape_of(atom))


def _within(part: _Range, first: int, stride: int) -> _Range:
    """Returns the range of an array that a part of one of its slices takes, which has every `stride`-th place from `first` on."""
    last = first + stride * range(*part)[-1]
    return first + stride * part[0], last + 1, stride * part[2]


def _of_batch(eqn: JaxprEqn, ranges: Sequence[_Range]) -> tuple[tuple[_Range, ...], tuple[_Range, ...]] | None:
    """Returns the ranges of both operands for a part of the batch of a product; None where a part of its matrices is wanted.

    Products of parts of a matrix would read one operand as often as there are parts.
    """
    _, batch = eqn.params["dimension_numbers"]
    shared = len(batch[0])
    if any(r != (0, n, 1) for r, n in zip(ranges[shared:], shape_of(eqn.outvars[0])[shared:], strict=True)):
        return None
    of_dims = (dict(zip(map(int, dims), ranges[:shared], strict=True)) for dims in batch)
    left, right = (
        tuple(own.get(d, (0, n, 1)) for d, n in enumerate(shape_of(a)))
        for own, a in zip(of_dims, eqn.invars, strict=True)
    )
    return left, right


def _reshaped(before: Sequence[int], after: Sequence[int], ranges: Sequence[_Range]) -> tuple[_Range, ...] | None:
    """Returns the ranges of an array whose elements are those of the ranges of its reshape, in order; None where there are none.

    When (8, 5) becomes (4, 2, 5), the second of each pair is every other row: the ranges (0, 4), (1, 2), (0, 5) are those from 1
    to 8 by steps of 2, and all 5.
    """
    found: list[_Range] = [(0, n, 1) for n in before]
    for old, new in _same_elements(before, after):
        parts = [(ranges[d], after[d]) for d in new]
        if all(r == (0, n, 1) for r, n in parts):
            continue
        part = _of_one(parts) if len(old) == 1 else None
        if part is None:
            return None
        found[old[0]] = part
    return tuple(found)


def _same_elements(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the fewest dimensions of an array and of its reshape that run over the same elements; none of length one."""
    old, new = ([d for d, n in enumerate(shape) if n != 1][::-1] for shape in (before, after))
    while old and new:
        mine, yours = [old.pop()], [new.pop()]
        while (a := prod(before[d] for d in mine)) != (b := prod(after[d] for d in yours)):
            if a < b:
                mine.append(old.pop())
            else:
                yours.append(new.pop())
        yield mine, yours


def _of_one(parts: Sequence[tuple[_Range, int]]) -> _Range | None:
    """Returns the range of a dimension that becomes several, with their ranges and lengths; None where they take no range of it.

    A range of the first of them is one, and one place of the last: that is every so many places.
    """
    extents = [n for _, n in parts]
    cut = [d for d, (r, n) in enumerate(parts) if r != (0, n, 1)]
    if len(cut) != 1:
        return None
    ((start, stop, stride), extent), (at,) = parts[cut[0]], cut
    behind = prod(extents[at + 1 :])
    if at == 0 and stride == 1:
        return start * behind, stop * behind, 1
    if at == len(parts) - 1 and len(range(start, stop, stride)) == 1:
        return start, start + extent * (prod(extents[:at]) - 1) + 1, extent
    return None


def _slice(x: Any, ranges: Sequence[_Range]) -> Any:
    """Returns a slice of an array.

    One of equal parts, or one that takes every so many places, is one place of an axis of its own, as where a program stacks what
    it computes together.
    """
    shape: list[int] = []
    own: list[_Range] = []
    for (start, stop, stride), extent in zip(ranges, x.shape, strict=True):
        length = len(range(start, stop, stride))
        if stride > 1 and length * stride == extent:
            shape += [length, stride]
            own += [(0, length, 1), (start, start + 1, 1)]
        elif stride == 1 < length < extent and extent % length == 0 == start % length:
            shape += [extent // length, length]
            own += [(start // length, start // length + 1, 1), (0, length, 1)]
        else:
            shape.append(extent)
            own.append((start, stop, stride))
    made = lax.slice(lax.reshape(x, shape), *zip(*own, strict=True))
    return lax.reshape(made, [len(range(*r)) for r in ranges])
