"""Maps that XLA stores on a GPU, as it would take longer to compute them again in each kernel that reads them.

XLA estimates what a map and its readers take apart, and what they take where every reader computes the map by itself, and
fuses where that is shorter. This is a model of these estimates (its pass of priority fusion), in bytes of memory traffic: what
a kernel computes and what it moves overlap, but for a twentieth of the smaller part. The costs of operations are XLA's own, in
clock cycles of an H100; all that are not named here are as cheap as an addition, or cheaper.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.xla_reductions import is_product

_CYCLES: Mapping[str, float] = {
    "atan2": 431, "cbrt": 178, "cos": 978, "div": 19, "exp": 79, "exp2": 79, "expm1": 190, "log": 166, "log1p": 229,
    "logistic": 105, "pow": 510, "rsqrt": 75, "sin": 958, "sqrt": 75, "tanh": 467,
}  # fmt: skip
CHEAP, _INTEGER_DIVISION = 5.0, 300.0
_BUILT_IN = frozenset({"exp", "exp2", "log"})
"""Operations that a device has for bfloat16: XLA takes these for cheap."""
_CYCLES_PER_BYTE = 18.8
"""Cycles of all multiprocessors, for one element each, in the time in which one byte comes from memory. From functions of one
and of two readers, which are stored from 158 cycles on, and not at 150."""
LAUNCH_BYTES = 3.35e6
"""The bytes that come from memory in the microsecond that XLA takes a launch for."""
_APART = 0.05
"""The share of the shorter one of computing and moving that the longer one does not hide."""
_AGAIN = 0.1
"""The share of the time of a byte from memory in which it is read again, from a cache."""
_MOST_READERS = 24
"""More readers than these are not counted: the last ones of the program are."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """What reads a map: a nest, or a kernel."""

    times: float
    """How often it needs each element."""
    moved: float = 0.0
    """The bytes that it reads and writes besides, for each of them."""


@dataclass(frozen=True, slots=True)
class _Map:
    """What a map costs by itself."""

    cycles: float
    """For one of its elements."""
    reads: tuple[tuple[str, float], ...]
    """The tensors that it reads, and the elements of each that it takes for one of its own."""


def stored_to_save_work(
    program: LoopProgram, moves: Collection[str], needed: Collection[str], kept: Set[str], inner: Collection[str]
) -> frozenset[str]:  # fmt: skip
    """Returns the maps that are stored, and computed once. Readers are counted as if no later map were stored for this reason.

    moves: the maps that stand for operations that move elements, of which each reads from places of its own; needed: the nests
    that are computed; kept: the maps that are stored in any case; inner: what is computed inside of diamonds (`xla_rows`).
    """
    direct, last = _readers(program, moves, needed, kept, inner)
    widths, sizes = _widths(program), _volumes(program)
    found: set[str] = set()
    inside: dict[str, int] = {}
    """For each map that its readers compute, this has one bit for every map and every tensor that it is computed from."""
    numbers: dict[str, int] = {}
    costs: list[tuple[float, float]] = []
    """Cycles of a map, or bytes of a tensor, by these numbers."""

    def numbered(name: str, cycles: float, moved: float) -> int:
        if name not in numbers:
            numbers[name] = len(costs)
            costs.append((cycles, moved))
        return 1 << numbers[name]

    for node in program.nests:
        if not isinstance(node, Nest) or node.is_reduction or node.name not in needed or node.name in kept:
            continue
        elements = volume(node.axes)
        own = _own(node.body, node.axes)
        whole = numbered(node.name, own.cycles * elements, 0.0)
        for tensor, _ in own.reads:
            whole |= inside[tensor] if tensor in inside else numbered(tensor, 0.0, sizes[tensor] * widths[tensor])
        readers = [of.get(node.name, {}).values() for of in (direct, last)]
        if node.name not in inner and all(sum(r.times for r in each) > 1.0 for each in readers):
            cycles, moved = (sum(kind) / max(1, elements) for kind in zip(*_chosen(costs, whole), strict=True))
            size = dtypes.itemsize_bytes(node.dtype)
            if all(_is_longer_inside(elements, size, cycles, moved, each) for each in readers):
                found.add(node.name)
                costs[numbers[node.name]] = 0.0, float(sizes[node.name] * widths[node.name])  # its readers read it
                continue
        inside[node.name] = whole
    return frozenset(found)


def _chosen(costs: Sequence[tuple[float, float]], bits: int) -> Iterator[tuple[float, float]]:
    """Yields those of the costs whose numbers are among some bits."""
    while bits:
        lowest = bits & -bits
        yield costs[lowest.bit_length() - 1]
        bits ^= lowest


def _is_longer_inside(elements: int, size: int, cycles: float, moved: float, readers: Iterable[_Reader]) -> bool:
    """Do readers that compute a map by themselves take longer, than the map and its readers take apart?"""
    apart = bytes_in_time_of(cycles, moved + size) * elements + LAUNCH_BYTES
    inside = 0.0
    for reader in readers:
        again = 1.0 + _AGAIN * (reader.times - 1.0) if reader.times > 1.0 else reader.times
        apart += (size * again + reader.moved) * elements
        inside += bytes_in_time_of(cycles * reader.times, moved * again + reader.moved) * elements
    return apart < inside


def bytes_in_time_of(cycles: float, moved: float) -> float:
    """The bytes that are moved in the time that a kernel takes which computes and moves so much."""
    computed = cycles / _CYCLES_PER_BYTE
    return max(computed, moved) + _APART * min(computed, moved)


_Readers = dict[str, dict[str, _Reader]]
"""By tensors, what reads them, by its name."""


def _readers(
    program: LoopProgram, moves: Collection[str], needed: Collection[str], kept: Set[str], inner: Collection[str]
) -> tuple[_Readers, _Readers]:  # fmt: skip
    """The nests that read each map, which are its readers before XLA fuses anything, and the kernels that read it in the end."""
    sizes = _volumes(program)
    widths = _widths(program)
    direct: _Readers = {}
    through: dict[str, dict[tuple[str, str], float]] = {}
    """By the kernel, and by the move through which it reads."""
    for node in reversed(program.nests):
        if node.name not in needed:
            continue
        if isinstance(node, External):
            for tensor in node.operands:
                through.setdefault(tensor, {})[node.name, ""] = 1.0
                direct.setdefault(tensor, {})[node.name] = _Reader(1.0)
            continue
        is_kernel = node.name in kept or (node.is_reduction and node.name not in inner)
        ways = {(node.name, ""): 1.0} if is_kernel else through.get(node.name, {})
        if node.is_reduction and not is_kernel:
            ways = dict.fromkeys(ways, 1.0)
        if node.name in moves and not is_kernel:
            ways = {(kernel, f"{way} {node.name}"): times for (kernel, way), times in ways.items()}
        space = (*node.axes, *node.reduced)
        points, reads = volume(space), _own(node.body, space).reads
        moved = sum(each * points * widths[t] for t, each in reads) + sizes[node.name] * widths[node.name]
        for tensor, each in reads:
            times = points / max(1, sizes[tensor])
            besides = (moved - each * points * widths[tensor]) / max(1, sizes[tensor])
            if is_product(node) or node.name in moves:  # a library's operands are written once
                times = min(1.0, times)
            direct.setdefault(tensor, {})[node.name] = _Reader(times, besides if is_kernel else 0.0)
            found = through.setdefault(tensor, {})
            for way, needed_by_it in ways.items():
                if way in found or len(found) < _MOST_READERS:
                    found[way] = max(found.get(way, 0.0), needed_by_it * times)
    last: _Readers = {}
    for tensor, of in through.items():
        kernels: dict[str, float] = {}
        for (kernel, _), times in of.items():
            kernels[kernel] = kernels.get(kernel, 0.0) + times
        last[tensor] = {kernel: _Reader(times) for kernel, times in kernels.items()}
    return direct, last


_widths = Recent(lambda program: {d.name: dtypes.itemsize_bytes(d.dtype) for d in program.definitions()})
_volumes = Recent(lambda program: {d.name: volume(d.axes) for d in program.definitions()})


@lru_cache(1 << 13)
def _own(body: Expr, axes: tuple[Axis, ...]) -> _Map:
    """The costs of a nest without what it reads."""
    elements = max(1, volume(axes))
    cycles = 0.0
    reads: dict[str, float] = {}
    for node in postorder(body):
        if isinstance(node, Read):
            reads[node.tensor] = max(reads.get(node.tensor, 0.0), volume(node.indices) / elements)
        elif isinstance(node, Apply):
            cycles += cycles_of(node) * volume(node.axes) / elements
    return _Map(cycles, tuple(reads.items()))


def cycles_of(node: Apply) -> float:
    """Returns the clock cycles that XLA takes an operation for."""
    if node.op in ("div", "rem") and dtypes.is_integer(node.dtype):
        return _INTEGER_DIVISION
    if node.op in _BUILT_IN and node.dtype == "bfloat16":
        return CHEAP
    return _CYCLES.get(node.op, CHEAP)
