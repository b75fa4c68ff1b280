"""The maps that XLA stores on a CPU: a model of its pass that moves instructions into the loops that read them.

The pass goes from the last instruction to the first. A loop takes each operand that it may compute by itself, also where
others read it, too: not what is expensive and would be computed again, for others or for several of the loop's own points, and
not what reads more memory than it makes, unless all of its readers end up in one loop. (`CpuInstructionFusion` and
`InstructionFusion` of XLA; a nest of one operation is an instruction.)
"""

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.loop_program import External, Nest

_EXPENSIVE = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cosh", "digamma", "erf", "erfc", "erf_inv", "exp",
    "exp2", "expm1", "igamma", "igammac", "lgamma", "log", "log1p", "logistic", "pow", "rsqrt", "sinh", "sqrt", "tanh",
})  # fmt: skip
"""Operations that are not computed twice, as is a division."""


@dataclass(frozen=True, slots=True)
class _Instruction:
    """An instruction of XLA: what its pass needs to know of the nest that stands for it."""

    operands: tuple[str, ...]
    """The tensors that it reads, each once."""
    repeats: frozenset[str]
    """Operands of which it uses an element for several points."""
    is_expensive: bool
    is_widening: bool
    """It repeats or widens elements: the copy reads less memory than the original writes."""
    reads_more: bool
    """It reads several tensors as large as its result, which have more elements than it: readers that compute it by
    themselves would read more memory."""


@dataclass(slots=True)
class _Loop:
    """A loop, with the instructions that it computes by itself."""

    operands: set[str]
    repeats: set[str]


@dataclass(slots=True)
class _Graph:
    """The instructions that are left, and who reads them."""

    position: dict[str, int] = field(default_factory=dict)
    instructions: dict[str, _Instruction] = field(default_factory=dict)
    loops: dict[str, _Loop] = field(default_factory=dict)
    users: dict[str, set[str]] = field(default_factory=dict)
    read_elsewhere: set[str] = field(default_factory=set)
    """Tensors that something else than a loop reads, or that are results."""

    def would_repeat(self, producer: str, consumer: str) -> bool:
        return producer in self.read_elsewhere or self.users[producer] != {consumer}


def stored(nodes: Sequence[Nest | External], loops: Collection[str], results: Collection[str]) -> frozenset[str]:
    """Returns the maps among the loops that end up in memory.

    nodes: in order. loops: the maps and reductions that are compiled as loops; all others read memory. results: what has to
    be in memory, as well.
    """
    graph = _graph(nodes, loops, results)
    kept = _kept(graph)
    fusible = {n.name for n in nodes if isinstance(n, Nest) and not n.is_reduction} & graph.loops.keys() - kept
    for name in sorted(graph.loops, key=lambda n: -graph.position[n]):
        if name in graph.loops:
            _take_operands(graph, name, fusible)
    return frozenset(n.name for n in nodes if isinstance(n, Nest) and not n.is_reduction) & graph.loops.keys()


def _graph(nodes: Sequence[Nest | External], loops: Collection[str], results: Collection[str]) -> _Graph:
    graph = _Graph(read_elsewhere=set(results))
    cheap = {n.name for n in nodes if isinstance(n, Nest) and _is_repetition(n)}
    for at, node in enumerate(nodes):
        graph.position[node.name] = at
        graph.users[node.name] = set()
        if node.name not in loops:
            graph.read_elsewhere |= node.reads
            continue
        one = _of_nest(node, cheap & node.reads) if isinstance(node, Nest) else _of_external(node)
        graph.instructions[node.name] = one
        graph.loops[node.name] = _Loop(set(one.operands), set(one.repeats))
        for operand in one.operands:
            graph.users.setdefault(operand, set()).add(node.name)
    return graph


def _of_external(node: External) -> _Instruction:
    return _Instruction(
        tuple(dict.fromkeys(node.operands)), frozenset(), is_expensive=True, is_widening=False, reads_more=True
    )


def _of_nest(nest: Nest, repetitions: Set[str]) -> _Instruction:
    """The instruction of a nest. repetitions: those of what it reads."""
    repeats = _is_repetition(nest)
    return _instruction(nest.body, nest.axes, nest.reduced, nest.dtype, frozenset(repetitions), is_repetition=repeats)


