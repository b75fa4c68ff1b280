"""An analytical price of a tree, from the places of its statements (MCFuser, equations 2 to 5, made general).

    T = launch + max(memory, cache, slow-down · max(matrix units, operands, vector units + special functions), waiting)

- memory: bytes that leave the device's memory: those of a tensor once where the cache can hold it, else as often as it is loaded;
- cache: for each load and store the bytes of its tile, in whole sectors, times the trips of the loops around it; a tensor's first
  bytes at the rate of the cache, the others at that of the multiprocessors' ports;
- operands: bytes that warps read from shared memory for products; those that share rows read the same;
- matrix units: the operations of each product at the shape in which the unit takes its tile, times its trips: recomputed ones too;
- vector units, special functions: what is computed elementwise, each expression on its own axes, times its trips;
- slow-down: (blocks + multiprocessors) / blocks, or another factor; a multiprocessor can draw more than its share of memory;
- waiting: the trips of loops that load, one after the other, in each round of blocks; those with slots begin loads before.

Rates are the device's (`devices/`), but for those of operands (as in `price/gpu.py`). The sizes of tiles may be arrays: then so is
the price.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, postorder, reads_in
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.region import Region, independent_axes
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import RangeLoop, TreeKernel
from pallasfuse.price.operations import Instructions, Operations, executed, new_instructions
from pallasfuse.price.terms import Price, Term
from pallasfuse.resources.block import BLOCKS, REGISTER_BYTES, REGISTERS
from pallasfuse.schedule.placement import Broken, Buffer, MayFold, Placement, Statement, no_folds, place
from pallasfuse.tiling.products import Product, narrow_sides, split_product

Number = Any
"""A number, or an array of numbers with one for each candidate."""
Sizes = Mapping[str, Number]
"""The sizes of tiles by axis; they take the place of those in the tree."""

_SECTOR_BYTES = 32
"""The least that the cache hands out."""
_UNIT = (64, 8, 16)
"""Rows, columns and summed positions of the smallest product of a warpgroup's matrix unit; the larger side is its rows."""
_WARPS, _WARP_ROWS = 4, 16
"""Warps of a block, and the rows that one of them takes of a product that is no warpgroup's."""
_OPERAND_BYTES, _WARPS_COST = 100.0, 2.0
"""Operands that a multiprocessor reads from its shared memory in a clock, and how much dearer the reads of single warps are."""
_DRAWN = 1.6
"""Times its share of the memory's rate that a multiprocessor can draw, where others are idle."""
_TIE = 1e-6
"""The weight of what does not limit a kernel: of two that one resource limits as much, the one is faster that does less besides."""
_UNROLLED = 16
"""Trips of a loop that may index registers: it is unrolled."""


@dataclass(frozen=True, slots=True)
class _Work:
    """The cost of one point of a nest."""

    product: Product | None
    sides: tuple[Expr, ...]
    """The expressions that are computed elementwise."""

    @property
    def operand_dtype(self) -> str:
        """The type of both operands of the product."""
        types = {s.dtype for s in self.sides}
        return types.pop() if len(types) == 1 else "float32"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The price of a placement and what a block holds; each number may be an array."""

    us: Number
    terms: tuple[tuple[str, Number, str, Number], ...]
    """Name, amount, unit, microseconds."""
    shared_bytes: Number
    register_bytes: Number
    blocks: Number
    moved: Mapping[str, Number]
    """Bytes of all loads and stores of each tensor."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a placement asks of a device, before its rates tell how long that takes; each number may be an array."""

    blocks: Number
    memory: Number
    """Bytes that leave the device's memory."""
    once: Number
    """What the cache hands out for the first time, in bytes."""
    sectors: Number
    """What it hands out all together."""
    moved: Mapping[str, Number]
    products: tuple[tuple[Number, str], ...]
    """Operations of each product, and the type of its operands."""
    operands: Number
    """Bytes of operands that are read for products, as often as warps read them."""
    operations: Operations
    shared: Number
    registers: Number
    """Bytes of shared memory and of registers that are alive at once."""
    trips: tuple[tuple[Number, bool], ...]
    """Trips of the serial loops that load, and whether they begin loads before."""


def published_slowdown(blocks: Number, processors: int) -> Number:
    """Returns the factor of MCFuser's equation 5."""
    return (blocks + processors) / blocks


