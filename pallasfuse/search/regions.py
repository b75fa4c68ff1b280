"""The parts of a program that are sums and products, as terms of an e-graph.

A nest is algebraic if its body has only products, sums, differences, quotients and literals, and its reducer is a sum. What is new
is stored in the type of the root, so that nothing is rounded more than it was: what has a wider type is a leaf.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import assert_never

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder, read, rename_axes, substitute
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, Source
from pallasfuse.ir.reducers import SUM
from pallasfuse.search.egraph import EGraph, copies
from pallasfuse.search.orders import is_scaling

_OPERATIONS = frozenset({"mul", "add", "sub", "neg", "div", "square", "convert"})
_TYPES = frozenset({"float32", "bfloat16", "float64"})
"""Types of a range so large that products in another order stay in it; those of float16 may not."""
_MOST_NESTS = 24
"""Of a term; what is further away is a leaf."""
_MUCH_LARGER = 4
"""An operand is so many times as large as the result, where it may be worth it to scale the latter."""
_MOST_COMBINED = 16
"""The elements of a map that are looked at."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The tensors of a program that no operand decides about.

    deltas: of two axes, true or one where their positions are equal, and false or zero elsewhere. zeros: zero everywhere.
    """

    deltas: frozenset[str]
    zeros: frozenset[str]

    def is_zero(self, node: Expr) -> bool:
        return (isinstance(node, Const) and node.value == 0) or (isinstance(node, Read) and node.tensor in self.zeros)


@dataclass
class _Positions:
    """Which tensors are the position along one of their axes."""

    axes: Mapping[str, tuple[Axis, ...]]
    along: dict[str, Axis] = field(default_factory=dict)

    def of(self, node: Expr) -> Axis | None:
        """The axis whose position an expression is."""
        match node:
            case Index(axis, dtype):
                return axis if _holds(dtype, axis.extent - 1) else None
            case Read(tensor, indices, _) if tensor in self.along:
                return dict(zip(self.axes[tensor], indices, strict=True)).get(self.along[tensor])
            case Apply("add", (x, Const(value=0))) | Apply("convert", (x,)):
                along = self.of(x)
                return along if along is not None and _holds(node.dtype, along.extent - 1) else None
        return None


def _holds(dtype: str, number: int) -> bool:
    """Are all numbers up to this one different in a type?"""
    return dtypes.is_integer(dtype) and number < 1 << 8 * dtypes.itemsize_bytes(dtype) - 1


def fixed_in(program: LoopProgram) -> Fixed:
    """The deltas and zeros of a program."""
    positions = _Positions({d.name: d.axes for d in program.definitions()})
    deltas, zeros = set[str](), set[str]()
    for nest in program.nests:
        if not isinstance(nest, Nest) or nest.is_reduction:
            continue
        along = positions.of(nest.body)
        positions.along |= {} if along is None else {nest.name: along}
        match nest.body:
            case Apply("eq", (a, b)) if len(nest.axes) == 2 and {positions.of(a), positions.of(b)} == set(nest.axes):
                deltas.add(nest.name)
            case Read(tensor) | Apply("convert", (Read(tensor),)) if tensor in deltas and len(nest.axes) == 2:
                deltas.add(nest.name)
            case Read(tensor) | Apply("convert", (Read(tensor),)) if tensor in zeros:
                zeros.add(nest.name)
            case Const(value=0):
                zeros.add(nest.name)
    return Fixed(frozenset(deltas), frozenset(zeros))


def is_algebraic(nest: Nest | External, fixed: Fixed) -> bool:
    """Is a nest made of sums and products only?"""
    if isinstance(nest, External) or nest.picks or nest.dtype not in _TYPES:
        return False
    if nest.reducer not in (None, SUM):
        return False
    return all(_is_algebraic_node(n, fixed) for n in postorder(nest.body))


def _is_algebraic_node(node: Expr, fixed: Fixed) -> bool:
    match node:
        case Read(tensor, _, "bool"):
            return tensor in fixed.deltas
        case Apply("select", (Read(), _, otherwise)):
            return fixed.is_zero(otherwise)
        case Index():
            return False
        case Read(_, indices, dtype):
            return dtypes.is_float(dtype) and len(set(indices)) == len(indices)
        case Const(value, dtype):
            return dtypes.is_float(dtype) and abs(value) < float("inf")
        case Apply("convert", (x,), dtype):
            return dtypes.is_exact_cast(x.dtype, dtype)
        case Apply(op):
            return op in _OPERATIONS
        case _:
            assert_never(node)


@dataclass(frozen=True, slots=True)
class Region:
    """One value of a program that sums and products lead to."""

    root: Nest
    nests: tuple[Nest, ...]
    """All that are between the leaves and the root, which is the last."""
    fixed: tuple[Nest, ...] = ()
    """The nests that make the deltas and zeros among the leaves."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(n.name for n in self.nests)


