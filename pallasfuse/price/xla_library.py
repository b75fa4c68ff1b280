"""What XLA gives a CPU's library as a whole: a reduction, and the maps and products around it, without memory in between.

From a reduction on, XLA's rewriter takes neighbours into one call of the library: producers whose every reader is in it, and a
reader where it is the only one. A product alone is a call of its own. What has few elements (a statistic of few rows, and what
is computed of it) is left to loops, as are operations that the library lacks.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, apply, const, postorder, rebuild, with_args
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, MIN, SUM
from pallasfuse.price.xla_buffers import in_order
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, XlaKernel

TYPES = frozenset({"float32", "float64", "bfloat16"})
_OPERATIONS = frozenset({
    "abs", "ceil", "convert", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "logistic", "neg", "round_even", "rsqrt",
    "sign", "sin", "sqrt", "tanh", "tan", "add", "div", "max", "min", "mul", "pow", "sub", "square", "integer_pow",
})  # fmt: skip
"""What it computes element by element: no choices, comparisons or integers."""
_CONVERTED = frozenset({"int8", "uint8"})
"""Types that it converts from and to, besides."""
_WINDOW = 32
"""The elements of each window of XLA's tree of reductions, as it is compiled for a CPU."""
FEWEST = 4096
"""Elements that an operation reads or makes at least, to be given to the library."""


def takes_reduction(nest: Nest) -> bool:
    """Does the library reduce like that?"""
    if nest.reducer not in (SUM, MAX, MIN) or volume((*nest.axes, *nest.reduced)) < FEWEST:
        return False
    return nest.dtype in TYPES or (nest.dtype in _CONVERTED and nest.reducer != SUM)


def reduces_windows(nest: Nest) -> bool:
    """Does a loop of XLA reduce windows of stored integers, and then windows of what comes out? (Its tree of reductions.)"""
    integers = nest.reducer in (SUM, MAX, MIN) and dtypes.is_integer(nest.dtype) and not takes_reduction(nest)
    return integers and any(a.extent > _WINDOW for a in nest.reduced)


def takes_all(body: Expr, along: frozenset[Axis] | None = None) -> bool:
    """Does the library have every operation of an expression? along: only of those that vary along one of these axes."""
    if along is None:
        return _takes_everything(body)
    return all(_takes_operation(n) for n in postorder(body) if isinstance(n, Apply) and not along.isdisjoint(n.axes))


@lru_cache(1 << 12)
def _takes_everything(body: Expr) -> bool:
    return all(_takes_operation(n) for n in postorder(body) if isinstance(n, Apply))


def _takes_operation(node: Apply) -> bool:
    converts = _CONVERTED if node.op == "convert" else frozenset()
    if node.op not in _OPERATIONS or node.dtype not in TYPES | converts:
        return False
    if any(a.dtype not in TYPES | converts for a in node.args if not isinstance(a, Const)):
        return False
    return all(volume(axes) >= FEWEST for axes in _spaces(node))


def _spaces(node: Apply) -> list[frozenset[Axis]]:
    """The axes of the operations that an operation is: a division by what varies along fewer axes is a product with its inverse."""
    inverse = inverted(node)
    return [node.axes] if inverse is None else [node.axes, inverse.axes]


def inverted(node: Expr) -> Expr | None:
    """The divisor that XLA inverts, since it is the same along some axes of the quotient."""
    if isinstance(node, Apply) and node.op == "div" and not isinstance(node.args[1], Const):
        divisor = node.args[1]
        return divisor if divisor.axes < node.axes else None
    return None


@lru_cache(1 << 12)
def with_inverses(body: Expr) -> Expr:
    """Returns what XLA computes: a product with the inverse instead of a division by what varies along fewer axes."""

    def inverse(node: Expr, args: tuple[Expr, ...]) -> Expr:
        divisor = inverted(node)
        if divisor is None or not isinstance(node, Apply):
            return with_args(node, args)
        one = const(1.0, divisor.dtype)
        return apply("mul", args[0], apply("div", one, args[1]), dtype=node.dtype)

    return rebuild(body, inverse) if any(inverted(n) is not None for n in postorder(body)) else body


