"""The stage that gives a program another form: what stands for variables of the flat jaxpr before, against those variables.

Concatenated axes may be taken apart, or sums and products computed in another order.

Both are computed from the variables that the two jaxprs share, which are random numbers, over short axes. The shapes of what only
the jaxpr before has follow from theirs, equation by equation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.proof.deciding import Tests, decide
from pallasfuse.proof.instance import Instance
from pallasfuse.proof.result import Record
from pallasfuse.verification.bound import miss_probability, sizes, trials_for
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import Chain, tower
from pallasfuse.verification.jaxprs import Equations, near_ends
from pallasfuse.verification.value import Value

STAGE = "another form"
_MOST_TESTS = 1 << 10
_MOVES = frozenset({"broadcast_in_dim", "slice"})
"""Equations whose results are no random numbers of their own: a part may be cut from what they read instead."""
type _Shape = tuple[int, ...]
type _Makers = Mapping[Var, JaxprEqn]


class _UnknownError(Exception):
    """Nothing says how short a dimension is."""


def parts_of_axes(instance: Instance, shapes: Mapping[Var, _Shape], delta: float, seed: int, record: Record) -> None:
    """Compares what stands for other variables; shapes: of the variables of the converted jaxpr, over short axes."""
    converted = instance.converted
    if converted.whole is None:
        return
    record.stages[STAGE] = None
    try:
        known = _short_shapes(converted, converted.whole, shapes)
    except _UnknownError as error:
        record.uncovered[f"{STAGE}: {error}"] = None
        return
    parts = _only_parts(converted, instance.program)
    miss = max((miss_probability(s) for s in sizes(parts).values()), default=0.0)
    needed = max((trials_for(s, delta) for s in sizes(parts).values()), default=2)

    def over_fields(record: Record, chain: Chain) -> Tests:
        fields = FiniteFields(tower(3, min(needed, _MOST_TESTS) + 8, seed, chain))
        _compare(instance, known, fields, record)
        return Tests(needed, miss, fields.tower.trials, fields.constants)

    def once(record: Record, fields: FiniteFields) -> None:
        _compare(instance, known, fields, record)

    tests = decide(record, parts, seed, over_fields, once)
    record.settle(tests.needed, tests.miss, tests.made)


def _only_parts(converted: Converted, program: LoopProgram) -> LoopProgram:
    """The nests that only the taken apart program has, over what it shares with the one before."""
    assert converted.whole is not None
    shared = {v for e in converted.whole.eqns for v in e.outvars}
    nests = [n for n in program.nests if isinstance(n, Nest) and converted.variable[n.name] not in shared]
    made = {n.name for n in nests}
    read = {t for n in nests for t in n.reads} - made
    inputs = tuple(Tensor(d.name, d.axes, d.dtype) for d in program.definitions() if d.name in read)
    return LoopProgram(inputs, tuple(nests), tuple(made))


def _short_shapes(converted: Converted, whole: Jaxpr, shapes: Mapping[Var, _Shape]) -> dict[Any, _Shape]:
    """The short shapes of all variables of both jaxprs."""
    known: dict[Any, _Shape] = dict(shapes)
    extents: dict[int, set[int]] = {}

    def learn(var: Any) -> None:
        for long, short in zip(_compat.shape_of(var), known[var], strict=True):
            extents.setdefault(int(long), set()).add(short)

    def short(extent: int) -> int:
        found = extents.get(extent, {1} if extent == 1 else set())
        if len(found) != 1:
            raise _UnknownError(f"the short extent of an axis of {extent} elements is not known")
        return next(iter(found))

    for var in shapes:
        learn(var)
    for eqn in whole.eqns:
        for var in eqn.outvars:
            if var not in known:
                operands = [known[a] if isinstance(a, Var) else () for a in eqn.invars]
                known[var] = _short_shape(eqn, operands, short)
                learn(var)
    return known


def _short_shape(eqn: JaxprEqn, operands: Sequence[_Shape], short: Any) -> _Shape:
    out = tuple(int(n) for n in _compat.shape_of(eqn.outvars[0]))
    params = eqn.params
    match eqn.primitive.name:
        case "concatenate":
            dim = int(params["dimension"])
            return tuple(sum(o[d] for o in operands) if d == dim else n for d, n in enumerate(operands[0]))
        case "pad":
            return tuple(
                n + int(low) + int(high)
                for n, (low, high, _) in zip(operands[0], params["padding_config"], strict=True)
            )
        case "slice":
            ends = near_ends(eqn, operands[0])
            if ends is None:
                raise _UnknownError("a slice begins or ends far from the ends of its axis")
            return tuple(stop - start for start, stop in ends)
        case "transpose":
            return tuple(operands[0][int(d)] for d in params["permutation"])
        case "dot_general":
            (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = params["dimension_numbers"]
            left = [n for d, n in enumerate(operands[0]) if d not in {*map(int, lhs_sum), *map(int, lhs_batch)}]
            right = [n for d, n in enumerate(operands[1]) if d not in {*map(int, rhs_sum), *map(int, rhs_batch)}]
            return (*(operands[0][int(d)] for d in lhs_batch), *left, *right)
        case name if name.startswith("reduce_") and "axes" in params:
            return tuple(n for d, n in enumerate(operands[0]) if d not in {int(a) for a in params["axes"]})
        case "broadcast_in_dim":
            source, at = _compat.shape_of(eqn.invars[0]), [int(d) for d in params["broadcast_dimensions"]]
            given = {d: s for d, s, n in zip(at, operands[0], source, strict=True) if n == out[d]}
            return tuple(given[d] if d in given else short(n) for d, n in enumerate(out))
    same = [o for o, a in zip(operands, eqn.invars, strict=True) if tuple(_compat.shape_of(a)) == out]
    return same[0] if same else tuple(short(n) for n in out)


def _compare(instance: Instance, shapes: Mapping[Any, _Shape], fields: FiniteFields, record: Record) -> None:
    converted, whole = instance.converted, instance.converted.whole
    assert whole is not None
    before, after = ({v: e for e in j.eqns for v in e.outvars} for j in (whole, converted.jaxpr))
    equations = Equations(fields, lambda atom: shapes[atom], instance.small.number)
    shared: dict[Any, Value] = {}
    names = {v: n for n, v in converted.variable.items()}
    joined = _joined(converted, whole)
    fixed = _fixed(whole) | _fixed(converted.jaxpr)

    def is_drawn(atom: Var, eqn: JaxprEqn, others: Mapping[Var, JaxprEqn]) -> bool:
        """Is a variable a random number of its own?"""
        if converted.leaves is not None:
            return atom in converted.leaves and atom not in fixed
        return (atom in shared or (atom in others and atom not in joined)) and eqn.primitive.name not in _MOVES

    def evaluate(
        atom: Any, makers: Mapping[Var, JaxprEqn], others: Mapping[Var, JaxprEqn], values: dict[Any, Value | None]
    ) -> Value | None:
        if isinstance(atom, Literal):
            return equations.literal(atom)
        if atom not in values:
            eqn = makers.get(atom)
            if eqn is None or len(eqn.outvars) != 1 or is_drawn(atom, eqn, others):
                if atom not in shared:
                    shared[atom] = fields.random(shapes[atom], str(_compat.dtype_of(atom)))
                values[atom] = shared[atom]
            else:
                operands = [evaluate(a, makers, others, values) for a in eqn.invars]
                given = [v for v in operands if v is not None]
                values[atom] = equations.equation(eqn, given) if len(given) == len(operands) else None
        return values[atom]

    new: dict[Any, Value | None] = {}
    old: dict[Any, Value | None] = {}
    for var, instead in converted.replaced.items():
        if isinstance(instead, Literal) or instead not in names:
            continue  # nothing reads it
        found, expected = evaluate(instead, after, before, new), evaluate(var, before, after, old)
        if found is None or expected is None:
            record.uncovered[f"{STAGE}: {_name(before[var])}"] = None
            continue
        record.compare(STAGE, names[instead], expected, found.reshape(expected.shape), fields.tower.trials)
        old[var] = found.plain()


def _fixed(jaxpr: Jaxpr) -> set[Var]:
    """What is computed from positions and literals alone: an identity, say. No random numbers stand for it."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        if all(isinstance(a, Literal) or a in found for a in eqn.invars):
            found.update(v for v in eqn.outvars if isinstance(v, Var))
    return found


def _joined(converted: Converted, whole: Jaxpr) -> set[Var]:
    """What is computed from something that is joined, but by what others stand for: no random numbers, but what their parts are."""
    found: set[Var] = set()
    for eqn in whole.eqns:
        joins = eqn.primitive.name in ("concatenate", "pad")
        if joins or not found.isdisjoint(a for a in eqn.invars if isinstance(a, Var)):
            found.update(v for v in eqn.outvars if v not in converted.replaced)
    return found


def _name(eqn: JaxprEqn) -> str:
    return f"a {eqn.primitive.name} at {_compat.source_summary(eqn) or '<unknown line>'}"
