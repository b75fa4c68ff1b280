"""Conversion turns a jaxpr into a loop program: one nest per equation, over axes that the whole program shares."""

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count
from string import ascii_lowercase
from typing import Any, assert_never

import numpy as np

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.errors import Refusal, TraceError
from pallasfuse.first_time import known, without_collection
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, add, const, index, mul, read
from pallasfuse.ir.loop_program import External, ExternalForm, LoopProgram, Nest, Source, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import elementwise, layout, picking, places, reductions
from pallasfuse.jaxpr_frontend.axis_parts import Rewritten, in_parts
from pallasfuse.jaxpr_frontend.converted import Converted, of_flat
from pallasfuse.jaxpr_frontend.dimensions import Dimensions, Symbol
from pallasfuse.jaxpr_frontend.inlining import ALL_CALLS, bodies, flatten, fused_calls, left_by_user
from pallasfuse.jaxpr_frontend.lookups import with_lookups
from pallasfuse.jaxpr_frontend.names import tensor_names
from pallasfuse.jaxpr_frontend.plain_work import (
    chosen_by_platform,
    chosen_within,
    combines,
    operation_of,
    run_of,
    work_of,
)
from pallasfuse.jaxpr_frontend.plans import Plan, Rule, dtype_of, flat, shape_of
from pallasfuse.jaxpr_frontend.rebuilding import rewritten
from pallasfuse.jaxpr_frontend.term_products import terms_apart
from pallasfuse.primitive_names import KERNEL_OF_LOOP, UPDATES

_MAPS: dict[str, Rule] = elementwise.RULES | layout.RULES
_RULES: dict[str, Rule] = _MAPS | reductions.RULES | places.RULES
_FORMS: dict[str, ExternalForm] = {
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "rev", "squeeze", "split", "unstack"), "selection"),
    **dict.fromkeys(
        ("pad", "shift_left", "shift_right_logical", "shift_right_arithmetic", "bitcast_convert_type",
         "population_count", "clz", "reduce_precision", "nextafter", "erf_inv", "real", "imag", "copy"),
        "elements",
    ),
    **dict.fromkeys(("concatenate", "stack"), "join"),
    **dict.fromkeys(UPDATES, "update"),
}  # fmt: skip
"""The forms of primitives that may be left to XLA, where one is known; all others are "whole"."""
_OF_COMPLEX = frozenset(elementwise.RULES) | {"complex", "conj"}
"""Primitives that compute complex numbers element by element."""


def _form_of(eqn: JaxprEqn) -> ExternalForm:
    form = _FORMS.get(eqn.primitive.name, "whole")
    if eqn.primitive.name in _OF_COMPLEX and any("complex" in dtype_of(a) for a in (*eqn.invars, *eqn.outvars)):
        return "elements"
    first = eqn.invars[0] if eqn.invars else None
    if form == "update" and (not isinstance(first, Var) or any(a is first for a in eqn.invars[1:])):
        return "whole"  # what is updated is a literal, or is needed as it was
    return form


def is_map(eqn: JaxprEqn) -> bool:
    """Is an equation computed element by element, so that it costs a kernel little to compute it again?"""
    return eqn.primitive.name in _MAPS


def may_have_nest(eqn: JaxprEqn) -> bool:
    """Is there a rule for the operation of an equation? It may still refuse this one, for its shapes or types."""
    return eqn.primitive.name in _RULES or eqn.primitive.name == "gather"


def is_layout(eqn: JaxprEqn) -> bool:
    """Does an equation only say which element stands where?"""
    return eqn.primitive.name in layout.RULES


@dataclass(frozen=True, slots=True)
class _Known:
    """A variable: the symbols it is defined over, and how many reductions in a row lead to it."""

    symbols: tuple[Symbol, ...]
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """An equation, with its plan or the reason why it has none, and the symbols of each output."""

    eqn: JaxprEqn
    plan: Plan | Refusal
    outputs: tuple[tuple[Symbol, ...], ...]


