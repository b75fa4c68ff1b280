"""Rules for the primitives that only move elements: they become reads over renamed, split or merged axes."""

from collections.abc import Callable, Sequence

from pallasfuse._compat import JaxprEqn
from pallasfuse.errors import Refusal
from pallasfuse.ir.expr import Expr, convert
from pallasfuse.jaxpr_frontend.dimensions import Dimensions, Symbol
from pallasfuse.jaxpr_frontend.plans import Plan, Position, Rule, dtype_of, flat, same, shape_of


def _broadcast_in_dim(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    if len(eqn.invars) != 1:
        return Refusal("broadcast_in_dim to a dynamic shape")
    source = shape_of(eqn.invars[0])
    out = dims.fresh_shape(shape_of(eqn.outvars[0]), space)
    targets = [int(d) for d in eqn.params["broadcast_dimensions"]]
    view = flat([out[to] if extent != 1 else () for extent, to in zip(source, targets, strict=True)])
    return Plan(flat(out), (view,), same)


def _transpose(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    out = dims.fresh_shape(shape_of(eqn.outvars[0]), space)
    permutation = [int(d) for d in eqn.params["permutation"]]
    return Plan(flat(out), (flat([out[permutation.index(d)] for d in range(len(out))]),), same)


def _reshape(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    if eqn.params.get("dimensions") is not None:
        return Refusal("reshape that also permutes dimensions")
    return _renaming(eqn, dims, space)


def _renaming(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan:
    """Plans an equation whose result has the same elements in the same row-major order as its operand."""
    kept = flat(dims.fresh_shape(shape_of(eqn.outvars[0]), space))
    return Plan(kept, (kept, *(() for _ in eqn.invars[1:])), same)


def _tile(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    inner = dims.fresh_shape(shape_of(eqn.invars[0]), space)
    outer = dims.fresh_shape((int(n) for n in eqn.params["reps"]), space)
    if len(inner) != len(outer):
        return Refusal("tile that adds dimensions")
    kept = flat([part for pair in zip(outer, inner, strict=True) for part in pair])
    return Plan(kept, (flat(inner),), same)


def _iota(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    if eqn.invars:
        return Refusal("iota of a dynamic shape")
    if shape_of(eqn.outvars[0])[int(eqn.params["dimension"])] > 2**31:
        return Refusal("iota beyond 32-bit positions")
    out = dims.fresh_shape(shape_of(eqn.outvars[0]), space)
    along: Sequence[Symbol] = out[int(eqn.params["dimension"])]
    dtype = dtype_of(eqn.outvars[0])

    def body(args: tuple[Expr, ...], position: Position) -> Expr:
        return convert(position(along), dtype)

    return Plan(flat(out), (), body)


def _only_when(is_identity: Callable[[JaxprEqn], bool], reason: str) -> Rule:
    def rule(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
        if is_identity(eqn) and shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]):
            return _renaming(eqn, dims, space)
        return Refusal(reason)

    return rule


def _is_whole_slice(eqn: JaxprEqn) -> bool:
    strides = eqn.params["strides"]
    return not any(eqn.params["start_indices"]) and (strides is None or all(s == 1 for s in strides))


def _pads_nothing(eqn: JaxprEqn) -> bool:
    return not any(any(config) for config in eqn.params["padding_config"])


def _reverses_units(eqn: JaxprEqn) -> bool:
    return all(shape_of(eqn.invars[0])[int(d)] == 1 for d in eqn.params["dimensions"])


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _renaming,
    "expand_dims": _renaming,
    "tile": _tile,
    "iota": _iota,
    "slice": _only_when(_is_whole_slice, "slices are left to XLA"),
    "dynamic_slice": _only_when(lambda eqn: True, "slices are left to XLA"),
    "pad": _only_when(_pads_nothing, "padding is left to XLA"),
    "concatenate": _only_when(lambda eqn: len(eqn.invars) == 1, "concatenations are left to XLA"),
    "split": _only_when(lambda eqn: len(eqn.outvars) == 1, "slices are left to XLA"),
    "rev": _only_when(_reverses_units, "reversals are left to XLA"),
}
