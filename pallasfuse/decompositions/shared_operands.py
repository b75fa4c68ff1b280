"""Products that share an operand, kept in groups where XLA would copy operands to merge them.

On a GPU, XLA makes one product of all that share an operand: it joins the other operands, and takes the results apart. A kernel
that it writes for a product reads a few such operands where they lie; more are copied into one array first, in every call, and so
are operands that the library multiplies. Such are the experts of a layer that are written one by one, and the gradients of weights
that multiply the same values.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.decompositions.writing import Writer
from pallasfuse.device import Device
from pallasfuse.price.gpu_library import copy_on_gpu
from pallasfuse.price.terms import Price

MOST_MERGED = 4
"""A kernel reads so many joined operands where they lie."""
_MERGED_BYTES = 32 << 20
"""A product is merged if its operands and its result have no more bytes."""
_OF_LIBRARY = 0.75
"""A kernel that XLA writes reaches so much of the rate of the library's matrix products."""

type Prices = Callable[[Jaxpr], Price]


def in_groups(jaxpr: Jaxpr, may: Callable[[JaxprEqn], bool], device: Device, price: Prices, gain: float = 1.0) -> Jaxpr:
    """Returns a jaxpr in which products share an operand only where XLA gains by merging them; itself where all do.

    may: may an equation be changed? price: of a program, by XLA. gain: how many times as fast groups must be.
    """
    found: dict[int, tuple[int, list[JaxprEqn]]] = {}
    sizes: dict[Any, int] = {}  # equal layers have equal products
    for side, products in _sharing(jaxpr, may):
        key = (side, str(products[0].params), *(v.aval for p in products for v in p.invars))
        if key not in sizes:
            sizes[key] = _best_size(products, side, device, price, gain)
        size = sizes[key]
        for start in range(size, len(products), size):
            part = products[start : start + size]
            found[id(part[0])] = (side, part)
    return _written(jaxpr, found) if found else jaxpr


def _sharing(jaxpr: Jaxpr, may: Callable[[JaxprEqn], bool]) -> Iterator[tuple[int, list[JaxprEqn]]]:
    """Yields the products that XLA merges, and on which side they have the operand that they share."""
    groups: dict[Any, list[JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for key in _keys(eqn) if may(eqn) else ():
            groups[key].append(eqn)
    taken = set[int]()
    for (_, side, *_), products in sorted(groups.items(), key=lambda item: -len(item[1])):
        free = [p for p in products if id(p) not in taken]
        if len(free) > 1:
            taken |= {id(p) for p in free}
            yield side, free


def _keys(eqn: JaxprEqn) -> Iterator[Any]:
    """Yields what products that XLA merges have in common: the operand that they share, its side, and how they multiply."""
    if eqn.primitive.name != "dot_general" or _bytes(*eqn.invars, *eqn.outvars) > _MERGED_BYTES:
        return
    over, batch = eqn.params["dimension_numbers"]
    if any(map(len, batch)):
        return
    types = tuple(_compat.dtype_of(a) for a in (*eqn.invars, *eqn.outvars))
    for side, shared in enumerate(eqn.invars):
        free = len(_compat.shape_of(eqn.invars[1 - side])) - len(over[1 - side])
        if isinstance(shared, Var) and free == 1:
            yield shared, side, (over, batch), str(eqn.params["precision"]), types


def _best_size(products: Sequence[JaxprEqn], side: int, device: Device, price: Prices, gain: float) -> int:
    """Returns how many of the products are best merged with each other: all, as many as a kernel reads where they lie, or none."""

    def us(size: int) -> float:
        parts = [products[start : start + size] for start in range(0, len(products), size)]
        return sum(_merged_us(part, side, device, price) for part in parts)

    sizes = {len(products), MOST_MERGED, 1} if len(products) > MOST_MERGED else {len(products), 1}
    times_us = {size: us(size) for size in sizes}
    best = min(sizes, key=lambda size: (times_us[size], -size))
    return best if gain * times_us[best] <= times_us[len(products)] else len(products)


def _merged_us(products: Sequence[JaxprEqn], side: int, device: Device, price: Prices) -> float:
    """The microseconds of the kernels that XLA makes of some products that share an operand: the library's, or one of its own."""
    merged = price(_as_one(products, side))
    if len(products) == 1:
        return merged.us
    joined = sum(_bytes(p.invars[1 - side]) for p in products)
    by_library = merged.us + copy_on_gpu(2 * joined, device).us
    if len(products) > MOST_MERGED:
        return by_library
    matrix_us = sum(t.us for t in merged.terms if t.name == "matrix units")
    return min(by_library, max(merged.us, matrix_us / _OF_LIBRARY + device.kernel_us + device.launch_us))


def _as_one(products: Sequence[JaxprEqn], side: int) -> Jaxpr:
    """The product of the shared operand and of all others, joined."""
    first = products[0]
    (over, _), other = first.params["dimension_numbers"], first.invars[1 - side]
    (free,) = set(range(len(_compat.shape_of(other)))) - set(over[1 - side])
    shape = list(_compat.shape_of(other))
    shape[free] = sum(_compat.shape_of(p.invars[1 - side])[free] for p in products)
    joined = jax.ShapeDtypeStruct(tuple(shape), _compat.dtype_of(other))
    operands = [_compat.struct_of(first.invars[side]), joined]

    def product(shared: Any, others: Any) -> Any:
        pair = (shared, others) if side == 0 else (others, shared)
        return lax.dot_general(
            *pair, first.params["dimension_numbers"], precision=first.params["precision"],
            preferred_element_type=first.params["preferred_element_type"],
        )  # fmt: skip

    return jax.make_jaxpr(product)(*operands)


def _written(jaxpr: Jaxpr, groups: dict[int, tuple[int, list[JaxprEqn]]]) -> Jaxpr:
    """Returns the jaxpr with a value of its own for what the products of each group share. groups: by the first product."""
    writer = Writer(jaxpr)
    own: dict[int, tuple[int, Any]] = {}
    for eqn in jaxpr.eqns:
        if id(eqn) in groups:
            side, part = groups[id(eqn)]
            operands = [writer.atom(eqn.invars[n]) for n in (side, 1 - side)]
            # with another operand each: XLA takes equal barriers for one
            shared, _ = writer.emit(eqn, lambda *both: lax.optimization_barrier(both), operands)
            own |= {id(other): (side, shared) for other in part}
        if id(eqn) in own:
            side, shared = own[id(eqn)]
            operands = [shared if n == side else writer.atom(a) for n, a in enumerate(eqn.invars)]
            writer.eqns.append(eqn.replace(invars=operands))  # type: ignore[no-untyped-call]
        else:
            writer.keep(eqn)
    return writer.written()


def _bytes(*atoms: Any) -> float:
    return float(sum(math.prod(_compat.shape_of(a)) * _compat.dtype_of(a).itemsize for a in atoms))
