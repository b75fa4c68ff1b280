"""A program over short axes, and how often its groups must be tested."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pallasfuse._compat import Var, shape_of
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import short_sizes
from pallasfuse.jaxpr_frontend import Converted, axes_of
from pallasfuse.proof.result import PlannedKernel, Record
from pallasfuse.repair.signs import Sign
from pallasfuse.tiling.masks import is_positional
from pallasfuse.verification.bound import miss_probability, sizes, trials_for
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import is_square
from pallasfuse.verification.jaxprs import NEAR
from pallasfuse.verification.shrink import Shrinking, compared_axes, shrinking, small_integers
from pallasfuse.verification.value import ASSUMED, FINITE, Value
from pallasfuse.verification.visits import is_constant

_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "pow"})
_LOGARITHMS = frozenset({"log", "log1p"})
_ALGEBRAIC = frozenset({"add", "sub", "mul", "div", "neg", "integer_pow", "square", "abs", "sign", "sqrt", "rsqrt", "cbrt",
                        "select", "convert", "max", "min"})  # fmt: skip
"""Operations that keep the levels of their arguments; all others give fresh values."""
_MANY_TRIALS = 3000
"""More than these are avoided by shorter axes, if possible."""
_LONGER = (8, 12)
"""Extents of axes with masks that hide nothing, or everything, on shorter ones."""
MOST_ELEMENTS = 1 << 12
"""The most elements of a nest that is tested at its actual extents."""
SIGNED = ("positive", "nonnegative", "negative", "nonpositive")


@dataclass(frozen=True)
class Instance:
    """A program over short axes."""

    converted: Converted
    program: LoopProgram
    small: Shrinking
    signs: Mapping[str, Sign]

    @staticmethod
    def of(converted: Converted, parts: Sequence[PlannedKernel], record: Record) -> "Instance | None":
        program = converted.program
        signs = Graph(program).signs
        whole = _taken_apart(converted)
        for longest in (5, 3):
            small = shrinking(program, _wanted(parts, max(longest, 3 + small_integers(program))) | whole)
            if isinstance(small, Refusal):
                if max((nest_volume(n) for n in program.nests), default=0) > MOST_ELEMENTS:
                    reason = f"the program has no instance over short axes ({small}): verify it with small arguments"
                    record.uncovered[reason] = None
                    return None
                small = shrinking(program, {a: a.extent for a in all_axes(program)})
                assert isinstance(small, Shrinking)
                break
            if _is_quick(program, parts, small):
                break
        assert isinstance(small, Shrinking)
        for most in (2 + small_integers(program), *_LONGER):
            if not any(constant_masks(masks_of(p), small) for p in parts):
                break
            least = {a: min(a.extent, most) for a in compared_axes(program)}
            wanted = _wanted(parts, longest) | whole
            longer = shrinking(program, wanted | {a: max(n, wanted.get(a, 2)) for a, n in least.items()})
            small = longer if isinstance(longer, Shrinking) and _is_quick(program, parts, longer) else small
        return Instance(converted, small.of(program), small, signs)

    @property
    def assumed(self) -> tuple[str, ...]:
        reduced = {n.name for n in self.program.nests if isinstance(n, Nest) and n.is_reduction}
        return tuple(f"{n} is {s}" for n, s in self.signs.items() if s in SIGNED and n in reduced)

    def assume(self, name: str, value: Value, fields: FiniteFields) -> Value:
        return assume(self.signs, name, value, fields)

    def draw(self, name: str, axes: Sequence[Axis], dtype: str, fields: FiniteFields) -> Value:
        return draw(self.signs, name, axes, dtype, fields)


def assume(signs: Mapping[str, Sign], name: str, value: Value, fields: FiniteFields) -> Value:
    """Facts that the derivation relies on: a trial in which one does not hold proves nothing."""
    sign = signs.get(name)
    if sign not in SIGNED or not value.levels or value.lowest < 0 or value.real is not None:
        return value
    residue = value.levels[value.lowest]
    assert residue is not None
    square = is_square(residue, fields.tower.primes[value.lowest])
    wrong = square if sign in ("negative", "nonpositive") else ~square
    return replace(value, taint=value.taint | np.where(wrong & (value.kind == FINITE), ASSUMED, np.uint8(0)))


def draw(signs: Mapping[str, Sign], name: str, axes: Sequence[Axis], dtype: str, fields: FiniteFields) -> Value:
    """An arbitrary value of a tensor; a positive one where that is a fact."""
    value = fields.random([a.extent for a in axes], dtype)
    return fields.squares(value) if signs.get(name) in ("positive", "nonnegative") and value.levels else value


def _taken_apart(converted: Converted) -> dict[Axis, int]:
    """The axes of which single elements are parts of a longer one: they stay as they are."""
    found: dict[Axis, int] = {}
    names = {v: n for n, v in converted.variable.items()}
    axes = {d.name: d.axes for d in converted.program.definitions()}
    slices = [e for e in converted.jaxpr.eqns if e.primitive.name == "slice"] if converted.whole is not None else []
    for eqn in slices:
        (source,), (result,) = eqn.invars, eqn.outvars
        if not isinstance(source, Var):
            continue
        for n, (_, own) in zip(shape_of(result), axes_of(shape_of(source), axes[names[source]]), strict=True):
            found |= {a: a.extent for a in own if n < a.extent <= NEAR}
    return found


def _is_quick(program: LoopProgram, parts: Sequence[PlannedKernel], small: Shrinking) -> bool:
    short: LoopProgram = small.of(program)
    return all(needed_trials(short, small.of(p.group), 1e-9)[0] <= _MANY_TRIALS for p in parts)


def masks_of(part: PlannedKernel) -> list[Expr]:
    """Returns the predicates over positions by which a kernel chooses what it adds; those of trees, what it computes."""
    terms = [a.term for f in part.group.folds for a in f.accumulators]
    if part.schedule.tree:  # its folds are derived as it is lowered: of what its nests compute
        terms += [n.body for n in (*part.group.inner, *part.group.outputs)]
    chosen = (n.args[0] for n in postorder(*terms) if isinstance(n, Apply) and n.op == "select") if terms else ()
    return list(dict.fromkeys(p for p in chosen if is_positional(p)))


def constant_masks(predicates: Sequence[Expr], small: Shrinking) -> list[Expr]:
    """Returns those that hide something at the actual extents, but nothing (or everything) on the short axes."""
    generator = np.random.default_rng(0)
    return [p for p in predicates if is_constant(small.of(p), generator) and not is_constant(p, generator)]


def all_axes(program: LoopProgram) -> set[Axis]:
    axes = {a for d in program.definitions() for a in d.axes}
    return axes | {a for n in program.nests if isinstance(n, Nest) for a in n.reduced}


def nest_volume(nest: Nest | External) -> int:
    space = nest.axes if isinstance(nest, External) else (*nest.axes, *nest.reduced)
    return int(np.prod([a.extent for a in space], dtype=int))


def _wanted(parts: Sequence[PlannedKernel], longest: int) -> dict[Axis, int]:
    """Extents at which loops have several trips, a tail, and blocks that overlap."""
    wanted: dict[Axis, int] = {}

    def want(axis: Axis, extent: int) -> None:
        wanted[axis] = max(wanted.get(axis, 2), extent)

    for part in parts:
        want(part.schedule.rolled, longest if part.schedule.trips > 1 else max(3, longest - 1))
        for axis, tile in part.schedule.grid:
            want(axis, 3 if 1 < tile < axis.extent else 2)
        axes = {a.name: a for n in (*part.group.inner, *part.group.outputs) for a in (*n.axes, *n.reduced)}
        extents = {name: a.extent for name, a in axes.items()}
        for (name, _), short in short_sizes(part.schedule.tree, extents).items():
            want(axes[name], 2 * short + 1)
    return wanted


def replaced_nests(program: LoopProgram, group: Group) -> list[Nest]:
    """The nests between the inputs of a group and what it computes, in order."""
    nests = {n.name: n for n in program.nests}
    wanted = [n.name for n in (*(f.nest for f in group.folds), *group.inner, *group.outputs)]
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in found or name in group.inputs:
            continue
        nest = nests.get(name)
        if not isinstance(nest, Nest):
            raise InvalidProgramError(f"group {group.name} computes {name}, which is not a nest")
        found.add(name)
        wanted.extend(nest.reads)
    return [n for n in program.nests if isinstance(n, Nest) and n.name in found]


def needed_trials(program: LoopProgram, group: Group, delta: float) -> tuple[int, float]:
    """Returns (trials, the probability that one misses a difference) for a group."""
    replaced = replaced_nests(program, group)
    inputs = tuple(Tensor(d.name, d.axes, d.dtype) for d in program.definitions() if d.name in group.inputs)
    outputs = tuple(n.name for n in group.outputs)
    known = sizes(LoopProgram(inputs, tuple(replaced), outputs))
    largest = max((known[n] for n in (*outputs, *(f.name for f in group.folds))), key=miss_probability)
    return trials_for(largest, delta), miss_probability(largest)


def levels_of(nests: Sequence[Nest]) -> int:
    """Counts the residues that a number needs so that each value has one.

    The results of an exponential lack the last residue of its argument, those of a logarithm have no first one.
    """
    known: dict[str, tuple[int, int]] = {}  # (the first level, how many are lacking at the end)
    most = 0
    for nest in nests:
        values: dict[Expr, tuple[int, int]] = {}
        for node in postorder(nest.body):
            below = [values[a] for a in node.args] or [known.get(t, (0, 0)) for t in node.tensors]
            first, lacking = (max((b[n] for b in below), default=0) for n in (0, 1))
            match node:
                case Apply(op) if op in _EXPONENTIALS:
                    values[node] = max(0, first - 1), lacking + 1
                case Apply(op) if op in _LOGARITHMS:
                    values[node] = first + 1, max(0, lacking - 1)
                case Apply(op) if op not in _ALGEBRAIC:
                    most = max(most, first + lacking)  # its arguments must have a residue in common
                    values[node] = 0, 0
                case _:
                    values[node] = first, lacking
            most = max(most, sum(values[node]))
        known[nest.name] = values[nest.body]
    return 1 + most
