"""Schedules as trees of loops over ranges of named axes, with nests at the leaves (MCFuser, section 3.1).

    Tree   = Kernel+                                        # in launch order; between kernels: tensors in global memory
    Kernel = name '{' Node* '}' [ '[' switch+ ']' ]
    Node   = Loop | nest | '+' nest | tensor '!' memory     # do it; merge its partial states; keep a buffer of it
    Loop   = axis (':' tile | '/' shares) ['@' level] ['~' slots] ['from' tile] ['until' tile] ( Loop | '(' Node* ')' )
    level  = time | mesh | grid | cluster | group           # spatial; without one: serial
    memory = shared | global
    switch = persistent | ping_pong | software_pipelined | prefetch_wait | data_bounds | (warps | grid_swizzle) '=' number

Children run in order. Loads, stores, buffers, carried values, frames and barriers are derived from the tree, never written in it.
Example, a chain of two products: `chain { m:64@grid h:128@grid n:128~2 ( k:64 ( C ) E ) }`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, assert_never, get_args

from pallasfuse.errors import ScheduleError

Level = Literal["time", "mesh", "grid", "cluster", "group", "serial"]
"""The place where the trips of a loop run, the outermost first: one after the other on a stream, on devices, in blocks, in the
blocks of a cluster, in warpgroups, or one after the other inside of a block."""
LEVELS: tuple[Level, ...] = get_args(Level)
MemorySpace = Literal["shared", "global"]


@dataclass(frozen=True, slots=True)
class RangeLoop:
    """A loop over pieces of an axis: of `size` positions each, or, where `shares` is true, `size` equal shares of it.

    It covers the piece of the next loop around it over the same axis, or else all of the axis.
    """

    axis: str
    size: int
    body: tuple["Node", ...]
    level: Level = "serial"
    shares: bool = False
    slots: int = 1
    """The number of tiles of what the loop loads that are in memory at a time: those to come are on their way."""
    begin: int = 0
    """The number of the first tile that it runs over: those before it are of another loop."""
    end: int = 0
    """The number of the tile before which it ends; 0: it runs to the last one."""


@dataclass(frozen=True, slots=True)
class Do:
    """Computes a nest on the pieces of the loops that are open."""

    nest: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Joins the partial states of a reduction, of the innermost level at which they are still apart."""

    nest: str


@dataclass(frozen=True, slots=True)
class Keep:
    """A buffer of a tensor in a memory, from here to the end of the body that it stands in."""

    tensor: str
    memory: MemorySpace


Node = RangeLoop | Do | Merge | Keep


@dataclass(frozen=True, slots=True)
class Launch:
    """Switches of a kernel that change no value, only how the machine runs it."""

    persistent: bool = False
    """As many blocks are started as run at a time; each goes on to the next one while its last results leave."""
    ping_pong: bool = False
    """Two warpgroups take turns: one computes elementwise while the other multiplies."""
    software_pipelined: bool = False
    """The products that a trip begins with are computed together with those that the trip before ends with."""
    prefetch_wait: bool = False
    """The operands that the next trip begins with are awaited while the last products of a trip run."""
    data_bounds: bool = False
    """Loops are bounded by what masks over data leave, which a pass over the masks finds before the kernel runs."""
    warps: int = 0
    """Warps of a block; 0: as the target likes."""
    grid_swizzle: int = 1
    """The number of blocks of the other grid axes that run side by side for each position of the last one."""


@dataclass(frozen=True, slots=True)
class TreeKernel:
    """One kernel: what each block runs, and how it is launched."""

    name: str
    body: tuple[Node, ...]
    launch: Launch = Launch()

    def __str__(self) -> str:
        return show((self,))


Tree = tuple[TreeKernel, ...]


def walk(body: Iterable[Node], around: tuple[RangeLoop, ...] = ()) -> Iterator[tuple[tuple[RangeLoop, ...], Node]]:
    """Yields every node in order with the loops around it, the outermost first; a loop comes before its body."""
    found: list[tuple[tuple[RangeLoop, ...], Node]] = []
    _walk(body, around, found)
    return iter(found)


