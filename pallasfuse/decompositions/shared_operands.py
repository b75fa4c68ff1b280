"""Products that share an operand, kept in groups where XLA would copy operands to merge them.

On a GPU, XLA makes one product of all that share an operand: it joins the other operands, and takes the results apart. A kernel
that it writes for a product reads a few such operands where they lie; more are copied into one array first, in every call, and so
are operands that the library multiplies. Such are the experts of a layer that are written one by one, and the gradients of weights
that multiply the same values.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.decompositions.writing import Writer
from pallasfuse.device import Device
from pallasfuse.jaxpr_frontend import elementwise
from pallasfuse.price.gpu_library import copy_on_gpu
from pallasfuse.price.terms import Price

MOST_MERGED = 4
"""A kernel reads so many joined operands where they lie, but none that is computed: such are stored, or read by a kernel alone."""
_MERGED_BYTES = 32 << 20
"""A product is merged if its operands and its result have no more bytes."""
_OF_LIBRARY = 0.75
"""A kernel that XLA writes reaches so much of the rate of the library's matrix products: an estimate. (In a model's layers on an
H100, XLA took the library with copies of 8 us over a kernel of its own, so that such reached at most 0.81 there.)"""

_VIEWS = frozenset({"reshape", "squeeze", "slice", "transpose", "dynamic_slice", "expand_dims"})
"""Operations that compute nothing."""

type Prices = Callable[[Jaxpr], Price]


def with_fewer_merges(
    jaxpr: Jaxpr, may: Callable[[JaxprEqn], bool], device: Device, price: Prices, gain: float = 1.0
) -> Jaxpr:
    """Returns a jaxpr in which products share an operand only where XLA gains by merging them; itself where all do.

    may: may an equation be changed? price: of a program, by XLA. gain: how many times as fast smaller groups must be.
    """
    first_of: dict[int, tuple[int, list[JaxprEqn]]] = {}
    sizes: dict[Any, int] = {}  # equal layers have equal products
    order = {id(eqn): n for n, eqn in enumerate(jaxpr.eqns)}
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for side, groups in _sharing(jaxpr, may):
        one_of_each = [equal[0] for equal in groups]
        computed = any(_is_computed(p.invars[1 - side], makers) for p in one_of_each)
        key = (side, computed, str(one_of_each[0].params), *(v.aval for p in one_of_each for v in p.invars))
        if key not in sizes:
            merged = _Merged(side, computed, device, price)
            sizes[key] = _best_size(one_of_each, merged, gain)
        for start in range(sizes[key], len(groups), sizes[key]):
            part = [p for equal in groups[start : start + sizes[key]] for p in equal]
            first_of[id(min(part, key=lambda p: order[id(p)]))] = (side, part)
    return _written(jaxpr, first_of) if first_of else jaxpr


def _sharing(jaxpr: Jaxpr, may: Callable[[JaxprEqn], bool]) -> Iterator[tuple[int, list[list[JaxprEqn]]]]:
    """Yields the products that XLA merges, equal ones together, and on which side they have the operand that they share.

    None of them is computed from another one.
    """
    candidates: dict[Any, list[JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for key in _keys(eqn) if may(eqn) else ():
            candidates[key].append(eqn)
    several = {key: products for key, products in candidates.items() if len(products) > 1}
    bits = {id(p): 1 << n for n, p in enumerate({id(p): p for ps in several.values() for p in ps}.values())}
    before = _made_from(jaxpr, bits) if bits else {}
    taken = set[int]()
    for (_, side, *_), products in sorted(several.items(), key=lambda item: -len(item[1])):
        for independent in _independent([p for p in products if id(p) not in taken], before, bits):
            equal: dict[Any, list[JaxprEqn]] = defaultdict(list)
            for product in independent:
                other = product.invars[1 - side]
                equal[other if isinstance(other, Var) else id(other)].append(product)
            if len(equal) > 1:
                taken |= set(map(id, independent))
                yield side, list(equal.values())


def _independent(
    products: Sequence[JaxprEqn], before: Mapping[int, int], bits: Mapping[int, int]
) -> list[list[JaxprEqn]]:
    """Returns the products in lists, each of which has none that is computed from another one of it."""
    found: list[tuple[int, list[JaxprEqn]]] = []
    for product in products:
        for n, (made, others) in enumerate(found):
            if not before[id(product)] & made:
                found[n] = (made | bits[id(product)], [*others, product])
                break
        else:
            found.append((bits[id(product)], [product]))
    return [others for _, others in found]


def _made_from(jaxpr: Jaxpr, bits: dict[int, int]) -> dict[int, int]:
    """Returns the products that each product is computed from, as a sum of their bits."""
    of_variable: dict[Any, int] = {}
    of_product: dict[int, int] = {}
    for eqn in jaxpr.eqns:
        made = 0
        for atom in eqn.invars:
            made |= of_variable.get(atom, 0) if isinstance(atom, Var) else 0
        own = bits.get(id(eqn), 0)
        if own:
            of_product[id(eqn)] = made
        if made | own:
            of_variable.update(dict.fromkeys(eqn.outvars, made | own))
    return of_product


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


def _is_computed(atom: Any, makers: Mapping[Any, JaxprEqn]) -> bool:
    """Is an operand computed element by element, as weights of bytes are?"""
    while isinstance(atom, Var) and atom in makers and makers[atom].primitive.name in _VIEWS:
        atom = makers[atom].invars[0]
    return isinstance(atom, Var) and atom in makers and makers[atom].primitive.name in elementwise.RULES


@dataclass(frozen=True, slots=True)
class _Merged:
    """The price of products that XLA merges: on which side they have what they share, and are the others computed?"""

    side: int
    computed: bool
    device: Device
    price: Prices

    def us(self, products: Sequence[JaxprEqn]) -> float:
        """Returns the microseconds that XLA takes for some of them: by the library, or by a kernel of its own."""
        merged = self.price(_as_one(products, self.side))
        others = sum(_bytes(p.invars[1 - self.side]) for p in products)
        stored = self.computed or len(products) > 1  # the library reads one array
        by_library = merged.us + (copy_on_gpu(2 * others, self.device).us if stored else 0.0)
        if len(products) > (1 if self.computed else MOST_MERGED):
            return by_library
        matrix_us = sum(t.us for t in merged.terms if t.name == "matrix units")
        one_us = self.device.kernel_us + self.device.launch_us
        return min(by_library, max(merged.us, matrix_us / _OF_LIBRARY + one_us))


def _best_size(products: Sequence[JaxprEqn], merged: _Merged, gain: float) -> int:
    """Returns how many of the products are best merged with each other: all, as many as a kernel reads where they lie, or none."""
    sizes = {len(products), MOST_MERGED, 1} if len(products) > MOST_MERGED else {len(products), 1}
    times_us = {
        size: sum(merged.us(products[start : start + size]) for start in range(0, len(products), size))
        for size in sizes
    }
    best = min(sizes, key=lambda size: (times_us[size], -size))
    return best if gain * times_us[best] <= times_us[len(products)] else len(products)


def _as_one(products: Sequence[JaxprEqn], side: int) -> Jaxpr:
    """Returns the product of the shared operand and of all others, joined."""
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
            # with another operand each: XLA takes equal barriers for one. It drops that operand before it fuses anything
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
    """Returns the bytes of some arrays."""
    return float(sum(math.prod(_compat.shape_of(a)) * _compat.dtype_of(a).itemsize for a in atoms))