@lru_cache(1 << 12)
def _instruction(
    body: Expr, kept: tuple[Axis, ...], reduced: tuple[Axis, ...], dtype: str, repetitions: frozenset[str], *,
    is_repetition: bool,
) -> _Instruction:  # fmt: skip
    space = frozenset(a for a in (*kept, *reduced) if a.extent > 1)
    reads = [n for n in postorder(body) if isinstance(n, Read)]
    own = {n.tensor: frozenset(a for a in n.indices if a.extent > 1) for n in reads}
    rank = sum(a.extent > 1 for a in kept)
    large = [n for n in reads if n.tensor not in repetitions and len(own[n.tensor]) >= rank]
    more = len(large) > 1 and sum(volume(axes) for axes in own.values()) > volume(kept)
    return _Instruction(
        tuple(own), frozenset(t for t, axes in own.items() if axes < space), _is_expensive(body, dtype),
        is_widening=is_repetition or _widens(body), reads_more=more,
    )  # fmt: skip


def _is_repetition(nest: Nest) -> bool:
    """Does it repeat the elements of a smaller tensor, or of none?"""
    return not nest.is_reduction and (isinstance(nest.body, Read | Const) or not nest.body.tensors) and (
        frozenset(nest.axes) != nest.body.axes
    )  # fmt: skip


def _widens(body: Expr) -> bool:
    if not isinstance(body, Apply) or body.op != "convert" or not isinstance(body.args[0], Read):
        return False
    return dtypes.itemsize_bytes(body.args[0].dtype) < dtypes.itemsize_bytes(body.dtype)


def _is_expensive(body: Expr, dtype: str) -> bool:
    return any(_costs(n) for n in postorder(body) if isinstance(n, Apply)) or (
        dtype == "bfloat16" and body.dtype == "float32"
    )


def _costs(node: Apply) -> bool:
    if node.op in _EXPENSIVE:
        return True
    if node.op in ("div", "rem"):
        return not dtypes.is_integer(node.dtype)
    if node.op == "integer_pow":
        return isinstance(node.args[-1], Const) and float(node.args[-1].value) < 0
    return node.op == "convert" and node.dtype == "bfloat16" and node.args[0].dtype == "float32"


def _may_take(graph: _Graph, consumer: str, producer: str, repeats: Collection[str]) -> bool:
    """May a loop compute an operand by itself?"""
    one = graph.instructions[producer]
    if not one.is_expensive:
        return True
    return producer not in repeats and (one.is_widening or not graph.would_repeat(producer, consumer))


def _kept(graph: _Graph) -> set[str]:
    """The instructions that read more than they make, and do not end up in one loop on all paths from them."""
    kept: set[str] = set()
    for name in sorted(graph.instructions, key=lambda n: -graph.position[n]):
        if graph.instructions[name].reads_more and not _meets(graph, name, kept):
            kept.add(name)
    return kept


def _meets(graph: _Graph, producer: str, kept: Collection[str]) -> bool:
    """May every reader take the producer, on all paths to it?"""
    users = graph.users[producer]
    if producer in graph.read_elsewhere or not all(
        _may_take(graph, u, producer, graph.instructions[u].repeats) for u in users
    ):
        return False
    if len(users) <= 1:
        return True
    last = max(graph.position[u] for u in users)
    takes: dict[str, bool] = {producer: True}
    """An instruction is true here if it may take everything on all ways from the producer to it."""
    ahead = [(graph.position[u], u) for u in users]
    ahead.sort()
    while ahead:
        at, name = heappop(ahead)
        if name in takes:
            continue
        one = graph.instructions[name]
        takes[name] = all(
            takes[o] and o not in kept and _may_take(graph, name, o, one.repeats) for o in one.operands if o in takes
        )
        if name in users and not takes[name]:
            return False
        for user in graph.users[name]:
            if graph.position[user] <= last and at < graph.position[user]:
                heappush(ahead, (graph.position[user], user))
    return True


def _take_operands(graph: _Graph, name: str, fusible: Collection[str]) -> None:
    """A loop takes the operands that it may, the last ones first, and theirs."""
    loop = graph.loops[name]
    ahead = [(-graph.position[o], o) for o in loop.operands if o in fusible]
    ahead.sort()
    while ahead:
        _, operand = heappop(ahead)
        if operand not in loop.operands or not _may_take(graph, name, operand, loop.repeats):
            continue
        one = graph.instructions[operand]
        new = [o for o in one.operands if o not in loop.operands]
        loop.operands.discard(operand)
        loop.operands.update(one.operands)
        loop.repeats |= frozenset(one.operands) if operand in loop.repeats else one.repeats
        loop.repeats.discard(operand)
        for inner in one.operands:
            graph.users[inner].add(name)
        graph.users[operand].discard(name)
        if not graph.users[operand] and operand not in graph.read_elsewhere:
            del graph.loops[operand]
            for inner in one.operands:
                graph.users[inner].discard(operand)
        for inner in new:
            if inner in fusible:
                heappush(ahead, (-graph.position[inner], inner))