def regions(program: LoopProgram) -> list[Region]:
    """The regions of a program in which another order may be cheaper. No two nests of the program are equal (`without_copies`)."""
    fixed = fixed_in(program)
    deltas = fixed.deltas
    algebraic = {n.name: n for n in program.nests if isinstance(n, Nest) and is_algebraic(n, fixed)}
    factors: dict[str, tuple[Expr, ...]] = {}
    for name, made_by in algebraic.items():
        factors[name] = _combined(made_by, algebraic, factors)
    computed = {n.name for n in program.nests if isinstance(n, Nest) and not n.is_reduction}
    made = _made_of(algebraic, factors, deltas) | _scaled(algebraic, factors, computed)
    inside = {name: nest for name, nest in algebraic.items() if name in made and name not in deltas}
    copied = {name: nest for name, nest in algebraic.items() if isinstance(nest.body, Read) and name not in deltas}
    seen_through = {**copied, **inside}
    read_outside: set[str] = set(program.outputs)
    read_inside: set[str] = set()
    for nest in program.nests:
        for name in nest.reads & inside.keys():
            expands = nest.name in inside and dtypes.is_exact_cast(inside[name].dtype, nest.dtype)
            (read_inside if expands else read_outside).add(name)
    order = {name: n for n, name in enumerate(algebraic)}
    roots = {name for name in inside if name in read_outside or name not in read_inside}
    # what is read in several places is computed once: it is a root, too
    reads = Counter(n.tensor for nest in algebraic.values() for n in postorder(nest.body) if isinstance(n, Read))
    roots |= {name for name, nest in inside.items() if nest.is_reduction and reads[name] > 1}
    while True:
        behind = {name: _behind(inside[name], seen_through, order, stop=roots) for name in roots}
        uses = Counter(nest.name for nests in behind.values() for nest in nests)
        shared = {name for name in inside if uses[name] > 1} - roots
        if not shared:
            break
        roots |= shared
    found = []
    for name in sorted(roots, key=order.__getitem__):
        nests = behind[name]
        if sum(n.name in inside for n in nests) > 1:
            found.append(Region(inside[name], nests, _makers(program, nests, deltas | fixed.zeros)))
    return found


def without_copies(program: LoopProgram) -> LoopProgram:
    """The program without nests that compute what an earlier one does: XLA computes it once."""
    first: dict[object, Nest] = {}
    same: dict[str, str] = {}
    nests: list[Nest | External] = []
    for nest in program.nests:
        if isinstance(nest, External):
            nests.append(replace(nest, operands=tuple(same.get(t, t) for t in nest.operands)))
            continue
        reads = (n for n in postorder(nest.body) if isinstance(n, Read) and n.tensor in same)
        body = substitute(nest.body, {n: read(same[n.tensor], n.indices, n.dtype) for n in reads})
        now = replace(nest, body=body)
        original = first.setdefault(replace(now, name="", source=Source()), now)
        if original is now:
            nests.append(now)
        else:
            same[nest.name] = original.name
    outputs = tuple(dict.fromkeys(same.get(t, t) for t in program.outputs))
    return LoopProgram(program.inputs, tuple(nests), outputs)


def _makers(program: LoopProgram, nests: Sequence[Nest], fixed: Set[str]) -> tuple[Nest, ...]:
    """The nests that make those of some tensors that nests read."""
    wanted = {t for n in nests for t in n.reads} & fixed
    found: list[Nest] = []
    for nest in reversed(program.nests):
        if nest.name in wanted and isinstance(nest, Nest):
            found.append(nest)
            wanted |= nest.reads
    return tuple(reversed(found))


def _made_of(algebraic: Mapping[str, Nest], factors: Mapping[str, tuple[Expr, ...]], deltas: Set[str]) -> set[str]:
    """The contractions, the maps that are larger than all that they combine, those with a delta, and what is computed from them.

    What is computed from none is as good as an operand: it has no other order.
    """
    found: set[str] = set()
    for name, nest in algebraic.items():
        own = factors[name]
        largest = max((volume(r.axes) for r in own), default=0)
        notable = len(own) > 1 and (nest.is_reduction or volume(nest.axes) > largest)
        if notable or not deltas.isdisjoint(nest.reads) or not found.isdisjoint(nest.reads):
            found.add(name)
    return found


