"""Scalar expressions: what one point of a nest computes.

Expressions are interned: structurally equal expressions are the same object, so `is` is equality, hashing is by
identity, and a memo keyed by expression visits a shared subexpression once. Build them only with the functions
`const`, `index`, `read` and `apply` (and the shorthands made from `apply`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.ops import OPS


class _Interned:
    """Base of the nodes: a copy of one is itself, and so is what a pickle of it becomes in the process that made it."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Const(_Interned):
    """A literal."""

    value: float | int | bool
    dtype: str
    args: ClassVar[tuple["Expr", ...]] = ()
    axes: ClassVar[frozenset[Axis]] = frozenset()
    tensors: ClassVar[frozenset[str]] = frozenset()

    def __reduce__(self) -> "tuple[Callable[..., Expr], tuple[Any, ...]]":
        return const, (self.value, self.dtype)

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Index(_Interned):
    """The integer position along an axis."""

    axis: Axis
    dtype: str
    axes: frozenset[Axis] = field(init=False)
    args: ClassVar[tuple["Expr", ...]] = ()
    tensors: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", frozenset((self.axis,)))

    def __reduce__(self) -> "tuple[Callable[..., Expr], tuple[Any, ...]]":
        return index, (self.axis, self.dtype)

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Read(_Interned):
    """One element of a tensor: `indices[d]` is the axis that runs over dimension d."""

    tensor: str
    indices: tuple[Axis, ...]
    dtype: str
    axes: frozenset[Axis] = field(init=False)
    tensors: frozenset[str] = field(init=False)
    args: ClassVar[tuple["Expr", ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", frozenset(self.indices))
        object.__setattr__(self, "tensors", frozenset((self.tensor,)))

    def __reduce__(self) -> "tuple[Callable[..., Expr], tuple[Any, ...]]":
        return read, (self.tensor, self.indices, self.dtype)

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Apply(_Interned):
    """A scalar operation of `ir.ops.OPS`. `axes` and `tensors` are those of its whole subtree."""

    op: str
    args: tuple["Expr", ...]
    dtype: str
    axes: frozenset[Axis]
    tensors: frozenset[str]

    def __reduce__(self) -> "tuple[Callable[..., Expr], tuple[Any, ...]]":
        return _applied, (self.op, self.args, self.dtype)

    def __str__(self) -> str:
        return show(self)


Expr = Const | Index | Read | Apply

_interned: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_lock = Lock()


def _intern[T: (Const, Index, Read, Apply)](key: tuple[object, ...], make: Callable[[], T]) -> T:
    node: T | None = _interned.get(key)
    if node is None:
        with _lock:  # another thread may have made it meanwhile
            node = _interned.get(key)
            if node is None:
                node = _interned[key] = make()
    return node


def const(value: float | int | bool, dtype: str) -> Const:
    """A literal of type `dtype`; NaN, infinities and signed zeros are kept apart."""
    value = bool(value) if dtype == "bool" else float(value) if dtype.startswith(("float", "bfloat")) else int(value)
    return _intern(("const", repr(value), dtype), lambda: Const(value, dtype))


def index(axis: Axis, dtype: str = "int32") -> Index:
    return _intern(("index", axis, dtype), lambda: Index(axis, dtype))


def read(tensor: str, indices: Iterable[Axis], dtype: str) -> Read:
    indices = tuple(indices)
    return _intern(("read", tensor, indices, dtype), lambda: Read(tensor, indices, dtype))


def apply(op: str, *args: Expr, dtype: str | None = None) -> Apply:
    """`op(*args)`. dtype defaults to bool for comparisons and else to the type of the last argument."""
    scalar_op = OPS.get(op)
    if scalar_op is None or scalar_op.arity != len(args):
        raise InvalidProgramError(f"no scalar operation {op!r} with {len(args)} arguments")
    result = dtype or ("bool" if scalar_op.kind == "comparison" else args[-1].dtype)
    if op == "bitcast" and dtypes.itemsize_bytes(result) != dtypes.itemsize_bytes(args[0].dtype):
        raise InvalidProgramError(f"the bits of {args[0].dtype} are no {result}: it has another size")

    def make() -> Apply:
        axes = frozenset().union(*(a.axes for a in args))
        tensors = frozenset().union(*(a.tensors for a in args))
        return Apply(op, args, result, axes, tensors)

    return _intern(("apply", op, args, result), make)


def _applied(op: str, args: tuple[Expr, ...], dtype: str) -> Apply:
    return apply(op, *args, dtype=dtype)


def convert(x: Expr, dtype: str) -> Expr:
    return x if x.dtype == dtype else apply("convert", x, dtype=dtype)


def add(a: Expr, b: Expr) -> Expr:
    return apply("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return apply("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return apply("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return apply("div", a, b)


def select(predicate: Expr, on_true: Expr, on_false: Expr) -> Expr:
    return apply("select", predicate, on_true, on_false)


def postorder(*roots: Expr) -> Iterator[Expr]:
    """Every distinct subexpression, arguments before their users. Iterative: programs may be long."""
    done: set[Expr] = set()
    stack: list[Expr] = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node in done:
            continue
        if node.args and (waiting := [arg for arg in node.args if arg not in done]):
            stack.append(node)
            waiting.reverse()
            stack += waiting
        else:
            done.add(node)
            yield node


@lru_cache(1 << 12)
def reads_in(root: Expr) -> tuple[Read, ...]:
    """The distinct reads of an expression, in the order of `postorder`; remembered, as bodies are asked about again and again."""
    return tuple([node for node in postorder(root) if isinstance(node, Read)])


@lru_cache(1 << 12)
def positions_in(root: Expr) -> tuple[Axis, ...]:
    """Returns the axes along which an expression asks for positions, in the order of `postorder`. Answers are remembered."""
    return tuple([node.axis for node in postorder(root) if isinstance(node, Index)])


@lru_cache(1 << 10)
def applied_in(root: Expr) -> frozenset[Apply]:
    """The distinct operations of an expression, of which few are needed again: fewer are remembered than of `reads_in`."""
    return frozenset([node for node in postorder(root) if isinstance(node, Apply)])


def rebuild(
    root: Expr, replace: Callable[[Expr, tuple[Expr, ...]], Expr], done: dict[Expr, Expr] | None = None
) -> Expr:
    """Bottom-up rewriting: `replace(node, new_args)` gives the new node for every distinct subexpression.

    `done` remembers the new nodes for further roots that are rewritten in the same way.
    """
    done = {} if done is None else done
    stack: list[Expr] = [root]
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        if node.args and (waiting := [arg for arg in node.args if arg not in done]):
            waiting.reverse()
            stack += waiting
            continue
        stack.pop()
        done[node] = replace(node, tuple([done[a] for a in node.args]))
    return done[root]


def with_args(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` over other arguments."""
    if isinstance(node, Apply) and args != node.args:
        known: Apply | None = _interned.get(("apply", node.op, args, node.dtype))
        return apply(node.op, *args, dtype=node.dtype) if known is None else known
    return node


def substitute(root: Expr, replacements: Mapping[Expr, Expr]) -> Expr:
    """Replace whole subexpressions, outermost first."""
    return rebuild(root, with_args, dict(replacements)) if replacements else root


class Renamings:
    """Expressions with axes replaced by others: what they have in common is renamed once."""

    def __init__(self) -> None:
        self._done: dict[frozenset[tuple[Axis, Axis]], dict[Expr, Expr]] = {}

    def renamed(self, root: Expr, olds: Iterable[Axis], news: Iterable[Axis]) -> Expr:
        """Returns the expression with each of the old axes replaced by the new one in its place."""
        renaming = {a: b for a, b in zip(olds, news, strict=True) if a != b and a in root.axes}
        return rename_axes(root, renaming, self._done.setdefault(frozenset(renaming.items()), {})) if renaming else root


def rename_axes(root: Expr, renaming: Mapping[Axis, Axis], done: dict[Expr, Expr] | None = None) -> Expr:
    """Returns the expression with some axes replaced by others. done: as of `rebuild`, of the same renaming.

    Bodies with maps inlined are renamed at each place where they are read at other positions: parts without these axes are not
    walked, and an operation reads the same tensors as before.
    """
    if renaming.keys().isdisjoint(root.axes):
        return root
    done = {} if done is None else done
    spaces: dict[frozenset[Axis], frozenset[Axis]] = {}
    stack: list[Expr] = [root]
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        space = spaces.get(node.axes)
        if space is None:
            space = spaces[node.axes] = frozenset([renaming.get(a, a) for a in node.axes])
        if space == node.axes and renaming.keys().isdisjoint(node.axes):
            done[node] = stack.pop()
            continue
        if node.args and (waiting := [arg for arg in node.args if arg not in done]):
            waiting.reverse()
            stack += waiting
            continue
        stack.pop()
        done[node] = _renamed(node, tuple([done[a] for a in node.args]), renaming, space)
    return done[root]


def _renamed(node: Expr, args: tuple[Expr, ...], renaming: Mapping[Axis, Axis], space: frozenset[Axis]) -> Expr:
    """Returns a node over renamed arguments, whose axes are `space`."""
    match node:
        case Apply(op, _, dtype, _, tensors):
            return _intern(("apply", op, args, dtype), lambda: Apply(op, args, dtype, space, tensors))
        case Index(axis, dtype):
            return index(renaming.get(axis, axis), dtype)
        case Read(tensor, indices, dtype):
            return read(tensor, [renaming.get(a, a) for a in indices], dtype)
        case _:
            return node


_PRECEDENCE = {"|": 1, "^": 1, "&": 2, "==": 3, "!=": 3, "<": 3, "<=": 3, ">": 3, ">=": 3,
               "<<": 4, ">>": 4, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6, "**": 8}  # fmt: skip


def show(root: Expr) -> str:
    """One-line text, with the fewest parentheses; of a text that writes shared parts again and again, the middle is left out."""
    text: dict[Expr, tuple[str, int]] = {}

    def wrap(arg: Expr, level: int) -> str:
        s, p = text[arg]
        return s if p >= level else f"({s})"

    for node in postorder(root):
        match node:
            case Const(value, _):
                shown = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
                text[node] = (shown, 10 if not shown.startswith("-") else 7)
            case Index(axis, _):
                text[node] = (axis.name, 10)
            case Read(tensor, indices, _):
                text[node] = (f"{tensor}[{', '.join(a.name for a in indices)}]" if indices else tensor, 10)
            case Apply("neg", (x,)):
                text[node] = (f"-{wrap(x, 7)}", 7)
            case Apply("not", (x,)):
                text[node] = (f"!{wrap(x, 9)}", 9)
            case Apply("convert", (x,), dtype):
                text[node] = (f"{dtype}({text[x][0]})", 10)
            case Apply("bitcast", (x,), dtype):
                text[node] = (f"bitcast({text[x][0]}, {dtype})", 10)
            case Apply(op, args):
                symbol = OPS[op].symbol
                if symbol is None:
                    text[node] = (f"{op}({', '.join(text[a][0] for a in args)})", 10)
                else:
                    level = _PRECEDENCE[symbol]
                    left = level + 1 if symbol == "**" else level
                    text[node] = (f"{wrap(args[0], left)} {symbol} {wrap(args[1], level + 1)}", level)
        written, level = text[node]
        longest = 4096 + 64 * len(text)  # a shared part is written at each use: that may double the text at every level
        if len(written) > longest:
            text[node] = f"{written[: longest // 4]} ... {written[-longest // 4 :]}", level
    return text[root][0]