def _walk(body: Iterable[Node], around: tuple[RangeLoop, ...], found: list[tuple[tuple[RangeLoop, ...], Node]]) -> None:
    for node in body:
        found.append((around, node))
        if isinstance(node, RangeLoop):
            _walk(node.body, (*around, node), found)


def short_sizes(tree: Tree, extents: Mapping[str, int]) -> dict[tuple[str, int], int]:
    """Returns small sizes for the tiles of a tree, by axis and size, in which each still divides those that it divides."""
    sizes: dict[str, set[int]] = {}
    for kernel in tree:
        for _, node in walk(kernel.body):
            if isinstance(node, RangeLoop) and not node.shares and 1 < node.size < extents[node.axis]:
                sizes.setdefault(node.axis, set()).add(node.size)
    return {(axis, size): 2 << rank for axis, found in sizes.items() for rank, size in enumerate(sorted(found))}


def shortened(tree: Tree, extents: Mapping[str, int], short: Mapping[str, int]) -> Tree:
    """Returns the tree for axes of other extents, with as many levels of tiles; at most two shares.

    Where each body ran in as many blocks of a cluster as the others do, they need not any more.
    """
    sizes = short_sizes(tree, extents)
    largest = {axis: size for (axis, _), size in sorted(sizes.items(), key=lambda of: of[1])}

    def node(of: Node) -> Node:
        if not isinstance(of, RangeLoop):
            return of
        unit = largest.get(of.axis, 1)  # the tiles inside of it must divide a tile that holds all of the axis
        whole = -(-short[of.axis] // unit) * unit if of.size > 1 else 1
        size = min(of.size, 2) if of.shares else sizes.get((of.axis, of.size), whole)
        return replace(of, size=size, body=tuple(map(node, of.body)))

    return tuple(replace(k, body=tuple(map(node, k.body))) for k in tree)


def renamed(
    tree: Tree, axes: Mapping[str, str], nests: Mapping[str, str], kept: Mapping[str, str] | None = None
) -> Tree:
    """Returns the tree with other names for some of its axes, and for some of its nests and tensors.

    kept: names of what buffers are kept of; None: those of nests.
    """
    tensors = nests if kept is None else kept

    def body(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(map(node, nodes))

    def node(of: Node) -> Node:
        match of:
            case Do(nest):
                return Do(nests.get(nest, nest))
            case Merge(nest):
                return Merge(nests.get(nest, nest))
            case Keep(tensor, memory):
                return Keep(tensors.get(tensor, tensor), memory)
            case RangeLoop():
                return replace(of, axis=axes.get(of.axis, of.axis), body=body(of.body))
            case _:
                assert_never(of)

    return tuple(replace(k, body=body(k.body)) for k in tree)


# --- text


def show(tree: Tree) -> str:
    """Returns the tree as a tiling expression, which `parse` reads back."""
    return "\n".join(f"{k.name} {{ {' '.join(map(_node, k.body))} }}{_launch(k.launch)}" for k in tree)


def _node(node: Node) -> str:
    match node:
        case Do(nest):
            return nest
        case Merge(nest):
            return f"+{nest}"
        case Keep(tensor, memory):
            return f"{tensor}!{memory}"
        case RangeLoop():
            head = f"{node.axis}{'/' if node.shares else ':'}{node.size}"
            head += "" if node.level == "serial" else f"@{node.level}"
            head += f"~{node.slots}" if node.slots > 1 else ""
            head += (f" from {node.begin}" if node.begin else "") + (f" until {node.end}" if node.end else "")
            if len(node.body) == 1 and isinstance(node.body[0], RangeLoop):
                return f"{head} {_node(node.body[0])}"
            return f"{head} ( {' '.join(map(_node, node.body))} )"
        case _:
            assert_never(node)


def _launch(launch: Launch) -> str:
    found = []
    for f in fields(launch):
        value = getattr(launch, f.name)
        if value != f.default:
            found.append(f.name if value is True else f"{f.name}={value}")
    return f" [{' '.join(found)}]" if found else ""


_DEEPEST = 100
"""Loops in each other beyond which a text is no schedule of a program."""
_LONGEST = 15
"""The digits of the largest number that is read."""
_TOKEN = re.compile(r"\s*(?:([A-Za-z_][\w.]*)|(\d+)|([:/@~!+=(){}\[\]])|(\S))")
_SWITCHES = {f.name: type(f.default) for f in fields(Launch)}


def parse(text: str) -> Tree:
    """Reads a tiling expression.

    Raises:
      ScheduleError: saying what was expected, and where.
    """
    return _Parser(text).tree()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(m.group().strip(), m.end()) for m in _TOKEN.finditer(text) if m.group().strip()]
        self.at = 0
        self.depth = 0
        """The loops around what is being read."""

    def fail(self, wanted: str) -> ScheduleError:
        end = self.tokens[self.at - 1][1] if self.at else 0
        found = repr(self._peek()[:60]) if self._peek() else "the end"
        return ScheduleError(
            f"the schedule has {found} where {wanted} should stand, after {self.text[:end].strip()[-60:]!r}"
        )

    def _peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][0] if self.at + ahead < len(self.tokens) else ""

    def _take(self, token: str) -> None:
        if self._peek() != token:
            raise self.fail(repr(token))
        self.at += 1

    def _taken(self, token: str) -> bool:
        if self._peek() == token:
            self.at += 1
            return True
        return False

    def _name(self, wanted: str) -> str:
        token = self._peek()
        if not re.fullmatch(r"[A-Za-z_][\w.]*", token):
            raise self.fail(wanted)
        self.at += 1
        return token

    def _number(self, wanted: str) -> int:
        token = self._peek()
        if not token.isdecimal() or len(token) > _LONGEST or int(token) < 1:
            raise self.fail(f"{wanted}, a positive number of at most {_LONGEST} digits,")
        self.at += 1
        return int(token)

    def tree(self) -> Tree:
        kernels = [self._kernel()]
        while self._peek():
            kernels.append(self._kernel())
        return tuple(kernels)

    def _kernel(self) -> TreeKernel:
        name = self._name("the name of a kernel")
        self._take("{")
        body = self._body("}")
        return TreeKernel(name, body, self._switches() if self._taken("[") else Launch())

    def _switches(self) -> Launch:
        found: dict[str, bool | int] = {}
        while not self._taken("]"):
            name = self._peek()
            if name not in _SWITCHES:
                raise self.fail(f"one of {', '.join(_SWITCHES)}")
            self.at += 1
            if _SWITCHES[name] is bool:
                found[name] = True
            else:
                self._take("=")
                found[name] = self._number(name)
        return Launch(**found)  # type: ignore[arg-type]

    def _body(self, end: str) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while not self._taken(end):
            nodes.append(self._node())
        return tuple(nodes)

    def _node(self) -> Node:
        if self._taken("+"):
            return Merge(self._name("the name of a reduction"))
        name = self._name("a loop, a nest, '+' or a closing bracket")
        if self._taken("!"):
            memory = self._name("shared or global")
            if memory not in get_args(MemorySpace):
                self.at -= 1
                raise self.fail("shared or global")
            return Keep(name, memory)  # type: ignore[arg-type]
        if self._peek() in (":", "/"):
            return self._loop(name)
        return Do(name)

    def _loop(self, axis: str) -> RangeLoop:
        if self.depth == _DEEPEST:
            raise ScheduleError(f"the schedule has more than {_DEEPEST} loops in each other")
        self.depth += 1
        shares = self._peek() == "/"
        self.at += 1
        size = self._number("the number of shares" if shares else "the size of a tile")
        level: Level = "serial"
        if self._taken("@"):
            token = self._peek()
            if token not in LEVELS[:-1]:
                raise self.fail(f"one of the levels {', '.join(LEVELS[:-1])}")
            self.at += 1
            level = token  # type: ignore[assignment]
        slots = self._number("the number of slots") if self._taken("~") else 1
        begin, end = (self._tile(word) for word in ("from", "until"))
        if self._taken("("):
            body = self._body(")")
        elif self._peek(1) in (":", "/"):
            body = (self._loop(self._name("an axis")),)
        else:
            raise self.fail("'(' or another loop")
        self.depth -= 1
        return RangeLoop(axis, size, body, level, shares, slots, begin, end)

    def _tile(self, word: str) -> int:
        if self._peek() != word or not self._peek(1).isdecimal():
            return 0
        self.at += 1
        return self._number("the number of a tile")