def rounds_of_blocks(blocks: Number, processors: int) -> Number:
    """Returns the factor by which equal blocks, in whole rounds, leave multiprocessors idle."""
    return _ceil(blocks, processors) * processors / blocks


@dataclass(slots=True)
class Model:
    """The price of the trees of one region on one device."""

    region: Region
    device: Device
    slowdown: Callable[[Number, int], Number] = rounds_of_blocks
    """By how much few blocks are slower than the whole device, from their number and that of multiprocessors."""
    _axes: Mapping[str, Axis] = field(init=False)
    _nests: Mapping[str, Nest] = field(init=False)
    _tensors: dict[str, Tensor] = field(init=False)
    _work: dict[str, _Work] = field(init=False)

    def __post_init__(self) -> None:
        ignored = frozenset(independent_axes(self.region))
        self._axes, self._nests = self.region.axes, self.region.by_name
        stored = (Tensor(n.name, n.axes, n.dtype) for n in self.region.nests)
        self._tensors = {t.name: t for t in (*self.region.inputs, *stored)}
        self._work = {n.name: _work(n, ignored) for n in self.region.nests}

    def on(self, device: Device) -> "Model":
        """Returns the model of the same region on another device with a cache of the same size, as on a share of this one."""
        assert device.cache_bytes == self.device.cache_bytes
        other = copy(self)
        other.device = device
        return other

    def estimate(self, placement: Placement, sizes: Sizes | None = None) -> Estimate:
        """Estimates one placement. sizes: instead of those of the loops."""
        return self.priced(self.amounts(placement, sizes))

    def amounts(self, placement: Placement, sizes: Sizes | None = None) -> Amounts:
        """Returns what a placement asks of the device."""
        return _Estimator(self, placement, sizes or {}).amounts()

    def priced(self, found: Amounts) -> Estimate:
        """Estimates a placement that asks so much."""
        device, blocks, processors = self.device, found.blocks, self.device.multiprocessors
        # a CPU's rates of computing are for one core
        cores = processors if device.platform == "cpu" else 1
        flops = sum((done for done, _ in found.products), start=0)
        matrix_us = self._matrix_us(found.products)
        vector_us = 1e-3 * found.operations.simple / (device.vector_gop_s * cores)
        special_us = 1e-3 * found.operations.special / (device.special_gop_s * cores)
        memory_us = 1e-3 * found.memory / device.memory_gb_s
        cache_us = device.from_cache_us(found.once, found.sectors - found.once)
        operands_us = (
            found.operands / (_OPERAND_BYTES * device.clock_ghz * 1e3 * processors) if device.platform == "gpu" else 0.0
        )
        slowdown = self.slowdown(blocks, processors)
        trips, waiting_us = self._waiting(found)
        launch_us = device.kernel_us + device.launch_us
        drawn = np.maximum(1.0, slowdown / _DRAWN)
        computing_us = np.maximum(np.maximum(matrix_us, operands_us), vector_us + special_us)
        busy = np.maximum(drawn * np.maximum(memory_us, cache_us), slowdown * computing_us)
        us = launch_us + np.maximum(busy, waiting_us)
        work = memory_us + cache_us + matrix_us + operands_us + vector_us + special_us
        us = us + _TIE * slowdown * work
        terms = (
            ("device memory", found.memory, "B", memory_us * drawn), ("cache", found.sectors, "B", cache_us * drawn),
            ("matrix units", flops, "flop", matrix_us * slowdown),
            ("operands in shared memory", found.operands, "B", operands_us * slowdown),
            ("vector units", found.operations.simple, "op", vector_us * slowdown),
            ("special functions", found.operations.special, "op", special_us * slowdown),
            ("waiting for loads", trips, "trips", waiting_us), ("launch", 1, "kernel", launch_us),
        )  # fmt: skip
        return Estimate(us, terms, found.shared, found.registers, blocks, found.moved)

    def _matrix_us(self, products: Iterable[tuple[Number, str]]) -> Number:
        """Returns the time of the matrix units for so many operations on operands of each type."""
        rates = self.device.matmul_tflop_s
        cores = self.device.multiprocessors if self.device.platform == "cpu" else 1
        other = rates["tf32"] if "tf32" in rates else rates["float32"]
        return sum((1e-6 * done / rates.get(dtype, other) for done, dtype in products), start=0) / cores

    def bound_us(self, most_blocks: float = math.inf) -> float:
        """A bound that is below the price of every placement in at most so many blocks, on a GPU: everything is loaded, computed
        and stored once, and as many multiprocessors as there are blocks take part.

        Each term is at most that of `priced`, whose small weight on what does not limit a kernel is more than any rounding.
        """
        device, nests = self.device, [(n, self._work[n.name]) for n in self.region.nests]
        done = [(2 * volume((*n.axes, *n.reduced)), w.operand_dtype) for n, w in nests if w.product is not None]
        read = {
            node.tensor: node.indices for n, _ in nests for node in reads_in(n.body) if node.tensor not in self._nests
        }
        moved = {name: volume(axes) for name, axes in read.items()}
        moved |= {name: volume(self._nests[name].axes) for name in self.region.outputs}
        once = sum(n * dtypes.itemsize_bytes(self._tensors[name].dtype) for name, n in moved.items())
        instructions = new_instructions(postorder(*(side for _, w in nests for side in w.sides)), set())
        work = executed(instructions, lambda axes: float(volume(axes)))
        simple = work.simple + sum(
            volume((*n.axes, *n.reduced)) for n, w in nests if n.is_reduction and w.product is None
        )
        vector_us = 1e-3 * simple / device.vector_gop_s
        special_us = 1e-3 * (work.special + work.converted) / device.special_gop_s
        moving_us = max(1e-3 * once / device.memory_gb_s, device.from_cache_us(once, 0.0))
        slowdown = max(1.0, device.multiprocessors / most_blocks)
        computing_us = slowdown * max(float(self._matrix_us(done)), vector_us + special_us)
        busy_us = max(max(1.0, slowdown / _DRAWN) * moving_us, computing_us)
        return float(device.kernel_us + device.launch_us + max(busy_us, device.latency_us))

    def _waiting(self, found: Amounts) -> tuple[Number, Number]:
        """Returns the trips of serial loops that load, in each round of blocks one after the other, and the time that they wait."""
        device, blocks, processors = self.device, found.blocks, self.device.multiprocessors
        resident = np.minimum(
            np.maximum((device.shared_memory_bytes or 0) // np.maximum(found.shared, 1), 1),
            np.maximum(REGISTERS * REGISTER_BYTES // np.maximum(found.registers, 1), 1),
        )
        rounds = _ceil(blocks, processors * np.minimum(resident, BLOCKS))
        waits = (n * (device.trip_us if ahead else device.latency_us) for n, ahead in found.trips)
        trips = sum((n for n, _ in found.trips), start=blocks)
        waited = sum(waits, start=blocks * device.latency_us)
        return rounds * trips / blocks, rounds * waited / blocks

    def fits(self, found: Estimate) -> Number:
        """Returns whether a block's tiles are within the shared memory and the registers of the device."""
        shared = self.device.shared_memory_bytes or math.inf  # a CPU has none
        return (found.shared_bytes <= shared) & (found.register_bytes <= REGISTERS * REGISTER_BYTES)

    def price(self, tree: TreeKernel, may_fold: MayFold = no_folds) -> Price | Broken:
        """Returns the price of one tree with its tiles, or the rule that it breaks."""
        placement = place(self.region, tree, may_fold)
        if isinstance(placement, Broken):
            return placement
        found = self.estimate(placement)
        return Price(float(found.us), tuple(Term(n, float(a), unit, float(us)) for n, a, unit, us in found.terms))


def _work(nest: Nest, ignored: frozenset[Axis]) -> _Work:
    product = None
    if nest.reducer == SUM:
        product = split_product(nest.body, frozenset(nest.reduced), ignored, batched=True)
    if product is None:
        return _Work(None, (nest.body,))
    return _Work(product, narrow_sides(product.lhs, product.rhs))


def _ceil(a: Number, b: Number) -> Number:
    return -(-a // b)


def _padded(n: Number, unit: int) -> Number:
    return _ceil(n, unit) * unit


def _product(numbers: Sequence[Number]) -> Number:
    result: Number = 1
    for n in numbers:
        result = result * n
    return result


@dataclass(slots=True)
class _Estimator:
    model: Model
    placement: Placement
    sizes: Sizes
    _known: dict[tuple[int, ...], Number] = field(default_factory=dict)
    """Trips by the loops around."""

    def amounts(self) -> Amounts:
        memory, once, sectors, moved = self._bytes()
        products, operands = self._matrix()
        shared, registers = self._held()
        return Amounts(self._blocks(), memory, once, sectors, moved, products, operands, self._elementwise(), shared, registers,
                       self._loading_trips())  # fmt: skip

    # --- loops

    def _tile(self, axis: Axis, around: Sequence[RangeLoop]) -> Number:
        """Returns how many positions of an axis there are at a time inside of some loops."""
        tile: Number = axis.extent
        for loop in around:
            if loop.axis == axis.name:
                tile = _ceil(tile, loop.size) if loop.shares else self.sizes.get(axis.name, loop.size)
        return tile

    def _trips(self, around: Sequence[RangeLoop]) -> Number:
        """Returns how often what stands in some loops runs, in all blocks together."""
        key = tuple(id(loop) for loop in around)
        if key not in self._known:
            trips: Number = 1
            if around:
                axis = self.model._axes[around[-1].axis]
                trips = self._trips(around[:-1]) * self._each(axis, around)[0]
            self._known[key] = trips
        return self._known[key]

    def _each(self, axis: Axis, around: Sequence[RangeLoop]) -> tuple[Number, Number]:
        """Returns the trips of the innermost of some loops each time that it runs, and those of a loop over all of its tiles."""
        loop, tiles = around[-1], _ceil(self._tile(axis, around[:-1]), self._tile(axis, around))
        if not (loop.begin or loop.end):
            return tiles, tiles
        return np.maximum(np.minimum(tiles, loop.end or tiles) - loop.begin, 0), tiles

    def _blocks(self) -> Number:
        spatial = [p for p in self.placement.loops if p[-1].level not in ("serial", "group")]
        return self._trips(
            max((tuple(x for x in p if x.level not in ("serial", "group")) for p in spatial), key=len, default=())
        )

    def _loading_trips(self) -> tuple[tuple[Number, bool], ...]:
        """Returns the trips of serial loops that load in their own body, in all blocks together, and whether loads begin before."""
        loops = {s.numbers: s.around for s in self.placement.statements if s.kind == "load"}
        found = [around for around in loops.values() if around and around[-1].level == "serial"]
        return tuple((self._trips(a), a[-1].slots > 1) for a in found)

    # --- bytes

    def _bytes(self) -> tuple[Number, Number, Number, dict[str, Number]]:
        """Returns the bytes that leave the device's memory, what the cache hands out for the first time and all together, in
        sectors, and the bytes of each tensor."""
        in_cache = self.model.device.cache_bytes
        loaded: dict[str, Number] = {}
        sectors: Number = 0
        for statement in self.placement.statements:
            if statement.kind == "compute":
                continue
            tensor = self.model._tensors[statement.name]
            size = dtypes.itemsize_bytes(tensor.dtype)
            moved = size * self._elements_moved(statement)
            run = self._run(statement) * size
            sectors = sectors + moved * _padded(run, _SECTOR_BYTES) / run
            loaded[tensor.name] = loaded.get(tensor.name, 0) + moved
        memory: Number = 0
        first: Number = 0
        for name, moved in loaded.items():
            tensor = self.model._tensors[name]
            once = volume(tensor.axes) * dtypes.itemsize_bytes(tensor.dtype)
            first = first + np.minimum(once, moved)
            memory = memory + (np.minimum(once, moved) if once <= in_cache else moved)
        return memory, first, sectors, loaded

    def _elements_moved(self, statement: Statement) -> Number:
        """Returns the elements of all tiles together; what lies beyond the end of an axis is not moved."""
        own = {a.name for a in statement.axes}
        others = tuple(x for x in statement.around if x.axis not in own)
        share: Number = 1
        for n, loop in enumerate(statement.around):
            if loop.axis in own and (loop.begin or loop.end):
                trips, tiles = self._each(self.model._axes[loop.axis], statement.around[: n + 1])
                share = share * trips / tiles
        return volume(statement.axes) * share * self._trips(others)

    def _run(self, statement: Statement) -> Number:
        """Returns how many elements of a tile are neighbours in memory."""
        run: Number = 1
        whole: Number = True
        for axis in reversed(statement.axes):
            tile = np.minimum(self._tile(axis, statement.around), axis.extent)
            run = np.where(whole, run * tile, run)
            whole = whole & (tile >= axis.extent)
        return run

    # --- work

    def _matrix(self) -> tuple[tuple[tuple[Number, str], ...], Number]:
        """Returns the operations of each product at the unit's shapes, with the type of operands, and the bytes of operands that
        are read for them, as often as warps read them."""
        products: list[tuple[Number, str]] = []
        operands: Number = 0
        for statement in self.placement.statements:
            product = self.model._work[statement.name].product if statement.kind == "compute" else None
            if product is None:
                continue
            left, right = product.lhs.axes, product.rhs.axes
            summed = frozenset(self.model._nests[statement.name].reduced)

            def count(axes: frozenset[Axis], around: Sequence[RangeLoop] = statement.around) -> Number:
                return _product([self._tile(a, around) for a in axes])

            a, b, k = count(left - right), count(right - left), count(left & right & summed)
            batch = count((left & right) - summed)
            rows, columns, depth = _UNIT
            unit = np.minimum(_padded(a, rows) * _padded(b, columns), _padded(b, rows) * _padded(a, columns))
            done = 2 * unit * _padded(k, depth) * batch * self._trips(statement.around)
            products.append((done, self.model._work[statement.name].operand_dtype))
            # a unit reads both sides of its own product; where rows are no multiple of its own, single warps take their share
            wide = a % rows == 0
            along = np.where(wide, a / rows, np.minimum(_WARPS, np.maximum(a // _WARP_ROWS, 1)))
            units = np.where(wide, along, _WARPS)
            read = units * (a / along + np.maximum(columns, b * along / units)) * k * batch
            cost = np.where(wide, 1.0, _WARPS_COST)
            operands = operands + 2 * cost * read * self._trips(statement.around)
        return tuple(products), operands

    def _elementwise(self) -> Operations:
        """Returns the operations of all blocks; what nests in one body have in common is computed once."""
        simple: Number = 0
        special: Number = 0
        seen: dict[tuple[int, ...], set[Expr]] = {}
        for statement in self.placement.statements:
            if statement.kind != "compute":
                continue
            nest, work = self.model._nests[statement.name], self.model._work[statement.name]
            found: Instructions = new_instructions(postorder(*work.sides), seen.setdefault(statement.numbers, set()))
            trips = self._trips(statement.around)
            if nest.is_reduction and work.product is None:
                found = (*found, (frozenset((*nest.axes, *nest.reduced)), Operations(1.0)))
            if statement.unfinished and nest.is_reduction:  # accumulators are moved to the new frame
                found = (*found, (frozenset(nest.axes), Operations(1.0)))
            for axes, each in found:
                elements = trips * _product([self._tile(a, statement.around) for a in axes])
                simple = simple + each.simple * elements
                special = special + (each.special + each.converted) * elements
        return Operations(simple, special)

    # --- memory of a block

    def _held(self) -> tuple[Number, Number]:
        """Returns the most bytes of shared memory and of registers that are alive at once."""
        shared: list[tuple[Buffer, Number]] = []
        registers: list[tuple[Buffer, Number]] = []
        for buffer in self.placement.buffers:
            elements = _product([self._tile(a, buffer.around) for a in buffer.axes])
            if buffer.is_input:
                size = elements * dtypes.itemsize_bytes(self.model._tensors[buffer.name].dtype) * buffer.slots
                (shared if self._is_operand(buffer.name) else registers).append((buffer, size))
                continue
            nest = self.model._nests[buffer.name]
            size = elements * dtypes.itemsize_bytes(dtypes.accumulator(nest.dtype))
            trips: Number = 1
            for loop in buffer.indexed_by:
                axis = self.model._axes[loop.axis]
                trips = trips * _ceil(self._tile(axis, buffer.around), self._tile(axis, (*buffer.around, loop)))
            apart = trips > _UNROLLED
            shared.append((buffer, np.where(apart, size, 0)))
            registers.append((buffer, np.where(apart, 0, size)))
        return _peak(shared), _peak(registers)

    def _is_operand(self, name: str) -> bool:
        """Returns whether a matrix unit reads the tensor: then its tiles are in shared memory."""
        return any(w.product is not None and name in n.reads
                   for n, w in zip(self.model._nests.values(), self.model._work.values(), strict=True))  # fmt: skip


def _peak(held: Sequence[tuple[Buffer, Number]]) -> Number:
    most: Number = 0
    for now in {b.first for b, _ in held}:
        most = np.maximum(most, sum((size for b, size in held if b.first <= now <= b.last), start=np.int64(0)))
    return most
