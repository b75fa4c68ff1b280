"""Values that are repeated along axes for a call of XLA's library on a CPU: which of them are stored in full.

To repeat is an operation of its own in XLA, like any map of a library: a call takes it in if all that read its result are in the
call. A value that two calls read, or a call and a loop, is stored in full for the calls, while loops repeat it for themselves.
And where a reduction is only read through it, it is the last thing that the call does: what is stored is the repeated result.
(26 functions of reductions, maps and choices, as they are compiled for a CPU.)
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, postorder, read
from pallasfuse.ir.loop_program import Nest
from pallasfuse.price.xla_forms import LoopFusion, XlaKernel
from pallasfuse.price.xla_library import FEWEST, takes_all, with_inverses
from pallasfuse.price.xla_products import places


@dataclass(frozen=True, slots=True)
class Repeated:
    """A value that is the same along some of the axes of an operation that takes it."""

    value: Expr
    axes: frozenset[Axis]
    """Those of the operation."""


def with_repeated(kernels: Sequence[XlaKernel], stored: Collection[str]) -> list[XlaKernel]:
    """Returns the kernels of a program on a CPU, with those that repeat values, and what these store.

    kernels: as they are joined to calls. stored: tensors that have to be in memory.
    """
    readers: dict[Repeated, list[int]] = {}
    by_calls = {n for n, k in enumerate(kernels) if isinstance(k, LoopFusion) and k.by_library}
    for n, kernel in enumerate(kernels) if by_calls else ():
        if isinstance(kernel, LoopFusion):
            for one in _repeated_by(kernel):
                readers.setdefault(one, []).append(n)
    ends = _ends(kernels, by_calls, readers, stored)
    found = list(kernels)
    for one, at in readers.items():
        in_calls = [n for n in at if n in by_calls]
        last = ends.get(one)
        if last is None and (len(at) < 2 or not in_calls or _is_made_inside(one, kernels, in_calls)):
            continue
        nest = _nest_of(one, len(found) - len(kernels))
        if last is not None:
            found = [replace(k, inside=k.inside | {last}) if isinstance(k, LoopFusion) else k for k in found]
        for n in at if last is not None else in_calls:
            reader = found[n]
            assert isinstance(reader, LoopFusion)
            found[n] = replace(reader, reads=reader.reads | dict(places(_read_of(nest))))
        inside = frozenset() if last is None else frozenset({last})
        fusion = LoopFusion([nest], [one.value], dict(places(one.value)), inside=inside, by_library=last is not None)
        found.append(fusion)
    return found


def _ends(
    kernels: Sequence[XlaKernel], by_calls: Collection[int], readers: Mapping[Repeated, Sequence[int]], stored: Collection[str]
) -> dict[Repeated, str]:  # fmt: skip
    """The repeated values with which calls end, and the tensor that the call makes before that, which nothing else reads."""
    users: dict[str, list[int]] = {}
    for n, kernel in enumerate(kernels):
        for tensor in kernel.sources:
            users.setdefault(tensor, []).append(n)
    made = {t for n in by_calls for t in _made_for_others(kernels[n]) if t in users and t not in stored}
    of: dict[str, list[Repeated]] = {}
    for one in readers:
        for tensor in made & one.value.tensors:
            of.setdefault(tensor, []).append(one)
    found: dict[Repeated, str] = {}
    for tensor, several in of.items():
        if len(several) > 1 or several[0].value.tensors != {tensor} or not takes_all(several[0].value):
            continue
        only = several[0]
        if sorted(users[tensor]) == sorted(readers[only]) and all(
            _has_it_only_in(with_inverses(body), tensor, only.value)
            for n in users[tensor] for body in cast(LoopFusion, kernels[n]).bodies
        ):  # fmt: skip
            found[only] = tensor
    return found


def _made_for_others(kernel: XlaKernel) -> Iterator[str]:
    """Yields what a call makes and does not keep inside."""
    if isinstance(kernel, LoopFusion):
        yield from (n.name for n in kernel.roots if n.name not in kernel.inside)


@lru_cache(1 << 12)
def _has_it_only_in(body: Expr, tensor: str, value: Expr) -> bool:
    """Is a tensor read nowhere in an expression but in one value?"""
    waiting = [body]
    while waiting:
        node = waiting.pop()
        if node is value or tensor not in node.tensors:
            continue
        if isinstance(node, Read):
            return False
        waiting += node.args
    return True


def _is_made_inside(one: Repeated, kernels: Sequence[XlaKernel], at: Sequence[int]) -> bool:
    """Does a call make what it repeats?"""
    calls = (kernels[n] for n in at)
    return any(isinstance(k, LoopFusion) and not one.value.tensors.isdisjoint(k.inside) for k in calls)


def _nest_of(one: Repeated, number: int) -> Nest:
    """The nest that stores a value in full."""
    return Nest(f"repeated.{number}", tuple(sorted(one.axes)), one.value, one.value.dtype)


def _read_of(nest: Nest) -> Read:
    return read(nest.name, nest.axes, nest.dtype)


def _repeated_by(kernel: LoopFusion) -> dict[Repeated, None]:
    """The values that a kernel repeats along all axes of its points or fewer, large enough for a library."""
    return {
        one: None for nest, body in zip(kernel.roots, kernel.bodies, strict=True)
        if nest.precision is None  # else the product of a vector and a matrix
        for one in _repeated_in(with_inverses(body), frozenset((*nest.axes, *nest.reduced)))
    }  # fmt: skip


@lru_cache(1 << 12)
def _repeated_in(body: Expr, space: frozenset[Axis]) -> tuple[Repeated, ...]:
    found = [Repeated(body, space)] if body.axes < space else []
    found += [Repeated(a, n.axes) for n in postorder(body) if isinstance(n, Apply) for a in n.args if a.axes < n.axes]
    large = [one for one in found if one.value.tensors and volume(one.axes) >= FEWEST]
    return tuple(dict.fromkeys(large))
