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
    program: LoopProgram, moves: Mapping[str, float], needed: Collection[str], kept: Set[str], inner: Collection[str]
) -> frozenset[str]:  # fmt: skip
    """Returns the maps that are stored, and computed once. Readers are counted as if no later map were stored for this reason.

    moves: the maps that stand for operations that move elements, of which each reads from places of its own, with how often they
    need an element (`Moves.places_of_their_own`); needed: the nests that are computed; kept: the maps that are stored in any case;
    inner: what is computed inside of diamonds (`xla_rows`).
    """
    direct, through = _readers(program, moves, needed, kept, inner)
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

    for node in _maps(program):
        if node.name not in needed or node.name in kept:
            continue
        whole = numbered(node.name, node.cycles, 0.0)
        for tensor, size in node.reads:
            whole |= inside[tensor] if tensor in inside else numbered(tensor, 0.0, size)
        if node.name not in inner and _is_read_often(readers := direct.get(node.name, ())):
            last = _kernels(through.get(node.name, {}))
            if _is_read_often(last):
                elements = max(1, node.elements)
                cycles, moved = (sum(kind) / elements for kind in zip(*_chosen(costs, whole), strict=True))
                if all(_is_longer_inside(node.elements, node.item, cycles, moved, each) for each in (readers, last)):
                    found.add(node.name)
                    costs[numbers[node.name]] = 0.0, node.size  # its readers read it
                    continue
        inside[node.name] = whole
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Computed:
    """This describes a map, and what computing all of it takes."""

    name: str
    elements: int
    item: int
    """The bytes that one element takes."""
    size: float
    """The bytes that all elements take."""
    cycles: float
    """The clock cycles that all of them take."""
    reads: tuple[tuple[str, float], ...]
    """The tensors that it reads, and the bytes of each."""


def _maps_of(program: LoopProgram) -> list[_Computed]:
    """Returns the maps of a program, in its order."""
    widths, sizes = _widths(program), _volumes(program)
    found = []
    for node in program.nests:
        if isinstance(node, Nest) and not node.is_reduction:
            own, elements = _own(node.body, node.axes), volume(node.axes)
            reads = tuple((t, float(sizes[t] * widths[t])) for t, _ in own.reads)
            size = float(sizes[node.name] * widths[node.name])
            item = dtypes.itemsize_bytes(node.dtype)
            found.append(_Computed(node.name, elements, item, size, own.cycles * elements, reads))
    return found


_maps = Recent(_maps_of)


def _is_read_often(readers: Iterable[_Reader]) -> bool:
    """Do readers need each element more than once, all together?"""
    return sum([r.times for r in readers]) > 1.0


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


_Ways = dict[tuple[str, str], float]
"""A tensor's readers in the end: how often each kernel needs an element, by its name and the moves through which it reads."""


def _readers(
    program: LoopProgram, moves: Mapping[str, float], needed: Collection[str], kept: Set[str], inner: Collection[str]
) -> tuple[dict[str, list[_Reader]], dict[str, _Ways]]:  # fmt: skip
    """Finds the nests that read each map, which are its readers before XLA fuses anything, and the kernels that read it in the end.

    Tensors that are in memory in any case have no readers here, as nobody asks for them.
    """
    direct: dict[str, list[_Reader]] = {}
    through: dict[str, _Ways] = {}
    asked, nests = _reading(program, moves)
    asked = asked.difference(kept)
    for node in nests:
        if node.name not in needed:
            continue
        is_kernel = node.always_kernel or node.name in kept or (node.is_reduction and node.name not in inner)
        ways = {(node.name, ""): 1.0} if is_kernel else through.get(node.name, {})
        if node.is_reduction and not is_kernel:
            ways = dict.fromkeys(ways, 1.0)
        if node.moves and not is_kernel:
            ways = {(kernel, f"{way} {node.name}"): times for (kernel, way), times in ways.items()}
        for tensor, times, as_kernel, as_map in node.reads:
            if tensor not in asked:
                continue
            direct.setdefault(tensor, []).append(as_kernel if is_kernel else as_map)
            found = through.setdefault(tensor, {})
            for way, needed_by_it in ways.items():
                before = found.get(way)
                if before is None:
                    if len(found) < _MOST_READERS or node.always_kernel:
                        found[way] = needed_by_it * times
                elif before < needed_by_it * times:
                    found[way] = needed_by_it * times
    return direct, through


def _kernels(ways: _Ways) -> list[_Reader]:
    """Returns the kernels that read a tensor by some ways."""
    found: dict[str, float] = {}
    for (kernel, _), times in ways.items():
        found[kernel] = found.get(kernel, 0.0) + times
    return [_Reader(times) for times in found.values()]


@dataclass(frozen=True, slots=True)
class _Reading:
    """This describes a nest as a reader, and what it reads."""

    name: str
    always_kernel: bool
    """It is no nest of ours, but an operation that XLA runs by itself."""
    is_reduction: bool
    moves: bool
    """It stands for an operation that moves elements."""
    reads: tuple[tuple[str, float, _Reader, _Reader], ...]
    """Each tensor, how often each of its elements is needed, and the nest as its reader: as a kernel, and inside of one."""


def _reading_of(program: LoopProgram, moves: Mapping[str, float]) -> tuple[frozenset[str], list[_Reading]]:
    """Returns the nests whose readers may be asked for, and what each nest reads, the last nest first."""
    sizes, widths = _volumes(program), _widths(program)
    once = _Reader(1.0)
    found: list[_Reading] = []
    for node in reversed(program.nests):
        if isinstance(node, External):
            # twice the same operand is one reader
            operands = tuple((t, 1.0, once, once) for t in dict.fromkeys(node.operands))
            found.append(_Reading(node.name, True, False, False, operands))
            continue
        space = (*node.axes, *node.reduced)
        points, reads = volume(space), _own(node.body, space).reads
        moved = sum(each * points * widths[t] for t, each in reads) + sizes[node.name] * widths[node.name]
        taken = []
        for tensor, each in reads:
            times = points / max(1, sizes[tensor])
            besides = (moved - each * points * widths[tensor]) / max(1, sizes[tensor])
            if is_product(node) or node.name in moves:  # a library's operands are written once
                often = moves.get(node.name, 1.0)
                times = often if often > 1.0 else min(1.0, times)
            taken.append((tensor, times, _Reader(times, besides), _Reader(times)))
        found.append(_Reading(node.name, False, node.is_reduction, node.name in moves, tuple(taken)))
    return frozenset(n.name for n in program.nests if isinstance(n, Nest)), found


_reading = Recent(_reading_of)


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
