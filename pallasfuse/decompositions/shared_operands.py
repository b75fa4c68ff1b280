"""Products that share an operand, kept in groups that XLA can merge without copies.

On a GPU, XLA makes one product of all that share an operand: it joins the other operands, and takes the results apart. A kernel
that it writes for a product reads a few such operands where they lie; more are copied into one array first, in every call. Such
are the experts of a layer that are written one by one.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Writer
from pallasfuse.device import Device

MOST_MERGED = 4
"""A kernel reads so many joined operands where they lie."""
_MERGED_BYTES = 32 << 20
"""A product is merged if its operands and its result have no more bytes."""
_KERNELS = 2
"""A further product is so many kernels: itself, and the sum of its parts."""


def in_groups(jaxpr: Jaxpr, may: Callable[[JaxprEqn], bool], device: Device) -> Jaxpr:
    """Returns a jaxpr in which at most `MOST_MERGED` products share an operand, where the copies of more take longer.

    may: may an equation be changed?
    """
    groups: dict[Any, list[JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        key = _key(eqn) if may(eqn) else None
        if key is not None:
            groups[key].append(eqn)
    first_of: dict[int, tuple[int, list[JaxprEqn]]] = {}
    for (_, side, *_), products in groups.items():
        if _copies_us(products, side, device) > _further_us(products, device):
            for start in range(MOST_MERGED, len(products), MOST_MERGED):
                part = products[start : start + MOST_MERGED]
                first_of[id(part[0])] = (side, part)
    if not first_of:
        return jaxpr
    writer = Writer(jaxpr)
    apart: dict[int, tuple[int, Any]] = {}
    for eqn in jaxpr.eqns:
        if id(eqn) in first_of:
            side, part = first_of[id(eqn)]
            operands = [writer.atom(eqn.invars[n]) for n in (side, 1 - side)]
            # with another operand each: XLA takes equal barriers for one
            shared, _ = writer.emit(eqn, lambda *both: lax.optimization_barrier(both), operands)
            apart |= {id(other): (side, shared) for other in part}
        if id(eqn) in apart:
            side, shared = apart[id(eqn)]
            operands = [shared if n == side else writer.atom(a) for n, a in enumerate(eqn.invars)]
            writer.eqns.append(eqn.replace(invars=operands))  # type: ignore[no-untyped-call]
        else:
            writer.keep(eqn)
    return writer.written()


def _key(eqn: JaxprEqn) -> Any:
    """The operand that a product shares, its side, and what else products must have in common to be merged; None if it is not."""
    if eqn.primitive.name != "dot_general" or _bytes(*eqn.invars, *eqn.outvars) > _MERGED_BYTES:
        return None
    (over, batch) = eqn.params["dimension_numbers"]
    free = [len(_compat.shape_of(a)) - len(over[n]) - len(batch[n]) for n, a in enumerate(eqn.invars)]
    sizes = [math.prod(_compat.shape_of(a)) for a in eqn.invars]
    side = 0 if sizes[0] <= sizes[1] else 1  # what is joined is the larger one
    shared = eqn.invars[side]
    if isinstance(shared, Literal) or not isinstance(shared, Var) or free[1 - side] != 1 or any(map(len, batch)):
        return None
    types = tuple(_compat.dtype_of(a) for a in (*eqn.invars, *eqn.outvars))
    return shared, side, eqn.params["dimension_numbers"], str(eqn.params["precision"]), types


def _copies_us(products: Sequence[JaxprEqn], side: int, device: Device) -> float:
    """The microseconds in which XLA joins the other operands of products; 0 where it reads them as they lie."""
    if len(products) <= MOST_MERGED:
        return 0.0
    return 2e-3 * sum(_bytes(p.invars[1 - side]) for p in products) / device.memory_gb_s


def _further_us(products: Sequence[JaxprEqn], device: Device) -> float:
    """The microseconds of the further kernels in groups, by which they must be faster beyond the error of the price."""
    further = math.ceil(len(products) / MOST_MERGED) - 1
    return device.price_error * further * _KERNELS * (device.kernel_us + device.launch_us)


def _bytes(*atoms: Any) -> float:
    return float(sum(math.prod(_compat.shape_of(a)) * _compat.dtype_of(a).itemsize for a in atoms))