@without_collection()
def convert(
    jaxpr: Jaxpr, calls: Set[str] = ALL_CALLS, *, exclude: Sequence[str] = (), symbolic: bool = False
) -> Converted:
    """Convert a jaxpr from `jax.make_jaxpr`. Its constants are the first inputs of the program.

    calls: names of the primitives that are replaced by their body. What runs the result where `vmap` may still come takes
    `BATCHED_AS_BODY`, so that rules for batching that the user wrote are kept.
    exclude: scopes whose equations have no nest, as the user asks.
    symbolic: may shapes be symbolic, as under `jax.export`? Then no equation of such a jaxpr has a nest, and lengths that are not
    known are left out of the program.

    The inputs of the program are `result.jaxpr.constvars`, whose values are `result.jaxpr.consts`, followed by
    `result.jaxpr.invars`. An equation that has no nest becomes one `External` per output.

    Raises:
      TraceError: a shape is not static.
      InvalidProgramError: the result breaks an invariant of loop programs (a bug in pallasfuse).
    """
    flattened = flatten(jaxpr, calls)
    unknown = _unknown_lengths(flattened)
    if unknown and not symbolic:
        raise TraceError(f"an array has the length {unknown[0]}: trace the function with static shapes")
    names = tensor_names(flattened)
    return of_flat(jaxpr, flattened, names, known(program_of(flattened, names, exclude)))


def convert_in_parts(converted: Converted, *, exclude: Sequence[str] = ()) -> Converted | None:
    """The same program with concatenated axes that are reduced taken apart (`axis_parts`); None where it has none.

    Raises:
      InvalidProgramError: as `convert`.
    """
    whole = converted.jaxpr
    parts = None if _unknown_lengths(whole) else in_parts(whole, lambda eqn: left_by_user(eqn, exclude) is not None)
    return None if parts is None else _in_another_form(converted, parts, exclude)


def convert_terms_apart(
    converted: Converted, *, exact: bool, longest: int, exclude: Sequence[str] = ()
) -> Converted | None:
    """The same program with products of normalised terms that are added taken apart; None where it has none.

    exact: are products of float32 numbers not rounded to fewer bits, unless they say so? longest: the most elements of a row of
    the result that a kernel accumulates.

    Raises:
      InvalidProgramError: as `convert`.
    """
    whole = converted.jaxpr
    if _unknown_lengths(whole):
        return None
    apart = terms_apart(whole, lambda eqn: left_by_user(eqn, exclude) is not None, exact=exact, longest=longest)
    return None if apart is None else replace(_in_another_form(converted, apart, exclude), terms_apart=True)


def _in_another_form(converted: Converted, form: Rewritten, exclude: Sequence[str]) -> Converted:
    """Returns a program with another flat jaxpr that computes the same."""
    names = tensor_names(form.jaxpr)
    found = of_flat(converted.original, form.jaxpr, names, known(program_of(form.jaxpr, names, exclude)))
    return replace(found, whole=converted.jaxpr, replaced=form.replaced)


def convert_rewritten(
    converted: Converted,
    computed: Sequence[Sequence[Nest]],
    leaves: Iterable[str],
    *,
    mixed: bool,
    exclude: Sequence[str] = (),
) -> Converted | None:
    """The same program with some of its tensors computed in other ways; None where that cannot be.

    leaves: tensors that both ways are computed from. mixed: as of `rebuilding.with_nests`.

    Raises:
      InvalidProgramError: as `convert`.
    """
    axes = {d.name: d.axes for d in converted.program.definitions()}
    return rewritten(
        converted.original, converted.jaxpr, converted.variable, computed, axes, leaves,
        lambda jaxpr, names: known(program_of(jaxpr, names, exclude)), mixed=mixed,
    )  # fmt: skip


