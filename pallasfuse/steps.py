"""The steps of a plan: its kernels and the equations that XLA keeps, in an order that respects the data."""

from collections.abc import Sequence
from typing import Any

from pallasfuse import _compat
from pallasfuse._compat import Var
from pallasfuse.decisions import Grouping, Left
from pallasfuse.errors import InvalidProgramError
from pallasfuse.indirect import lookups_in, why_stored
from pallasfuse.ir.loop_program import External, LoopProgram
from pallasfuse.jaxpr_frontend import Converted, left_by_user
from pallasfuse.loop_calls import recurrence_p
from pallasfuse.options import FuseOptions
from pallasfuse.plan import Fallback, Kernel, Plan, Step

_LAYOUT = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "iota",
                     "stop_gradient", "convert_element_type", "sharding_constraint"})  # fmt: skip


def steps_of(converted: Converted, kernels: Sequence[Kernel]) -> list[Step]:
    """Returns the steps that must run, in an order that respects the data: kernels where they produce a value, equations
    elsewhere."""
    maker: dict[Var, Step] = {v: e for e in converted.jaxpr.eqns for v in e.outvars}
    for kernel in kernels:
        maker |= {converted.variable[name]: kernel for name in kernel.stores}
    wanted: list[Any] = [v for v in converted.jaxpr.outvars if isinstance(v, Var)]
    roots = [maker[v] for v in wanted if v in maker] + [e for e in converted.jaxpr.eqns if e.effects]
    steps: list[Step] = []
    state: dict[int, bool] = {}  # id -> finished
    stack: list[tuple[Step, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        step, ready = stack.pop()
        if ready:
            if not state[id(step)]:
                state[id(step)] = True
                steps.append(step)
            continue
        if id(step) in state:
            if not state[id(step)] and any(s is step and r for s, r in stack):
                raise InvalidProgramError("plan: kernels wait for each other")
            continue
        state[id(step)] = False
        stack.append((step, True))
        stack.extend(
            (maker[v], False) for v in operands_of(converted, step) if v in maker and not state.get(id(maker[v]))
        )
    return steps


def gathered_anyway(converted: Converted, kernels: Sequence[Kernel]) -> frozenset[str]:
    """The tensors that kernels look up though XLA gathers them all the same, because something else needs them.

    No slices: what else needs them reads them where they are.
    """
    wanted = {name for k in kernels for name, lookup in k.lookups.items() if not lookup.is_slice}
    if not wanted:
        return frozenset()
    computed = {id(step) for step in steps_of(converted, kernels)}
    maker = {v: e for e in converted.jaxpr.eqns for v in e.outvars}

    def is_gathered(name: str) -> bool:
        eqn = maker[converted.variable[name]]
        (operand, *_) = eqn.invars
        if eqn.primitive.name != "gather" and isinstance(operand, Var):  # another shape of what is gathered
            eqn = maker[operand]
        return id(eqn) in computed

    return frozenset(filter(is_gathered, wanted))


def operands_of(converted: Converted, step: Step) -> list[Var]:
    """The variables that a step reads."""
    if isinstance(step, Kernel):
        return [converted.variable[name] for name in step.reads]
    return [v for v in step.invars if isinstance(v, Var)]


def fallbacks_of(
    converted: Converted, grouping: Grouping, steps: Sequence[Step], options: FuseOptions
) -> list[Fallback]:
    """The steps that XLA keeps, with the reasons."""
    reasons = {left.name: left.reason for left in (*grouping.left, *external_reasons(converted.program))}
    reasons |= _not_looked_up(converted.program, [s for s in steps if isinstance(s, Kernel)])
    by_variable = {var: name for name, var in converted.variable.items()}
    found = []
    for step in steps:
        if isinstance(step, Kernel) or step.primitive.name in _LAYOUT or step.primitive is recurrence_p:
            continue
        names = [by_variable[v] for v in step.outvars if v in by_variable]
        reason = next((reasons[n] for n in names if n in reasons), "elementwise, outside every kernel: XLA fuses it")
        asked = left_by_user(step, options.exclude) is not None
        found.append(Fallback(step.primitive.name, _compat.source_summary(step) or "<unknown line>", reason, asked))
    return found


def _not_looked_up(program: LoopProgram, kernels: Sequence[Kernel]) -> dict[str, str]:
    """Says why kernels that read what a gather stores do not read it where it comes from, by the gather's name."""
    found: dict[str, str] = {}
    lookups = lookups_in(program)
    nests = {n.name: n for n in program.nests if n.name in lookups}
    for name, lookup in lookups.items():
        kernel = next((k for k in kernels if name in k.group.inputs and name not in k.lookups), None)
        nest = nests[name]
        if kernel is not None and isinstance(nest, External):
            why = f"gather of rows that {kernel.name} reads: {why_stored(kernel.phases, lookup)}"
            found[nest.operands[0] if nest.moves_nothing else name] = why
    return found


def external_reasons(program: LoopProgram) -> list[Left]:
    """Lists the operations that the frontend could not convert, with its reasons."""
    return [Left(n.name, n.reason, n.source) for n in program.nests if isinstance(n, External)]


def kernels_behind(plan: Plan, result: int) -> list[Kernel]:
    """The kernels that a result of a plan is computed by, directly or through others, the last one first."""
    maker: dict[Var, Step] = {}
    for step in plan.steps:
        made = [plan.converted.variable[n] for n in step.stores] if isinstance(step, Kernel) else step.outvars
        maker |= dict.fromkeys(made, step)
    wanted: list[Any] = [plan.converted.jaxpr.outvars[result]]
    behind: dict[int, Step] = {}
    while wanted:
        atom = wanted.pop(0)
        step_of = maker.get(atom) if isinstance(atom, Var) else None
        if step_of is not None and id(step_of) not in behind:
            behind[id(step_of)] = step_of
            wanted += operands_of(plan.converted, step_of)
    return [step for step in behind.values() if isinstance(step, Kernel)]
