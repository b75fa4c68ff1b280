"""XLA stores some values in full, repeated along axes, for the calls of its library on a CPU: this finds which.

To repeat is an operation of its own in XLA, like any map of a library: a call takes it in if all that read its result are in the
call. A value that two calls read, or a call and a loop, is stored in full for the calls, while loops repeat it for themselves.
And where a result of a call is only read through it, it is the last thing that the call does: what is stored is the repeated
result. (The functions of `tests/price/test_xla_repeats.py`, as they are compiled for a CPU. Not seen: what operations without
a nest read, like that for the place of a maximum.)
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, postorder, read, rename_axes
from pallasfuse.ir.loop_program import Nest
from pallasfuse.price.xla_forms import LoopFusion, Place, XlaKernel
from pallasfuse.price.xla_library import FEWEST, takes_all, with_inverses
from pallasfuse.price.xla_products import places
from pallasfuse.price.xla_reductions import order_of


@dataclass(frozen=True, slots=True)
class Repeated:
    """A value that is the same along some of the axes of an operation that takes it, whatever these are called."""

    value: Expr
    """Over axes that are named by their places in the operation."""
    extents: tuple[int, ...]
    """Those of the operation."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """A kernel that repeats a value, and its place among the kernels."""

    at: int
    kernel: LoopFusion
    value: Expr
    """The value as it stands in the kernel."""


def with_repeated(kernels: Sequence[XlaKernel], stored: Collection[str]) -> list[XlaKernel]:
    """Returns the kernels of a program on a CPU, with those that repeat values, and what these store.

    kernels: as they are joined to calls. stored: tensors that have to be in memory.
    """
    calls = {t: k.call for k in kernels if isinstance(k, LoopFusion) and k.by_library for t in k.makes}
    if not calls:
        return list(kernels)
    readers = _readers(kernels)
    ends = _ends(kernels, readers, stored)
    ended = frozenset[str]().union(*ends.values())
    outside: dict[int, tuple[set[Expr], dict[Place, float]]] = {}
    """For each kernel that reads repeated values from memory, these as they stand there, and as they are read."""
    added: list[XlaKernel] = []
    for one, of in readers.items():
        last = ends.get(one, frozenset())
        by_call = [r for r in of if r.kernel.by_library]
        if not last and (not by_call or len({r.kernel.call for r in of}) < 2):
            continue
        nest = _nest_of(one, f"repeated.{len(added)}", is_computed=not last or not isinstance(one.value, Read))
        for reader in of if last else by_call:
            values, reads = outside.setdefault(reader.at, (set(), {}))
            values.add(reader.value)
            reads |= dict(places(read(nest.name, nest.axes, nest.dtype)))
        call = max((calls[t] for t in last), default=0)
        added.append(LoopFusion([nest], [one.value], dict(places(one.value)), inside=last, call=call))
    found = list(kernels)
    for at, kernel in enumerate(kernels):
        if isinstance(kernel, LoopFusion) and (at in outside or not ended.isdisjoint(kernel.makes)):
            values, reads = outside.get(at, (set(), {}))
            beside = _places_beside(kernel, values) if values else kernel.reads.keys()
            kept = {place: moved for place, moved in kernel.reads.items() if place in beside}
            found[at] = replace(kernel, reads=kept | reads, inside=kernel.inside | ended)
    return [*found, *added]


def _readers(kernels: Sequence[XlaKernel]) -> dict[Repeated, list[_Reader]]:
    """Finds the values that kernels repeat, but for those that are computed from nothing, which XLA computes again."""
    loops = [(at, k) for at, k in enumerate(kernels) if isinstance(k, LoopFusion)]
    constant = {n.name for _, k in loops for n, body in zip(k.roots, k.bodies, strict=True) if not body.tensors}
    found: dict[Repeated, list[_Reader]] = {}
    for at, kernel in loops:
        for nest, body in zip(kernel.roots, kernel.bodies, strict=True):
            if nest.precision is None:  # else the product of a vector and a matrix
                for one, value in _repeated_in(with_inverses(body), (*nest.axes, *nest.reduced)):
                    if not value.tensors <= constant:
                        found.setdefault(one, []).append(_Reader(at, kernel, value))
    return found


@lru_cache(1 << 12)
def _repeated_in(body: Expr, space: tuple[Axis, ...]) -> tuple[tuple[Repeated, Expr], ...]:
    """Finds the values that an expression repeats for operations that are large enough for a library, and as they stand in it.

    space: the axes of the results and those that are reduced.
    """
    order = order_of(space, body)
    found = [(a, n.axes) for n in postorder(body) if isinstance(n, Apply) for a in n.args if a.axes < n.axes]
    large = dict.fromkeys((v, axes) for v, axes in found if v.tensors and volume(axes) >= FEWEST)
    return tuple((_named_by_place(v, tuple(a for a in order if a in axes)), v) for v, axes in large)


def _named_by_place(value: Expr, axes: tuple[Axis, ...]) -> Repeated:
    """Returns a value that an operation over some axes, in the order of its result, repeats."""
    names = {a: Axis(str(n), a.extent) for n, a in enumerate(axes)}
    return Repeated(rename_axes(value, names), tuple(a.extent for a in axes))


def _ends(
    kernels: Sequence[XlaKernel], readers: Mapping[Repeated, Sequence[_Reader]], stored: Collection[str]
) -> dict[Repeated, frozenset[str]]:  # fmt: skip
    """Finds the repeated values with which calls end, and the tensors that calls make for these, which nothing else reads."""
    users: dict[str, set[int]] = {}
    for n, kernel in enumerate(kernels):
        for tensor in kernel.sources:
            users.setdefault(tensor, set()).add(n)
    made = {t for k in kernels for t in _made_for_others(k) if t in users and t not in stored}
    of: dict[str, list[Repeated]] = {}
    for one in readers:
        for tensor in made & one.value.tensors:
            of.setdefault(tensor, []).append(one)
    found: dict[Repeated, frozenset[str]] = {}
    for tensor, (only, *others) in of.items():
        if not others and takes_all(only.value) and users[tensor] == {r.at for r in readers[only]}:
            found[only] = found.get(only, frozenset()) | {tensor}
    return found


def _made_for_others(kernel: XlaKernel) -> Iterator[str]:
    """Yields what a call makes and does not keep inside."""
    if isinstance(kernel, LoopFusion) and kernel.by_library:
        yield from (n.name for n in kernel.roots if n.name not in kernel.inside)


def _places_beside(kernel: LoopFusion, values: Collection[Expr]) -> set[Place]:
    """Returns the places that a kernel reads for something else than some values."""
    waiting, seen = [with_inverses(b) for b in kernel.bodies], set(values)
    found: set[Place] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.args
            if isinstance(node, Read):
                found.add((node.tensor, node.indices))
    return found


def _nest_of(one: Repeated, name: str, *, is_computed: bool) -> Nest:
    """Returns the nest that stores a value in full: in single precision, in which the library computes what has half of it.

    is_computed: else it is what a call has reduced, which has the type of that.
    """
    axes = tuple(Axis(str(n), extent) for n, extent in enumerate(one.extents))
    is_wider = is_computed and one.value.dtype in dtypes.HALF
    return Nest(name, axes, one.value, "float32" if is_wider else one.value.dtype)