def program_of(flattened: Jaxpr, names: Mapping[Var, str], exclude: Sequence[str]) -> LoopProgram:
    """The loop program of a flat jaxpr."""
    unknown = _unknown_lengths(flattened)
    inputs = [*flattened.constvars, *flattened.invars]
    dims = Dimensions()
    defined = {var: _Known(flat(dims.fresh_shape(_lengths(var), dims.space()))) for var in inputs}
    refused = _not_known_yet(unknown)
    steps: list[_Step] = []
    rules = _RULES | picking.rules(flattened)
    stored = _Stored(flattened)
    for eqn in flattened.eqns:
        plan = refused or left_by_user(eqn, exclude) or stored.merged_by(eqn) or _plan(eqn, dims, defined, rules)
        if isinstance(plan, Refusal):
            stored.variables.update(eqn.outvars)
        match plan:
            case Plan(kept=kept):
                depth = max((defined[a].depth for a in plan.reads(eqn) if isinstance(a, Var)), default=0)
                outputs: tuple[_Known, ...] = (_Known(kept, depth + (plan.reducer is not None)),)
            case Refusal():
                outputs = tuple(_Known(flat(dims.fresh_shape(_lengths(v), dims.space()))) for v in eqn.outvars)
            case _:
                assert_never(plan)
        defined.update(zip(eqn.outvars, outputs, strict=True))
        steps.append(_Step(eqn, plan, tuple(o.symbols for o in outputs)))
    program = _Naming(flattened, names, dims, {var: defined[var].symbols for var in inputs}).program(steps)
    return (
        program if refused else with_lookups(program, flattened, names, lambda e: left_by_user(e, exclude) is not None)
    )


