"""The price of a lowered kernel on a GPU (MCFuser, section 4.2, with the terms that its model lacks).

    T = launch + rounds of blocks + the busiest resource

Resources: device memory, the shared cache (by the sectors that loads touch, for the first time and again), the ports through which
multiprocessors take from it, matrix units at the tile's shape, the shared memory from which they read operands, vector and
special-function units, registers that are spilled in the trips of a loop, and the latency of trips that wait for their loads. Those
of one multiprocessor are shared by the blocks that live on it; a smooth maximum joins them, since no two overlap perfectly. The
numbers for products by Triton are fitted to 1507 kernels of 23 programs on an H200 (`benchmarks/tree_prices.py`: schedules drawn
from the space of the search), those of ports, of the cache's latency and of axes that become one to 1964 kernels of 17 others,
those of float32 operands and of few warps to 512 kernels of 27 others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasfuse.device import Device
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.ir.unrolling import switched
from pallasfuse.price import gpu_clusters, gpu_copies, gpu_warpgroups
from pallasfuse.price.block_products import Product
from pallasfuse.price.block_work import BlockWork, examine
from pallasfuse.price.dependent_steps import clocks_of_trip
from pallasfuse.price.gpu_library import UNALIGNED_LOADS
from pallasfuse.price.gpu_products import (
    OF_LIBRARY,
    OF_LIBRARY_ROUNDED,
    matrix_clocks,
    on_matrix_units,
    through_shared_memory,
)
from pallasfuse.price.gpu_traffic import SECTOR_BYTES, kept_near, largest_by_tensor, moved_by, through_port
from pallasfuse.price.terms import Price, Term
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.resources.block import THREADS, Resources
from pallasfuse.resources.exponentials import all_by_instruction
from pallasfuse.resources.thread_layouts import VECTOR_BYTES

_OVERLAP = 4.0
"""The exponent of the smooth maximum: 1 would be a sum, infinity a maximum."""
_OVERLAP_OF_WARPGROUPS = 3.0
"""Kernels for warpgroups have this exponent. (161 of 92 programs in `benchmarks/results` take 1.11 times what is predicted, 18 of
attention 0.98 times, in the geometric mean, on an H100 and an H200; with 4 it would be 1.20 and 1.07, with 2 0.91 and 0.78.)"""
_ALONE = 2.0
"""The same of what a block computes that is alone on its multiprocessor, and waits for its own products."""
_WAITING, _WAITING_ALONE = 2.0, 1.5
"""The same of blocks that wait for their loads, too, as no trip begins those of later ones; the second also of clusters that all
begin together, as no cluster loads while another one computes, of single blocks that store in their trips, and of those that reduce
what they load at once in short pieces."""
_LINE_BYTES = 128
"""The bytes of a line of a cache. Pieces that are shorter are requests of their own. (36 norms of groups of channels on an H100, of
which nine were priced at less than 0.6 of what they take; three are since, in several trips.)"""
_FILLING = 0.25
"""The share of a trip's work that nothing overlaps where a multiprocessor begins and ends: short kernels of products are little
else. (273 kernels of 21 functions, measured on an H200.)"""
_SPILLED_BYTES = 30.0
"""Bytes of spilled registers that a multiprocessor writes and reads in a clock."""
_CACHED_SHARE = 0.8
"""The part of the cache that stays until it is read again."""
_HALF_OF_CACHE = 0.5
"""The part of the cache beyond which bytes take as long as from memory, though they stay. (Rows of 10 to 33 MB on an H100, read
and written.)"""
_ALL_STAYS, _NONE_STAYS = 0.75, 1.0
"""The shares of the cache up to which the next call finds all that products have read, and from which it finds nothing of it: what
is read evicts what is to be read next. (612 launches of 17 products of 16 to 128 rows with matrices of 8 to 67 MB on an H200,
`few_rows.py --near-cache`. XLA's own with 42 MB takes as long as from memory: 11.5 us, where the fastest launch takes 9.4.)"""
_CACHED_AHEAD = 1.15
"""The rate at which products take from the cache what their trips ask for ahead, by that for others. (The fastest third of these
launches and of 1127 of 18 other products takes 0.97 of what is predicted, in the geometric mean; without this and what the cache
loses by degrees, 0.94.)"""
_REDUCED_CLOCKS = 10.0
"""Clocks of a multiprocessor that each warp takes in a reduction over all threads of a block: shuffles, and a barrier."""
_SCATTERED_CLOCKS = 3.0
"""Clocks of a multiprocessor for one load of less than a sector."""
_STORED_IN_TRIPS = 0.6
"""The share of the memory's rate that stores reach in the trips of a loop that multiplies matrices. (36 kernels that store one to
four functions of a product, in 125 schedules on an H100.)"""
_TRIP_US, _WAITED = 0.1, 0.25
"""A trip whose loads were begun before takes the first, and waits for the second, a share of the latency, if one trip is ahead."""
_FULL_WARPS = 8
"""Warps on a multiprocessor that hide each other's latencies."""
_STARTED_US = 1.2
"""The time that a kernel for warpgroups takes before its first copy, for barriers and for descriptors of arrays."""
_STARTED_BY_WARPS_US = 0.2
"""Other kernels of ours take so much longer to start than an empty kernel of XLA. (144 kernels without products on an H100, most
of them of a few microseconds, took 1.17 times what was predicted without this.)"""
_FEW_BLOCKS = 2
"""Blocks on a multiprocessor that do not fill it while each waits for its own loads."""
_BLOCKS = 16
"""Blocks on a multiprocessor, beyond which more are no faster."""


@dataclass(frozen=True, slots=True)
class Emission:
    """How a target's emitter writes kernels, as far as the price is concerned."""

    warpgroups: bool = False
    """Copies and products run asynchronously, warpgroups own 64 rows each."""
    longest: int = 0
    """The most positions that a product of warpgroups sums over in a trip, unless it takes its operands in slices."""
    together: bool = False
    """All programs are one launch, whose blocks share their memory."""


def price(
    programs: Sequence[TileProgram], device: Device, emission: Emission, held: Sequence[Resources] | None = None
) -> Price:
    """The price of the programs of one kernel, one after the other."""
    works = [_work(p, spreads=not (emission.warpgroups or emission.together)) for p in programs]
    slices = [gpu_warpgroups.taken_in_slices(p, emission.longest) if emission.warpgroups else () for p in programs]
    works = [gpu_warpgroups.in_every_trip(w, of) if of else w for w, of in zip(works, slices, strict=True)]
    of_each: Sequence[Resources | None] = held if held is not None else [None] * len(programs)
    if emission.together:
        return _one(programs, works, device, emission, max((r for r in of_each if r), key=_registers, default=None))
    prices = [
        _one([p], [w], device, emission, r, in_slices=bool(s))
        for p, w, r, s in zip(programs, works, of_each, slices, strict=True)
    ]
    return sum(prices[1:], prices[0])


def _work(program: TileProgram, *, spreads: bool) -> BlockWork:
    """Returns the work of a block. Positions of an axis that is written out lie together in memory (`Access.one_by_one`)."""
    own = as_threads_run_it(program) if spreads else switched(program)
    work = examine(own.program, spreads=spreads)
    if not program.unrolled:
        return work
    tensors = {t.name: t for t in (*program.inputs, *program.outputs)}
    accesses = [
        a.one_by_one(tensors[a.tensor], program.unrolled)
        if a.tensor in tensors
        else a  # rows of a table have no tensor
        for a in examine(program).accesses
    ]
    if sum(a.is_store and a.passes > 1 for a in accesses) > 1:
        accesses = [a.beside_others() for a in accesses]
    return replace(work, accesses=accesses)


def _one(
    programs: Sequence[TileProgram],
    works: Sequence[BlockWork],
    device: Device,
    emission: Emission,
    held: Resources | None,
    *,
    in_slices: bool = False,
) -> Price:
    blocks = works[0].blocks
    processors = device.multiprocessors
    occupancy = _occupancy(programs, works[0], device, emission, held)
    on_one = math.ceil(blocks / processors)
    uneven = max(on_one * processors / blocks, *(_imbalance(w, blocks, processors) for w in works))
    rounds = math.ceil(blocks / (processors * occupancy))
    clock_us = 1.0 / (device.clock_ghz * 1e3)

    in_cache = device.cache_bytes * _CACHED_SHARE / max(1.0, min(blocks, processors * occupancy))
    moved = [moved_by(w, in_cache, kept=emission.together, ahead=emission.warpgroups) for w in works]
    unique = largest_by_tensor(moved) if emission.together else sum(m.memory for w in moved for m in w)
    sectors = (
        largest_by_tensor([[m for m in of if not m.is_store] for of in moved], sectors=True)
        if emission.together  # whose copy engine stores beside what is loaded
        else sum(m.sectors for w in moved for m in w)
    ) * blocks
    by_warps = not (emission.warpgroups or emission.together)
    # a block of a cluster asks for its whole part at once, others for a trip at a time
    of_block = (
        gpu_clusters.kept_bytes(works[0]) if emission.together else sum(map(_bytes_in_flight, works)) / len(works)
    )
    ahead = programs[0].prefetch_distance
    in_flight = of_block * min(blocks, processors * occupancy) * (1 + ahead)
    cached = unique <= _CACHED_SHARE * device.found_bytes
    latency_us = device.cache_latency_us if cached and by_warps else device.latency_us
    asked = in_flight / latency_us * 1e-3
    # whose steps wait for what they ask for (`_steps_us`)
    recurrent = by_warps and all(p.is_recurrent for p in programs)
    rate = min(device.memory_gb_s, asked) if in_flight and not recurrent else device.memory_gb_s
    loaded = sum(m.memory for w in moved for m in w if not m.is_store)
    memory_us = 1e-3 * unique / min(rate, device.cache_gb_s)
    of_products = by_warps and any(w.products for w in works)
    if of_products:  # what is stored waits for no loads in flight
        at_whole_rate = unique + (1 / _STORED_IN_TRIPS - 1) * sum(map(_stored_in_trips, works))
        slowest = min(device.memory_gb_s, device.cache_gb_s)
        memory_us = max(1e-3 * loaded / min(rate, device.cache_gb_s), 1e-3 * at_whole_rate / slowest)
    # nothing of what is cached is in the memory: what is left of the term is that too little is asked for at a time
    waits = loaded > 0 and not recurrent
    too_little_us = max(0.0, 1e-3 * loaded / asked - 1e-3 * loaded / device.cache_gb_s) if waits else 0.0
    lost = _lost(unique, device) if of_products else 1.0 - cached
    memory_us = lost * memory_us + (1.0 - lost) * too_little_us
    if by_warps and any(p.row_bytes < VECTOR_BYTES for w in works if w.stages > 1 for p in w.products):
        memory_us /= UNALIGNED_LOADS
    spilled = 0.0 if held is None else sum(_spilled(held, w) for w in works) * blocks
    through_memory = 0.0 if held is None else spilled * _uncached(held, min(blocks, processors * occupancy), device)
    memory_us += 1e-3 * through_memory / device.memory_gb_s
    again = 0.0 if emission.together else sum(max(0.0, m.ahead * blocks - m.memory) for w in moved for m in w)
    near = kept_near(moved, blocks, device) if by_warps else frozenset()
    sectors -= sum(max(0.0, m.sectors * blocks - m.memory * processors) for w in moved for m in w if m.tensor in near)
    cache_us = device.from_cache_us(max(0.0, sectors - again), again)
    if of_products:
        early = sum(min(m.memory, m.ahead * blocks) for w in moved for m in w)
        cache_us -= 1e-3 * (1.0 - lost) * early * (1.0 - 1.0 / _CACHED_AHEAD) / device.cache_gb_s
    elif cached and by_warps:
        left = max(0.0, unique - _HALF_OF_CACHE * device.found_bytes)
        cache_us += 1e-3 * left * max(0.0, 1 / device.memory_gb_s - 1 / device.cache_gb_s)

    shares = blocks / processors * uneven  # blocks that the busiest multiprocessor runs
    through = [] if emission.together else [through_port(m, near) for w in moved for m in w]
    port_us = shares * clock_us * sum(through) / device.port_bytes if device.port_bytes else 0.0

    scattered = sum(a.scattered(SECTOR_BYTES) for w in works for a in w.accesses) * blocks
    scattered_us = scattered / processors * _SCATTERED_CLOCKS * clock_us
    matrix_us = shares * clock_us * sum(_matrix_clocks(w, device, emission) for w in works)
    multiplies = any(_by_matrix_units(w, emission) for w in works)
    operations = [w.operations for w in works]
    operands_us = staged = 0.0
    if not emission.warpgroups:  # whose products read what the copy engine has laid out for them
        clocks, staged = through_shared_memory(
            [(p, w.warps) for w in works for p in w.products], ahead=works[0].stages > 1
        )
        operands_us = shares * clock_us * clocks
    latency_factor = max(1.0, _FULL_WARPS / (min(occupancy, on_one) * works[0].warps)) if by_warps else 1.0
    by_library = by_warps or (emission.together and not all_by_instruction(programs))
    simple = [o.simple + o.branching + (o.library if by_library else 0.0) for o in operations]
    vector_us = (
        shares
        * clock_us
        * (latency_factor * sum(simple) + staged)
        * processors
        / (device.vector_gop_s / device.clock_ghz)
    )
    if emission.together:
        exchanged = _REDUCED_CLOCKS * gpu_clusters.reductions_over_threads(programs) * works[0].warps
    else:
        exchanged = sum(_REDUCED_CLOCKS * w.reductions * w.warps + w.shuffles for w in works)
    vector_us += shares * clock_us * exchanged
    special = latency_factor * sum(o.special + o.converted for o in operations)
    special_us = shares * clock_us * special * processors / (device.special_gop_s / device.clock_ghz)
    spilled_us = spilled / processors * uneven / _SPILLED_BYTES * clock_us
    block_us = (
        gpu_clusters.block_us(programs, works, rounds)
        if emission.together
        else sum(_chain_us(w, device, emission, latency_us, ahead) for w in works)
    )
    if recurrent:
        block_us = sum(_steps_us(p, w, latency_us, clock_us) for p, w in zip(programs, works, strict=True))
    chain_us = rounds * block_us
    started_us = _STARTED_US if emission.warpgroups else _STARTED_BY_WARPS_US if by_warps else 0.0
    launch_us = device.kernel_us + device.launch_us + started_us
    copies = gpu_copies.copied if emission.warpgroups else gpu_copies.with_longer_rows
    copied = [] if emission.together else [c for p in programs for c in copies(p)]
    copies_us = sum(c.us(device) + device.kernel_us + device.launch_us for c in copied)
    begun = float(processors * occupancy if programs[0].persistent else blocks)
    moving = (
        Term("device memory", unique + through_memory, "B", memory_us), Term("cache sectors", sectors, "B", cache_us),
        Term("multiprocessors' ports", sectors, "B", port_us), Term("scattered loads", scattered, "sectors", scattered_us),
        # one in each clock of the whole device (7 sizes of tiny products on an H100)
        Term("blocks that begin", begun, "blocks", begun * clock_us),
        Term("waiting for loads", rounds * sum(w.trips + w.started + 1 for w in works), "trips", chain_us),
    )  # fmt: skip
    computing = (
        Term("matrix units", sum(p.flops for w in works for p in w.products) * blocks, "flop", matrix_us),
        Term("operands in shared memory", sum(len(w.products) for w in works), "products", operands_us),
        Term("vector units", (sum(simple) + staged) * blocks, "op", vector_us),
        Term("special functions", sum(o.special + o.converted for o in operations) * blocks, "op", special_us),
        Term("spilled registers", spilled, "B", spilled_us),
    )  # fmt: skip
    others = (
        Term("copies of arguments", sum(c.bytes for c in copied), "B", copies_us),
        Term("launch", 1, "kernel", launch_us),
    )
    overlap = _overlap(works[0], min(occupancy, on_one), emission, held)
    if recurrent:
        busy = _joined([t.us for t in (*moving, *computing)], _WAITING)
    elif by_warps and 1 < min(occupancy, on_one) <= _FEW_BLOCKS and works[0].trips > 1 and not works[0].products:
        # while a trip waits for its loads, too few other blocks use what it leaves
        begin_us = rounds * sum((1 + w.started) * latency_us for w in works)
        *moved_us, waited_us = (t.us for t in moving)
        busy = waited_us - begin_us + _joined([begin_us, *moved_us, *(t.us for t in computing)], _OVERLAP)
    elif in_slices:  # copies run beside the long products of a trip, what follows these beside none
        busy = _joined([_joined([t.us for t in computing], _WAITING_ALONE), *(t.us for t in moving)], _OVERLAP)
    elif by_warps and _begins_ahead(works[0]) and works[0].products:
        busy = _joined([_joined([t.us for t in computing], overlap), *(t.us for t in moving)], _OVERLAP)
        waiting = _WAITING_ALONE if min(occupancy, on_one) == 1 else _WAITING
        behind = _joined([t.us for t in (*moving, *computing)], waiting)
        busy += _outside_loops(works[0]) * (behind - busy)
    else:
        busy = _joined([t.us for t in (*moving, *computing)], overlap)
    if by_warps and multiplies and on_one == 1 and any(map(_stored_in_trips, works)):
        # nothing else runs while a trip turns its results for the stores
        busy = max(busy, _joined([t.us for t in (*moving, *computing)], _WAITING_ALONE))
    if by_warps and not multiplies and any(map(_reduces_pieces, works)):
        busy = max(busy, _joined([t.us for t in (*moving, *computing)], _WAITING_ALONE))
    if by_warps and multiplies and not recurrent:
        # the first trip's loads and the last one's results have nothing beside them
        every = [t.us for t in (*moving, *computing)]
        busy += _FILLING * (sum(every) - max(every)) / (on_one * max(1.0, works[0].trips))
    if (
        emission.together
    ):  # the first blocks begin together: they wait, compute and store at the same time, later ones do not
        first = min(1.0, processors * occupancy / blocks)
        busy += first * (_joined([t.us for t in (*moving, *computing)], _WAITING_ALONE) - busy)
    return Price(busy + copies_us + launch_us, (*moving, *computing, *others))


def _lost(moved: float, device: Device) -> float:
    """Returns the share of the bytes that products read and write which the cache has lost when the next call reads them.

    The cache keeps less than in proportion where the arguments and results of a program are more than it holds. (This is an
    estimate: the products that were measured have one or two matrices.)
    """
    left = device.found_bytes * device.found_share
    taken = moved / left if left else math.inf
    return min(1.0, max(0.0, (taken - _ALL_STAYS) / (_NONE_STAYS - _ALL_STAYS)))


def _matrix_clocks(work: BlockWork, device: Device, emission: Emission) -> float:
    """Returns the clocks of a multiprocessor for the products of a block. What trips wait for is a term of its own."""
    ahead = work.stages > 1 and not work.waits
    products = _by_matrix_units(work, emission)
    return sum(matrix_clocks(p, work.warps, device, warpgroups=emission.warpgroups, ahead=ahead) for p in products)


def _by_matrix_units(work: BlockWork, emission: Emission) -> list[Product]:
    return [p for p in work.products if emission.warpgroups or on_matrix_units(p)]


def _joined(times: Sequence[float], overlap: float) -> float:
    """The smooth maximum of times that overlap: their sum where the exponent `overlap` is 1, the largest where it is infinite."""
    return float(sum(us**overlap for us in times) ** (1 / overlap))


def _begins_ahead(work: BlockWork) -> bool:
    """Do trips of a loop begin the loads of later ones?"""
    return work.stages > 1 and any(a.pipelined for a in work.accesses) and not work.waits and not work.beside


def _reduces_pieces(work: BlockWork) -> bool:
    """Does a block reduce what it loads, and is most of what it moves in pieces shorter than a line of a cache?"""
    moved = [(a.bytes, min(a.part_bytes or a.run_bytes, a.run_bytes)) for a in work.accesses]
    in_pieces = sum(size for size, run in moved if run < _LINE_BYTES)
    return work.reductions > 0 and 2 * in_pieces > sum(size for size, _ in moved)


def _outside_loops(work: BlockWork) -> float:
    """The share of what a block loads and stores that stands outside of its loops.

    No trip begins it early: a block has nothing to compute until its first values are there, and while its results leave. Others
    on its multiprocessor may, as far as they did not begin together.
    """
    moved = sum(a.bytes for a in work.accesses)
    return sum(a.bytes for a in work.accesses if a.loop == 0) / moved if moved else 0.0


def least_us(moved: float, flops: float, device: Device, *, half: bool = True) -> float:
    """The least price of a kernel without warpgroups of its own that moves so many bytes, once, and multiplies matrices.

    half: may some of these matrices have elements of two bytes, or fewer?
    """
    lost = _lost(moved, device)
    cache_us = 1e-3 * moved * (lost + (1.0 - lost) / _CACHED_AHEAD) / device.cache_gb_s
    memory_us = 1e-3 * moved * lost / device.memory_gb_s
    rates = device.matmul_tflop_s
    of_half = max((rates[t] for t in ("float16", "bfloat16") if t in rates), default=max(rates.values()))
    rate = of_half * OF_LIBRARY if half or "tf32" not in rates else rates["tf32"] * OF_LIBRARY_ROUNDED
    matrix_us = 1e-6 * flops / rate
    busy = sum(us**_OVERLAP for us in (memory_us, cache_us, matrix_us)) ** (1 / _OVERLAP)
    return float(busy + device.kernel_us + device.launch_us)


def _overlap(work: BlockWork, resident: int, emission: Emission, held: Resources | None) -> float:
    """The exponent by which the resources of a kernel overlap; of one whose loads begin ahead, those that compute.

    resident: blocks on a multiprocessor.
    """
    if emission.together:
        return gpu_clusters.overlap(resident)
    if emission.warpgroups:
        return _OVERLAP_OF_WARPGROUPS
    if held is None:
        return _OVERLAP
    ahead = _begins_ahead(work)
    if resident == 1 and (work.trips > 1 or work.products):
        return _ALONE if ahead else _WAITING_ALONE
    return _OVERLAP if ahead or not work.products else _WAITING


def _spilled(held: Resources, work: BlockWork) -> float:
    """The bytes that a block writes and reads, as its threads have too few registers."""
    return float(sum(s.bytes * work.executions.get(s.path, 0.0) for s in held.spills)) * held.threads


def _uncached(held: Resources, resident: int, device: Device) -> float:
    """The share of spilled values that the cache does not hold until they are read: each thread of the blocks that live at a time
    has places of its own in memory.

    resident: those blocks.
    """
    kept = held.kept_bytes * held.threads * resident
    return max(0.0, 1.0 - _CACHED_SHARE * device.cache_bytes / kept) if kept else 0.0


def _registers(held: Resources) -> int:
    return held.registers


def _stored_in_trips(work: BlockWork) -> float:
    """The bytes that all blocks store in their loops."""
    return sum(min(a.bytes * work.blocks, a.unique_bytes) for a in work.accesses if a.is_store and a.loop)


def _imbalance(work: BlockWork, blocks: int, processors: int) -> float:
    """How much longer than the mean the busiest multiprocessor works, where blocks differ in their trips."""
    if work.trips == 0 or blocks <= 0:
        return 1.0
    longest = work.most_trips / max(work.trips, 1e-9)
    return max(1.0, longest * processors / max(blocks, processors))


def _occupancy(
    programs: Sequence[TileProgram], work: BlockWork, device: Device, emission: Emission, held: Resources | None
) -> int:
    if held is not None and _by_matrix_units(work, emission):
        return max(1, held.resident_blocks(device.shared_memory_bytes))
    if programs[0].persistent:
        return 1
    if emission.together:
        return gpu_clusters.resident_blocks(programs, device)
    threads = 32 * work.warps + (128 if emission.warpgroups else 0)
    shared = sum(
        a.tile_bytes * (work.stages if a.pipelined else 1) for a in work.accesses if a.pipelined or emission.warpgroups
    )
    by_shared = int(device.shared_memory_bytes // shared) if shared else _BLOCKS
    by_registers = _BLOCKS if held is None else held.likely_blocks  # the bound on registers is too careful here
    return max(1, min(THREADS // threads, by_shared, by_registers, _BLOCKS))


def _bytes_in_flight(work: BlockWork) -> float:
    """The bytes that a block waits for at a time."""
    loads = [a for a in work.accesses if not a.is_store]
    first = sum(a.tile_bytes for a in loads if a.times <= 1)
    return max(first, work.loads_in_a_trip * (max(1, work.stages - 1) if any(a.pipelined for a in loads) else 1), 128.0)


def _steps_us(program: TileProgram, work: BlockWork, latency_us: float, clock_us: float) -> float:
    """The least time of a block whose trips are steps: each takes as long as its longest chain of operations."""
    ahead = program.prefetch_distance
    arrived_us = _WAITED * latency_us / ahead if ahead else latency_us
    trip_us = clocks_of_trip(program, arrived_us / clock_us) * clock_us
    return (1 + work.started) * latency_us + work.trips * trip_us


def _chain_us(work: BlockWork, device: Device, emission: Emission, latency_us: float, ahead: int) -> float:
    """The least time of a block: its trips wait for their loads, one after the other, each for `latency_us`.

    ahead: as `TileProgram.prefetch_distance`.
    """
    pipelined = any(a.pipelined for a in work.accesses) and not work.waits
    if emission.warpgroups:
        wait = device.trip_us if pipelined else latency_us
    else:
        begun = ahead or (max(1, work.stages - 1) if pipelined else 0)
        wait = _TRIP_US + _WAITED * latency_us / begun if begun else latency_us
    beside = work.beside * latency_us if pipelined and not emission.warpgroups else 0.0
    return (1 + work.started) * latency_us + work.trips * wait + beside
