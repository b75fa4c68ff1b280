"""Nests to equations: a flat jaxpr in which some tensors are computed by other nests than those of its own equations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.first_time import Later
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.jaxpr_frontend.axis_parts import Rewritten
from pallasfuse.jaxpr_frontend.converted import Converted, of_flat
from pallasfuse.jaxpr_frontend.inlining import live
from pallasfuse.jaxpr_frontend.names import tensor_names
from pallasfuse.jaxpr_frontend.plans import dtype_of, shape_of

type Atom = Var | Literal
type Axes = Mapping[str, tuple[Axis, ...]]

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "neg": lax.neg,
}  # fmt: skip


def rewritten(
    original: Jaxpr, flat: Jaxpr, variable: Mapping[str, Var], computed: Sequence[Sequence[Nest]], axes: Axes,
    leaves: Iterable[str], program: Callable[[Jaxpr, Mapping[Var, str]], Later[LoopProgram]], *, mixed: bool,
) -> Converted | None:  # fmt: skip
    """A program with some of its tensors computed in other ways; None where that cannot be.

    original: the jaxpr that was made flat. leaves: tensors that both ways are computed from. program: makes the loop program of a
    flat jaxpr, of which it gets the names of the tensors, too. computed, axes, mixed: as of `with_nests`.
    """
    found = with_nests(flat, computed, variable, axes, mixed=mixed)
    if found is None:
        return None
    names = tensor_names(found.jaxpr)
    made = of_flat(original, found.jaxpr, names, program(found.jaxpr, names))
    return replace(made, whole=flat, replaced=found.replaced, leaves=frozenset(variable[name] for name in leaves))


def with_nests(
    jaxpr: Jaxpr, computed: Sequence[Sequence[Nest]], variable: Mapping[str, Var], axes: Axes, *, mixed: bool
) -> Rewritten | None:
    """A flat jaxpr that computes some of its tensors in other ways; None where JAX would give one of them another type.

    computed: for each of these tensors nests, the last of which has its name. axes: of the tensors of the jaxpr, whose variables,
    row by row, hold them. mixed: are there products of narrow operands whose result has a wide type, as on GPUs? Else operands are
    widened, and products with a vector are sums.
    """
    ways = {variable[nests[-1].name]: nests for nests in computed}
    instead: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []

    def now(atom: Atom) -> Atom:
        return instead.get(atom, atom) if isinstance(atom, Var) else atom

    for written in jaxpr.eqns:
        eqn = written.replace(invars=[now(a) for a in written.invars])
        eqns.append(eqn)
        for var in eqn.outvars:
            if var not in ways:
                continue
            names = _read_by(ways[var])
            made = _traced(ways[var], names, [now(variable[n]) for n in names], axes, var, mixed)
            if made is None:
                return None
            inner, result = made
            eqns += [e.replace(source_info=eqn.source_info, ctx=eqn.ctx) for e in inner]
            instead[var] = result
    outvars = [now(a) for a in jaxpr.outvars]
    needed, _ = live(eqns, outvars)
    found = _compat.replace_jaxpr(jaxpr, jaxpr.constvars, jaxpr.consts, needed, outvars)
    return Rewritten(found, instead)


def _read_by(nests: Sequence[Nest]) -> list[str]:
    """The tensors that nests read from outside."""
    own = {n.name for n in nests}
    return list(dict.fromkeys(t for n in nests for t in sorted(n.reads) if t not in own))


def _traced(
    nests: Sequence[Nest], names: Sequence[str], operands: Sequence[Atom], axes: Axes, like: Var, mixed: bool
) -> tuple[list[JaxprEqn], Var] | None:
    """The equations of nests over operands, and the variable of the last nest, which has the type of another one."""
    if any(_compat.explicit_axes(_compat.mesh_of(a)) for a in (*operands, like)):
        return None

    def run(*arrays: Any) -> Any:
        known = {n: x.reshape([a.extent for a in axes[n]]) for n, x in zip(names, arrays, strict=True)}
        for nest in nests:
            known[nest.name] = compute(nest, known, mixed=mixed)
        return known[nests[-1].name].reshape(shape_of(like))

    made = jax.make_jaxpr(run)(*(_compat.struct_of(a) for a in operands))
    (result,) = made.outvars
    if isinstance(result, Literal) or result in made.invars or made.constvars:
        return None
    if (shape_of(result), dtype_of(result)) != (shape_of(like), dtype_of(like)):
        return None
    renamed: dict[Any, Atom] = dict(zip(made.invars, operands, strict=True))
    eqns = []
    for eqn in made.eqns:
        outvars = [Var(v.aval) for v in eqn.outvars]
        renamed |= dict(zip(eqn.outvars, outvars, strict=True))
        invars = [a if isinstance(a, Literal) else renamed[a] for a in eqn.invars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    last = renamed[result]
    assert isinstance(last, Var)
    return eqns, last


def compute(nest: Nest, arrays: Mapping[str, Any], *, mixed: bool = True) -> Any:
    """The tensor of a nest, one dimension for each of its axes. arrays: the tensors that it reads, likewise.

    A sum of a product of two reads is a `dot_general`, in which both are in the types that they are stored in. mixed: as of
    `with_nests`.
    """
    pair = _pair(nest.body) if nest.reduced else None
    if pair is not None and (mixed or not _is_with_vector(nest, *pair)):
        return _product(nest, *pair, arrays, mixed)
    order = _stored_order(nest)
    value = _elementwise(nest.body, order, arrays, nest.dtype if nest.reduced else None)
    if nest.reduced:
        summed = tuple(order.index(a) for a in nest.reduced)
        value = jnp.sum(value, axis=summed, dtype=dtypes.accumulator(nest.dtype))
    kept = [a for a in order if a not in nest.reduced]
    return lax.transpose(value, [kept.index(a) for a in nest.axes]).astype(nest.dtype)


def _stored_order(nest: Nest) -> tuple[Axis, ...]:
    """The axes of a nest in the order in which the largest tensor that it reads is stored, so that this one is read as it lies."""
    reads = [n for n in postorder(nest.body) if isinstance(n, Read)]
    largest = max(reads, key=lambda r: volume(r.indices), default=None)
    first = () if largest is None else largest.indices
    return (*first, *(a for a in (*nest.axes, *nest.reduced) if a not in first))


def _is_with_vector(nest: Nest, a: Read, b: Read) -> bool:
    """Has an operand no axis of the result for itself, while the other one is summed over more than its last axis?

    Such products of XLA on a CPU add one row after the other. Its sums are exact to a few roundings, and take about as long.
    """
    pairs = ((own, other) for own, other in ((a, b), (b, a)) if other.indices)
    return any(
        all(x in nest.reduced or x in other.indices for x in own.indices) and other.indices[-1] not in nest.reduced
        for own, other in pairs
    )


def _pair(body: Expr) -> tuple[Read, Read] | None:
    """The two reads of which a body is the product, if it is that and nothing else."""
    match body:
        case Apply("mul", (a, b)):
            first, second = _without_casts(a), _without_casts(b)
            if isinstance(first, Read) and isinstance(second, Read):
                return first, second
    return None


def _without_casts(node: Expr) -> Expr:
    while isinstance(node, Apply) and node.op == "convert":
        (node,) = node.args
    return node


def _product(nest: Nest, a: Read, b: Read, arrays: Mapping[str, Any], mixed: bool) -> Any:
    carried = dtypes.accumulator(nest.dtype)  # some of XLA's loops would add up in the type of the result
    same = a.dtype == b.dtype and (mixed or a.dtype == nest.dtype)
    operands = [arrays[r.tensor] if same else arrays[r.tensor].astype(carried) for r in (a, b)]
    batch = [x for x in nest.axes if x in a.indices and x in b.indices]

    def places(over: Sequence[Axis]) -> tuple[list[int], list[int]]:
        return [a.indices.index(x) for x in over], [b.indices.index(x) for x in over]

    kept = (*batch, *(x for x in (*a.indices, *b.indices) if x in nest.axes and x not in batch))
    found = lax.dot_general(
        operands[0],
        operands[1],
        (places(nest.reduced), places(batch)),
        precision=lax.Precision[nest.precision] if nest.precision is not None else None,
        preferred_element_type=carried,
    )
    return lax.transpose(found, [kept.index(x) for x in nest.axes]).astype(nest.dtype)


def _elementwise(root: Expr, order: Sequence[Axis], arrays: Mapping[str, Any], last: str | None) -> Any:
    """An expression at all points of some axes. last: the type of the whole, where a conversion to another one is left out."""
    if last is not None:
        root = _without_casts(root)
    found: dict[Expr, Any] = {}
    shape = [a.extent for a in order]
    for node in postorder(root):
        args = [found[a] for a in node.args]
        match node:
            case Const(value, dtype):
                found[node] = jnp.full(shape, value, dtype)
            case Read(tensor, indices, _):
                present = [x for x in order if x in indices]
                aligned = lax.transpose(arrays[tensor], [indices.index(x) for x in present])
                found[node] = lax.broadcast_in_dim(aligned, shape, [order.index(x) for x in present])
            case Apply("convert", _, dtype):
                found[node] = lax.convert_element_type(args[0], dtype)
            case Apply(op):
                found[node] = _OPERATIONS[op](*args)
    return found[root]