# --- calls: XLA gives the library several operations at once


def joined_calls[Member: Hashable](
    inner: Sequence[str], maker: Mapping[str, Member], readers: Mapping[str, Set[Member]]
) -> Callable[[Member], Member]:
    """Returns the function that names the call an operation is in, after one of those in the call.

    A call takes what makes an operand if all that read the operand are in the call. inner: the tensors that a call may keep
    inside, the last ones first.
    """
    above: dict[Member, Member] = {}

    def call(member: Member) -> Member:
        while (up := above.get(member, member)) != member:
            above[member] = member = above.get(up, up)
        return member

    changed = True
    while changed:
        changed = False
        for name in inner:
            calls = {call(r) for r in readers[name]}
            at = call(maker[name])
            if len(calls) == 1 and at not in calls:
                above[at] = calls.pop()
                changed = True
    return call


# --- the calls of a program


def together(kernels: Sequence[XlaKernel], stored: frozenset[str]) -> list[XlaKernel]:
    """Returns the kernels in order, of which those in one call of the library pass on nothing through memory.

    stored: tensors that have to be in memory.
    """
    kernels = in_order(kernels)
    maker = {name: n for n, k in enumerate(kernels) for name in k.makes}
    readers: dict[str, set[int]] = {name: set() for name in maker}
    for n, kernel in enumerate(kernels):
        for name in kernel.sources.keys() & maker.keys():
            readers[name].add(n)
    taken = [_takes(k) for k in kernels]
    copied = {c.tensor for k in kernels if isinstance(k, LibraryProduct) for c in (*k.copies, *k.turned)}
    inner = [
        name for name, at in reversed(maker.items())
        if name not in stored and name not in copied and readers[name] and taken[at] and all(taken[r] for r in readers[name])
    ]  # fmt: skip
    call = joined_calls(inner, maker, readers)
    reducing = {call(n) for n, k in enumerate(kernels) if taken[n] and isinstance(k, LoopFusion) and k.reduced}
    inside = frozenset(
        t for t in inner if call(maker[t]) in reducing and {call(r) for r in readers[t]} == {call(maker[t])}
    )
    by_library = {t for t, at in maker.items() if call(at) in reducing}
    counted: set[int] = set()
    found: list[XlaKernel] = []
    for n, kernel in enumerate(kernels):
        own = call(n)
        if own in reducing and isinstance(kernel, LoopFusion):
            first = own not in counted
            found.append(replace(kernel, inside=inside, calls=int(first), call=own + 1))
            counted.add(own)
        else:
            found.append(_product(kernel, inside, by_library) if isinstance(kernel, LibraryProduct) else kernel)
    return found


def _product(kernel: LibraryProduct, inside: frozenset[str], by_library: Collection[str]) -> LibraryProduct:
    """A product without what never is in memory, and with copies of what the library has made in the order of the program."""
    left = tuple((t, 0.0 if t in inside else b) for t, b in kernel.operands)
    written = 0.0 if kernel.name in inside else kernel.written_bytes
    known = {c.tensor for c in kernel.copies}
    turned = tuple(c for c in kernel.turned if c.tensor in by_library and c.tensor not in known)
    copies = (*kernel.copies, *turned)
    return replace(kernel, operands=left, read_bytes=sum(b for _, b in left), written_bytes=written, copies=copies)


def _takes(kernel: XlaKernel) -> bool:
    """Does the library compute all that a kernel does?"""
    if isinstance(kernel, LibraryProduct):
        return kernel.operand_dtype in TYPES and not kernel.in_columns
    if not isinstance(kernel, LoopFusion) or len(kernel.roots) > 1:
        return False
    (nest,) = kernel.roots
    return (not nest.is_reduction or takes_reduction(nest)) and takes_all(kernel.bodies[0])