def _scaled(algebraic: Mapping[str, Nest], factors: Mapping[str, tuple[Expr, ...]], computed: Set[str]) -> set[str]:
    """The maps that only scale the much larger operand of a contraction: its result may be scaled instead.

    computed: maps. What is computed element by element is stored for the contraction anyway, and may be scaled where it is.
    """
    found: set[str] = set()
    for nest in algebraic.values():
        waiting = list(nest.reads) if nest.is_reduction and len(nest.reads) > 1 else []
        while waiting:
            maker = algebraic.get(waiting.pop())
            if maker is None or maker.is_reduction or volume(maker.axes) < _MUCH_LARGER * volume(nest.axes):
                continue
            reads = [n for n in factors[maker.name] if isinstance(n, Read)]
            largest = max(reads, key=lambda r: volume(r.axes), default=None)
            if largest is None or largest.tensor in computed:
                continue
            scales = is_scaling(maker)
            if scales or isinstance(maker.body, Read):
                found |= {maker.name} if scales else set()
                waiting += maker.reads
    return found


def _combined(nest: Nest, algebraic: Mapping[str, Nest], factors: Mapping[str, tuple[Expr, ...]]) -> tuple[Expr, ...]:
    """The different elements that a nest multiplies or adds, seen through the maps between."""
    found: dict[Expr, None] = {}
    for node in postorder(nest.body):
        if isinstance(node, Read):
            maker = algebraic.get(node.tensor)
            if maker is None or maker.is_reduction:
                found[node] = None
            else:
                renaming = dict(zip(maker.axes, node.indices, strict=True))
                found |= dict.fromkeys(rename_axes(f, renaming) for f in factors[maker.name])
    return tuple(found)[:_MOST_COMBINED]


def _behind(root: Nest, inside: Mapping[str, Nest], order: Mapping[str, int], stop: Set[str]) -> tuple[Nest, ...]:
    """The nests that a root is computed from, the nearest of them, in the order of the program; none of a wider type, and none of
    other roots."""
    chosen, waiting = {root.name}, [root]
    while waiting and len(chosen) < _MOST_NESTS:
        nest = waiting.pop(0)
        for name in sorted((nest.reads & inside.keys()) - chosen - stop, key=order.__getitem__):
            if dtypes.is_exact_cast(inside[name].dtype, root.dtype) and len(chosen) < _MOST_NESTS:
                chosen.add(name)
                waiting.append(inside[name])
    return tuple(inside[n] for n in sorted(chosen, key=order.__getitem__))


@dataclass
class Terms:
    """Adds the values of a region's nests to a graph."""

    graph: EGraph
    nests: Mapping[str, Nest]
    _known: dict[tuple[str, tuple[Axis, ...]], int] = field(default_factory=dict)
    _taken: set[Axis] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._taken |= {a for nest in self.nests.values() for a in nest.axes}

    def value(self, name: str, indices: tuple[Axis, ...]) -> int:
        """The class of a nest's element at some positions."""
        key = name, indices
        if key not in self._known:
            nest = self.nests[name]
            renaming = {a: b for a, b in zip(nest.axes, indices, strict=True) if a != b}
            # every sum is over axes of its own, so that sums can be merged as they are
            own = copies(frozenset(nest.reduced) & self._taken, self._taken | set(nest.reduced))
            self._taken |= {own.get(a, a) for a in nest.reduced}
            renaming |= own
            body = self._expression(nest.body, renaming)
            self._known[key] = self.graph.over([renaming.get(a, a) for a in nest.reduced], body)
        return self._known[key]

    def stored(self, name: str) -> int:
        """The class of a nest's element where it is read from memory."""
        nest = self.nests[name]
        return self.graph.leaf(read(name, nest.axes, nest.dtype))

    def _expression(self, root: Expr, renaming: Mapping[Axis, Axis]) -> int:
        found: dict[Expr, int] = {}
        for node in postorder(root):
            args = [found[a] for a in node.args]
            found[node] = self._node(node, args, renaming)
        return found[root]

    def _node(self, node: Expr, args: list[int], renaming: Mapping[Axis, Axis]) -> int:
        graph = self.graph
        match node:
            case Read(tensor, indices, dtype):
                at = tuple(renaming.get(a, a) for a in indices)
                return self.value(tensor, at) if tensor in self.nests else graph.leaf(read(tensor, at, dtype))
            case Const(value, _):
                return graph.literal(float(value))
            case Apply("convert"):
                return args[0]
            case Apply("mul"):
                return graph.times(args)
            case Apply("select"):
                return graph.times(args[:2])
            case Apply("square"):
                return graph.times([args[0], args[0]])
            case Apply("add"):
                return graph.plus(args)
            case Apply("sub"):
                return graph.plus([args[0], graph.times([graph.literal(-1.0), args[1]])])
            case Apply("neg"):
                return graph.times([graph.literal(-1.0), args[0]])
            case Apply("div"):
                return graph.times([args[0], graph.inverse(args[1])])
        raise AssertionError(node)
