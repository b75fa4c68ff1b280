"""The rule for the place of a maximum or minimum: reductions that depend on each other, as those of a softmax do.

`argmin` of x is the least position at which x equals its minimum; where an element is no number, it is the first such position.
XLA finds it in one pass of its own. In a kernel, the minimum is a reduction that others may share, and the position is another one
beside it, which begins anew whenever the minimum becomes less (`fusion.extremes`).
"""

from collections.abc import Iterator

from pallasfuse._compat import JaxprEqn
from pallasfuse.errors import Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Expr, apply, const, convert, read, select
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, MIN, Reducer
from pallasfuse.jaxpr_frontend.dimensions import Dimensions
from pallasfuse.jaxpr_frontend.plans import LARGEST, Plan, Rule, dtype_of, flat, same, shape_of


def _place(reducer: Reducer) -> Rule:
    def rule(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
        axes, source = {int(axis) for axis in eqn.params["axes"]}, dtype_of(eqn.invars[0])
        operand = dims.fresh_shape(shape_of(eqn.invars[0]), space)
        kept = flat([d for n, d in enumerate(operand) if n not in axes])
        reduced = flat([d for n, d in enumerate(operand) if n in axes])
        if not reduced or any(n > LARGEST for n in shape_of(eqn.invars[0])):
            return Refusal(f"{eqn.primitive.name} over {shape_of(eqn.invars[0])} is left to XLA")
        if not (dtypes.is_float(source) or dtypes.is_integer(source)):
            return Refusal(f"{eqn.primitive.name} of elements of type {source}")
        return Plan(kept, (flat(operand),), same, reduced, reducer, places=True)

    return rule


def operation_of(step: str) -> str:
    """The name of the operation that a nest of some name is a step of."""
    return step.rpartition(".")[0]


def nests_of(last: Nest, position: Expr) -> Iterator[Nest]:
    """Yields the steps of a place, the last one with its name and type.

    last: the reduction to the extremum, which has the name and the type of the place. position: along the reduced axes.
    """
    element, nowhere = last.body, const(MIN.identity("int32"), "int32")

    def step(suffix: str, body: Expr, reducer: Reducer | None) -> tuple[Nest, Expr]:
        name, axes = f"{last.name}.{suffix}", last.axes
        nest = Nest(name, axes, body, body.dtype, last.reduced, reducer, last.source, internal=True)
        return nest, read(name, axes, body.dtype)

    extreme, value = step("extreme", element, last.reducer)
    first, place = step("first", select(apply("eq", element, value), position, nowhere), MIN)
    yield from (extreme, first)
    # No element equals the extremum only in a proof, whose numbers have no order. Position 0 is there for every extent.
    found: Expr = select(apply("lt", place, nowhere), place, const(0, "int32"))
    if dtypes.is_float(element.dtype):
        unknown, other = step("unknown", select(apply("ne", element, element), position, nowhere), MIN)
        yield unknown
        found = select(apply("lt", other, nowhere), other, found)
    yield Nest(last.name, last.axes, convert(found, last.dtype), last.dtype, source=last.source)


RULES: dict[str, Rule] = {"argmax": _place(MAX), "argmin": _place(MIN)}