class _Stored:
    """What XLA stores for the equations that it keeps, of which a reshape costs nothing."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        atoms = chain(jaxpr.outvars, *(e.invars for e in jaxpr.eqns))
        self._uses = Counter(a for a in atoms if isinstance(a, Var))
        self.variables: set[Var] = set()

    def merged_by(self, eqn: JaxprEqn) -> Refusal | None:
        """Why a reshape that only merges dimensions stays with XLA, if it is the one use of such a value.

        As a nest it would split the axis of the result in all that comes later, for the sake of dimensions that nothing else reads:
        pairs of features that were stacked and joined would be two axes of every product.
        """
        if eqn.primitive.name != "reshape" or not isinstance(eqn.invars[0], Var):
            return None
        (operand, *_), (result,) = eqn.invars, eqn.outvars
        before, after = (set(accumulate(reversed(shape_of(v)), operator.mul, initial=1)) for v in (operand, result))
        if operand in self.variables and self._uses[operand] == 1 and after < before:
            return Refusal("reshape of what XLA stores: it moves nothing")
        return None


def _not_known_yet(unknown: Sequence[str]) -> Refusal | None:
    """Why no equation of a jaxpr has a nest; None where some may."""
    if not unknown:
        return None
    return Refusal(f"the length {', '.join(unknown)} is not known yet: only static shapes are planned")


def _unknown_lengths(jaxpr: Jaxpr) -> list[str]:
    return [*dict.fromkeys(str(n) for v in _variables(jaxpr) for n in shape_of(v) if not isinstance(n, int))]


def _lengths(var: Var) -> tuple[int, ...]:
    """The shape of a variable, with 1 for lengths that are not known."""
    return tuple(n if isinstance(n, int) else 1 for n in shape_of(var))


def _variables(jaxpr: Jaxpr) -> Iterator[Var]:
    yield from jaxpr.constvars
    yield from jaxpr.invars
    for eqn in jaxpr.eqns:
        yield from eqn.outvars


def _plan(eqn: JaxprEqn, dims: Dimensions, known: Mapping[Var, _Known], rules: Mapping[str, Rule]) -> Plan | Refusal:
    """The plan of an equation, with its views matched to the definitions of what it reads."""
    name = eqn.primitive.name
    if eqn.effects:
        return Refusal(f"{name} has a side effect")
    rule = rules.get(name)
    if name == KERNEL_OF_LOOP:
        return Refusal("a loop that is one kernel")
    if rule is None:
        fused = any(any(fused_calls(body)) for body in bodies(eqn))
        return Refusal(f"{name} is left to XLA" + (", its body is planned by itself" if fused else ""))
    for atom in (*eqn.outvars, *eqn.invars):
        if dtype_of(atom) not in dtypes.SUPPORTED:
            return Refusal(f"{name} on elements of type {dtype_of(atom)}")
        if isinstance(atom, Literal) and np.size(atom.val) != 1:
            return Refusal(f"{name} of a literal array")
        if 0 in shape_of(atom):  # whatever reads such an array stays with XLA: no nest has an empty axis
            return Refusal(f"{name} of an array without elements")
    constrains = _compat.is_sharding_constraint(eqn)  # an identity, whatever sharding it asks for: see `constraints`
    if not constrains and any(_compat.asks_for_sharding(eqn.params.get(key)) for key in ("sharding", "out_sharding")):
        return Refusal(f"{name} asks for a sharding")
    if eqn.params.get("accuracy") is not None:
        return Refusal(f"{name} asks for an accuracy")
    start = dims.mark()
    plan = rule(eqn, dims, dims.space())
    if isinstance(plan, Refusal):
        dims.undo(start)
        return plan
    operands = [_Operand(definition.symbols, view, definition.depth) for definition, view in _tensors(eqn, plan, known)]
    if not _match(operands, dims):
        dims.undo(start)
        return Refusal(_does_not_nest(eqn))
    return plan


def _tensors(eqn: JaxprEqn, plan: Plan, known: Mapping[Var, _Known]) -> Iterator[tuple[_Known, tuple[Symbol, ...]]]:
    for atom, view in zip(plan.reads(eqn), plan.views, strict=True):
        if isinstance(atom, Var):
            yield known[atom], view


@dataclass(frozen=True, slots=True)
class _Operand:
    definition: tuple[Symbol, ...]
    view: tuple[Symbol, ...]
    depth: int

    def match(self, dims: Dimensions) -> int | None:
        """Returns the cost of the axes that this view renames; None where the view does not match its definition.

        To read a tensor over other axes than its own may mean to compute it again. That is dear when many reductions lie behind it,
        and free for an input.
        """
        renamed = dims.match(self.definition, self.view)
        return None if renamed is None else renamed * (1 + self.depth)


def _match(operands: Sequence[_Operand], dims: Dimensions) -> bool:
    """Match every view with its definition; False when one does not nest.

    Where not all of them can keep their axes, the operand that is matched first does: take the cheapest order.
    """
    start = dims.mark()
    orders = [[first, *(o for o in operands if o is not first)] for first in operands]
    costs: list[int] = []
    for order in orders:
        cost = _cost(order, dims)
        if cost == 0:
            return True
        dims.undo(start)
        if cost is None:
            return False
        costs.append(cost)
    return not operands or _cost(orders[costs.index(min(costs))], dims) is not None


def _cost(operands: Sequence[_Operand], dims: Dimensions) -> int | None:
    total = 0
    for operand in operands:
        cost = operand.match(dims)
        if cost is None:
            return None
        total += cost
    return total


def _does_not_nest(eqn: JaxprEqn) -> str:
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.primitive.name == "reshape":
        return f"reshape of {before} to {after} neither splits nor merges the axes"
    return f"{eqn.primitive.name} ties dimensions that reshapes split in different ways"


class _Naming:
    """Names for the axes and tensors, in order of appearance, and the nests over them."""

    def __init__(
        self, jaxpr: Jaxpr, names: Mapping[Var, str], dims: Dimensions, symbols: Mapping[Var, tuple[Symbol, ...]]
    ) -> None:
        self._jaxpr = jaxpr
        self._dims = dims
        self._symbols = symbols
        self._tensor_names = names
        self._axes: dict[Symbol, Axis] = {}
        self._by_platform = chosen_by_platform(jaxpr)
        self._axis_names = _axis_names({names[v] for v in symbols})

    def program(self, steps: Sequence[_Step]) -> LoopProgram:
        inputs = tuple(
            Tensor(self._tensor_names[var], self._over(over), dtype_of(var)) for var, over in self._symbols.items()
        )
        nests: list[Nest | External] = []
        for step in steps:
            nests.extend(self._nests(step))
        outputs = (self._tensor_names[a] for a in self._jaxpr.outvars if not isinstance(a, Literal))
        return verify(LoopProgram(inputs, tuple(nests), tuple(dict.fromkeys(outputs))))

    def _nests(self, step: _Step) -> Iterator[Nest | External]:
        source = Source(_compat.source_summary(step.eqn))
        match step.plan:
            case Refusal(reason):
                operands = tuple(dict.fromkeys(self._tensor_names[a] for a in step.eqn.invars if isinstance(a, Var)))
                form, inlined = (
                    _form_of(step.eqn),
                    any(a in self._by_platform for a in step.eqn.invars if isinstance(a, Var)),
                )
                work = None if inlined else work_of(step.eqn, lambda body: convert(body, symbolic=True))
                operation = "" if inlined else operation_of(step.eqn)
                for n, (var, symbols) in enumerate(zip(step.eqn.outvars, step.outputs, strict=True)):
                    name, axes = self._tensor_names[var], self._over(symbols)
                    yield External(
                        name, axes, dtype_of(var), operands, reason, source, form=form, run=run_of(step.eqn),
                        within=chosen_within(step.eqn), combines=combines(step.eqn), work=work,
                        operation=operation and f"{n} of {operation}",
                    )  # fmt: skip
            case Plan() as plan:
                var = step.eqn.outvars[0]
                kept, reduced = self._over(plan.kept), self._over(plan.reduced)
                args = tuple(self._operand(a, v) for a, v in zip(plan.reads(step.eqn), plan.views, strict=True))
                nest = Nest(
                    name=self._tensor_names[var],
                    axes=kept,
                    body=plan.body(args, self._position),
                    dtype=dtype_of(var),
                    reduced=reduced,
                    reducer=plan.reducer,
                    source=source,
                    precision=plan.precision,
                    picks=plan.picks,
                    unit_batch=plan.unit_batch,
                )
                yield from places.nests_of(nest, self._position(plan.reduced)) if plan.places else (nest,)
            case _:
                assert_never(step.plan)

    def _operand(self, atom: Any, view: tuple[Symbol, ...]) -> Expr:
        if isinstance(atom, Literal):
            return const(np.asarray(atom.val).reshape(()).item(), dtype_of(atom))
        return read(self._tensor_names[atom], self._over(view), dtype_of(atom))

    def _over(self, symbols: Sequence[Symbol]) -> tuple[Axis, ...]:
        axes = []
        for leaf in self._dims.leaves(symbols):
            if leaf not in self._axes:
                self._axes[leaf] = Axis(next(self._axis_names), self._dims.extent(leaf))
            axes.append(self._axes[leaf])
        return tuple(axes)

    def _position(self, symbols: Sequence[Symbol]) -> Expr:
        """The row-major position along `symbols`."""
        terms: list[Expr] = []
        stride = 1
        for axis in reversed(self._over(symbols)):
            terms.append(index(axis) if stride == 1 else mul(index(axis), const(stride, "int32")))
            stride *= axis.extent
        if not terms:
            return const(0, "int32")
        total, *rest = reversed(terms)
        for term in rest:
            total = add(total, term)
        return total


def _axis_names(taken: set[str]) -> Iterator[str]:
    letters = ascii_lowercase[ascii_lowercase.index("i") :]
    for name in chain(letters, (f"a{n}" for n in count(1))):
        if name not in taken:
            yield name
