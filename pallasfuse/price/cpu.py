"""Prices on a CPU: XLA's own kernels, and tile programs as loops of XLA.

A kernel of XLA is a *thunk*: a fused loop over all points, spread over the cores where it is large. Buffers
beyond the size that the allocator keeps are pages that the system makes anew at every call: on many machines they cost
more than the work on them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, innermost, volume
from pallasfuse.ir.expr import Apply, Expr
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import AND, MAX, MIN, OR, SUM
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.price.block_products import Product
from pallasfuse.price.block_work import BlockWork, Examiner, examine
from pallasfuse.price.operations import ROUNDED, Operations, count
from pallasfuse.price.terms import Price, Term, total
from pallasfuse.price.xla_forms import Copy, LibraryProduct, LoopFusion, Opaque, XlaKernel
from pallasfuse.price.xla_library import with_inverses
from pallasfuse.price.xla_reductions import order_of

NEW_PAGES = "new pages"
"""The name of the term for memory that the system makes anew."""
_SHARED_OPERATIONS = 1 << 18
"""Operations of a loop that XLA spreads over the cores."""
_PACKED_NS = {False: 0.1, True: 0.3}
"""For each element of the right operand, what the library takes to read it and bring it into panels, on one core; by whether
its own axes lie before the contracted ones."""
_PACKED_HALF_NS = 0.5
"""The library takes so long for each element of a right operand of a half type whose own axes lie before the contracted ones, on
one core."""
_TURNED_HALF_RATE = 0.5
"""A product of half types whose right operand lies like that reaches this share of its rate: the library brings the operand
into panels again and again."""
_LEFT_NS = 0.4
"""For each element of a left operand that lies with the contracted axes before its own."""
_TURNED_VECTOR_NS = 0.55
"""For each element of a matrix that lies like that, what one core takes to multiply it with one vector."""
_SHORT_SUM = 8
"""Elements of a sum that a product takes the time of before it runs at its full rate."""
_MATRIX_NS, _TINY_MATRIX_NS, _LIBRARY_FROM, _MOST_IN_LOOPS = 60.0, 490.0, 8, 3
"""The library takes the first number of nanoseconds for each matrix of a batch. It does not compute those whose sides are all
shorter than the third number: each takes the second, but XLA makes loops of sums that have no more terms than the fourth.
(Float32 and bfloat16 of 37 shapes on two cores, 2026-11-29: 30 to 1200, the larger the dearer; 480 to 580 in batches of 1000 and
more.)"""
_STRIDED_NS = 1.6
"""For each element that is read in strides, on one core."""
_SCALAR_NS = 4.3
"""The time of one core for each element that a loop without vectors looks at, like that for the position of a maximum. (Rows of 512
elements of float32, 2026-11-28.)"""
_UNROLLED, _NOT_UNROLLED, _UNROLLED_NS = 16, 32, 0.25
"""Rows of up to the first number of elements are written out, and neighbouring ones are looked at together, which takes one core so
long for each element; rows of the second number and more are not. (Rows of 2 to 128 elements of float32 on two cores; between the
two it is one or the other.)"""
_NEIGHBOUR_NS = {SUM: 0.4, MAX: 0.7, MIN: 0.7, OR: 0.25, AND: 0.25}
"""The time of one core for each of neighbouring integers or truth values that a loop reduces, in rows that are not written out.
(Rows of 21 to 512 on one core, 2026-11-28: sums 0.13 to 0.36, of choices up to 1.9; largest and least 0.17 to 1.4; of truth values
0.18 to 0.39.)"""
_FEWER_ROWS_FIRST_NS = 0.3
"""For each product of neighbours that a library sums, the time by which it takes longer if the first factor has fewer rows than the
second. (Float32 of 14 shapes on two cores, 2026-11-29: 0.03 to 0.6.)"""
_LAST_SUM_NS = 5.0
"""For each sum of neighbours, what it takes to add up the lanes of a vector, on one core."""


def of_kernel(kernel: XlaKernel, device: Device) -> Price:
    """The price of one of XLA's kernels."""
    match kernel:
        case LibraryProduct():
            products = [
                *_product(
                    kernel.batch,
                    kernel.rows,
                    kernel.columns,
                    kernel.summed,
                    kernel.operand_dtype,
                    device,
                    turned=kernel.rhs_turned,
                ),
                _strided(_in_columns(kernel, device), 1),
                _of_batch(kernel.batch, kernel.rows, kernel.columns, kernel.summed),
            ]
            right = kernel.operands[-1][1] if kernel.operands else 0.0
            products[1] = _read_first(products[1], right, device)
            moved = memory_term("memory", kernel.read_bytes + kernel.written_bytes, device)
            copies = [_copied(c, device) for c in kernel.copies]
            own = thunk(_cores_for(2.0 * kernel.flops, device), device)
            return total([Price(max(sum(t.us for t in products), moved.us) + own.us, (*products, moved, own)), *copies])
        case LoopFusion():
            return _fusion(kernel, device)
        case Opaque():
            moved = memory_term("memory", kernel.read_bytes + kernel.written_bytes, device)
            cores = _cores_for(kernel.looked_at, device)
            own = thunk(cores, device)
            each_ns = _looking_ns(kernel.looked_at_for_each) / cores
            scalar = Term("scalar loops", kernel.looked_at, "elements", 1e-3 * each_ns * kernel.looked_at)
            return Price(max(moved.us, scalar.us) + own.us, (moved, scalar, own))
        case _:
            assert_never(kernel)


def _of_batch(batch: float, rows: float, columns: float, summed: float, times: float = 1.0) -> Term:
    """Returns the time that the matrices of a batch take besides their products: tiny ones are computed one after the other."""
    each_ns = _MATRIX_NS
    if max(rows, columns, summed) < _LIBRARY_FROM:
        each_ns = _TINY_MATRIX_NS if summed > _MOST_IN_LOOPS else 0.0
    matrices = times * batch if batch > 1 else 0
    return Term("matrices of a batch", matrices, "", 1e-3 * each_ns * matrices)


def _looking_ns(row: float) -> float:
    """Returns the nanoseconds in which one core looks at one element of a row of so many."""
    share = min(1.0, max(0.0, (row - _UNROLLED) / (_NOT_UNROLLED - _UNROLLED)))
    return _UNROLLED_NS + share * (_SCALAR_NS - _UNROLLED_NS)


def _in_columns(product: LibraryProduct, device: Device) -> float:
    """Counts the elements that are brought into panels in strides: of the left operand, and of the right one if it is turned, too.

    Another library does so, which shares long sums among the cores instead, each of them with rows of its own.
    """
    long = product.summed > 2 * device.multiprocessors * max(product.rows, product.columns)
    if not product.in_columns or long:
        return 0.0
    # 0.8 to 3.8 ns for each element of the right one, for six shapes on two cores
    sides = product.rows + (product.columns if product.rhs_turned else 0)
    return float(product.batch * product.summed * sides)


def pages(stored: Iterable[float], device: Device) -> Price:
    """The price of buffers that are made anew at every call."""
    fresh = sum(b for b in stored if b > device.kept_bytes)
    term = Term(NEW_PAGES, fresh, "B", 1e-3 * fresh / device.page_gb_s)
    return Price(term.us, (term,))


def _read_first(packed: Term, operand_bytes: float, device: Device) -> Term:
    """The time to pack an operand, no shorter than that to read it: nothing is multiplied meanwhile."""
    rate = device.cache_gb_s if operand_bytes <= device.cache_bytes else device.memory_gb_s
    return Term(packed.name, packed.amount, packed.unit, max(packed.us, 1e-3 * operand_bytes / rate))


def thunk(cores: int, device: Device) -> Term:
    """One thunk, and what it takes to spread it over the cores."""
    return Term("thunks", 1, "", device.kernel_us + (device.launch_us if cores > 1 else 0.0))


def memory_term(name: str, moved: float, device: Device) -> Term:
    cached = min(moved, device.cache_bytes)
    return Term(name, moved, "B", 1e-3 * (cached / device.cache_gb_s + (moved - cached) / device.memory_gb_s))


def _strided(elements: float, cores: int) -> Term:
    return Term("strided reads", elements, "elements", 1e-3 * _STRIDED_NS * elements / cores)


def _copied(copy: Copy, device: Device) -> Price:
    elements = 0.0 if copy.in_rows else copy.moved_bytes / 8
    strided = _strided(elements, device.multiprocessors)
    moved, own = memory_term("memory", copy.moved_bytes, device), thunk(device.multiprocessors, device)
    return Price(max(moved.us, strided.us) + own.us, (moved, strided, own))


_SLICED = 0.3
"""The share of the cache's bandwidth that the copy of a slice reaches."""
_RUN_BYTES = 16.0
"""Slices are copied run by run: each takes as long as so many bytes more."""
_CACHED_SHARE = 0.25
"""A block finds its tiles in the last cache again if they take at most this part of it: what is made from them is there, too."""
_OWN_SHARE, _OWN_RATE = 1 / 16, 2.0
"""The part of the last cache that a core's own cache is, about, and how much faster that is."""
_UNROUNDED = frozenset({"convert", "select", "max", "min", "neg", "abs", "sign"})
"""Operations whose results need no rounding, or are counted with it."""
_PRODUCT_US = 20.0
"""The library takes so long to share one product among the cores."""


def _fusion(fusion: LoopFusion, device: Device) -> Price:
    seen: set[Expr] = set()
    bodies = [with_inverses(b) for b in fusion.bodies]
    work = count(bodies, lambda axes: float(math.prod(a.extent for a in axes)), seen)
    if not fusion.by_library:
        work += _roundings(seen)
    work += Operations(
        float(sum(math.prod(a.extent for a in (*n.axes, *n.reduced)) for n in fusion.roots if n.is_reduction))
    )
    strided = fusion.strided_elements
    cores = _cores_for(work.simple + work.special + strided, device)
    sums = float(sum(math.prod(a.extent for a in n.axes) for n in fusion.roots if n.is_reduction))
    reduced_ns = 0.0 if fusion.by_library else sum(map(_neighbours_ns, fusion.roots, fusion.bodies))
    # loops, which take products of one row and a transposed matrix, do not mind
    fewer = sum(map(_fewer_rows_first, fusion.roots, fusion.bodies)) if fusion.by_library else 0.0
    terms = (
        *_arithmetic(work, cores, device), _strided(strided, cores),
        Term("products with fewer rows first", fewer, "", 1e-3 * _FEWER_ROWS_FIRST_NS * fewer),
        Term("reduced neighbours", reduced_ns, "ns", 1e-3 * reduced_ns / cores),
        Term("transposed elements", fusion.turned, "", 1e-3 * _TURNED_NS * fusion.turned),
        Term("sums of lanes", sums, "", 1e-3 * _LAST_SUM_NS * sums / cores),
        Term("library calls", fusion.calls, "", device.call_us * fusion.calls),
        memory_term("memory", fusion.read_bytes + fusion.written_bytes, device),
    )  # fmt: skip
    own = thunk(cores, device)
    return Price(_joined(terms) + own.us, (*terms, own))


def _fewer_rows_first(nest: Nest, body: Expr) -> float:
    """Counts the products of neighbours that a library sums, where the first factor has fewer rows than the second.

    Not those of a product that the program has as one: it reads the matrix row by row, whichever operand is first. (One row times
    128 x 256 to 4096 x 4096, float32 on two cores, 2026-11-30: 0.03 to 0.09 ns an element.)
    """
    is_sum = nest.reducer == SUM and nest.precision is None
    if not is_sum or nest.dtype != "float32" or not isinstance(body, Apply) or body.op != "mul":
        return 0.0
    space, (first, second) = (*nest.axes, *nest.reduced), body.args
    last = innermost(order_of(space, body))
    if last is None or last not in nest.reduced or last not in first.axes & second.axes:
        return 0.0
    kept = frozenset(nest.axes)
    return volume(space) if volume(first.axes & kept) < volume(second.axes & kept) else 0.0


def _neighbours_ns(nest: Nest, body: Expr) -> float:
    """Returns the nanoseconds in which one core reduces neighbouring integers or truth values one after the other."""
    each_ns = _NEIGHBOUR_NS.get(nest.reducer) if nest.reducer is not None and not dtypes.is_float(nest.dtype) else None
    if each_ns is None:
        return 0.0
    space = (*nest.axes, *nest.reduced)
    last = innermost(order_of(space, body))
    row = last.extent if last is not None and last in nest.reduced else 0
    return each_ns * volume(space) if row > _UNROLLED else 0.0


_TURNED_NS = 0.5
"""One element of a transposed matrix that a vector is multiplied with: no library's, but a loop on one core, one element after the
other. (Four shapes of float32 of 1 to 12 million elements on one machine, from 0.5 to 1.1, where `x @ w.T` is written; some others
take more.)"""


def _roundings(nodes: Iterable[Expr]) -> Operations:
    """The instructions by which loops round every result of arithmetic in a half type."""
    elements = sum(
        math.prod(a.extent for a in n.axes)
        for n in nodes if isinstance(n, Apply) and n.dtype in dtypes.HALF and n.op not in _UNROUNDED
    )  # fmt: skip
    return ROUNDED.times(float(elements))


def _cores_for(operations: float, device: Device) -> int:
    """The cores that XLA spreads a loop over, by its operations."""
    return device.multiprocessors if operations >= _SHARED_OPERATIONS else 1


def _arithmetic(work: Operations, cores: int, device: Device) -> tuple[Term, Term, Term]:
    vector = Term("vector units", work.simple, "op", 1e-3 * work.simple / (device.vector_gop_s * cores))
    special = Term("special functions", work.special, "op", 1e-3 * work.special / (device.special_gop_s * cores))
    called = Term("functions of the C library", work.called, "clocks", 1e-3 * work.called / (device.clock_ghz * cores))
    return vector, special, called


def _joined(terms: Sequence[Term]) -> float:
    """Arithmetic adds up; traffic overlaps with it."""
    memory = sum(t.us for t in terms if t.name == "memory")
    return max(memory, sum(t.us for t in terms) - memory)


def _product(
    batch: int, rows: int, columns: int, summed: int, dtype: str, device: Device, *, turned: bool = False
) -> tuple[Term, Term]:  # fmt: skip
    """A library's product, shared by the cores where there are enough operations: packing its right operand, and multiplying.

    turned: the right operand lies with its own axes before the contracted ones.
    """
    flops = 2.0 * batch * rows * columns * summed
    rate = 1e3 * device.matmul_tflop_s.get(dtype, device.matmul_tflop_s["float32"]) * summed / (summed + _SHORT_SUM)
    right = float(batch * columns * summed)
    if batch * rows == 1 and turned:
        return (
            Term("products", flops, "flop", 1e-3 * flops / rate),
            Term("packed operands", right, "elements", 1e-3 * _TURNED_VECTOR_NS * right),
        )
    half = turned and dtypes.itemsize_bytes(dtype) == 2
    products = 1e-3 * flops / (rate * (_TURNED_HALF_RATE if half else 1.0))
    packed = 1e-3 * (_PACKED_HALF_NS if half else _PACKED_NS[turned]) * right
    shared = (products + packed) / device.multiprocessors + _PRODUCT_US
    share = min(1.0, shared / (products + packed)) if flops else 1.0
    return Term("products", flops, "flop", products * share), Term("packed operands", right, "elements", packed * share)


def price(programs: Sequence[TileProgram], device: Device) -> Price:
    """The price of tile programs as loops of XLA: blocks and trips one after the other, each a few thunks."""
    return total(_loops(p, examine(p), device) for p in programs)


def price_by_tiles(program: TileProgram, device: Device) -> Callable[[Mapping[Axis, int]], Price]:
    """Returns the function that prices a program with other tiles along some axes, about, without another lowering."""
    examiner = Examiner(program)
    return lambda tiles: _loops(program, examiner.work(tiles), device)


def _loops(program: TileProgram, work: BlockWork, device: Device) -> Price:
    each = (work.operations.simple + work.operations.special) / max(1.0, work.statements)
    cores = _cores_for(each, device)
    products = [t for p in work.products for t in _block_product(p, device)]
    scalar = _arithmetic(work.operations.times(work.blocks), cores, device)
    product, packed = (
        Term(name, sum(t.amount for t in of) * work.blocks, unit, sum(t.us for t in of) * work.blocks)
        for name, unit, of in (("products", "flop", products[::2]), ("packed operands", "elements", products[1::2]))
    )
    each_matrix = [_of_batch(p.batch, p.rows, p.columns, p.summed, p.times * work.blocks) for p in work.products]
    matrices = Term("matrices of a batch", sum(t.amount for t in each_matrix), "", sum(t.us for t in each_matrix))
    unique = memory_term("memory", sum({a.tensor: a.unique_bytes for a in work.accesses}.values()), device)
    copied = _copied_slices(work, device)
    kept = _passes(work, device)
    sums = Term("sums of lanes", work.sums * work.blocks, "", 1e-3 * _LAST_SUM_NS * work.sums * work.blocks / cores)
    thunks = work.blocks * (work.statements + 2)
    trips = Term("thunks of trips", thunks, "", thunks * (device.trip_us + (device.launch_us if cores > 1 else 0.0)))
    called = work.calls * work.blocks
    calls = Term("library calls", called, "", device.call_us * called)
    elements = work.strided * work.blocks
    strided = Term("strided reads", elements, "elements", 1e-3 * _STRIDED_NS * elements)
    arithmetic = (
        product.us
        + packed.us
        + matrices.us
        + copied.us
        + strided.us
        + max(sum(t.us for t in scalar) + sums.us, kept.us)
    )
    stored = [float(math.prod(a.extent for a in t.axes) * dtypes.itemsize_bytes(t.dtype)) for t in program.outputs]
    own = Price(
        max(arithmetic, unique.us) + trips.us + calls.us + device.kernel_us,
        (*scalar, sums, product, packed, matrices, copied, strided, kept, unique, trips, calls),
    )
    return own + pages([*stored, _footprint(work)], device)


def _copied_slices(work: BlockWork, device: Device) -> Term:
    """The tiles that are copied out of their tensors and into them; a tile that is all of its tensor is not, as it lies there."""
    parts = [a for a in work.accesses if a.gathered or a.tile_bytes < a.unique_bytes]
    moved = 2.0 * work.blocks * sum(a.bytes for a in parts)
    weighted = 2.0 * work.blocks * sum(a.bytes * (1 + _RUN_BYTES / a.run_bytes) for a in parts)
    return Term("copied slices", moved, "B", 1e-3 * weighted / (_SLICED * device.cache_gb_s))


def _footprint(work: BlockWork) -> float:
    """The bytes that a block works on."""
    tiles = {a.tensor: a.tile_bytes for a in work.accesses}
    return work.kept_bytes + sum(tiles.values())


def _passes(work: BlockWork, device: Device) -> Term:
    """The traffic between the loops of a block, which stays in the cache where the block fits."""
    moved, footprint = work.tile_bytes * work.blocks, _footprint(work)
    rate = device.memory_gb_s
    if footprint <= _CACHED_SHARE * device.cache_bytes:
        rate = device.cache_gb_s * (_OWN_RATE if footprint <= _OWN_SHARE * device.cache_bytes else 1.0)
    return Term("passes over tiles", moved, "B", 1e-3 * moved / rate)


def _with_fewer_strides(p: Product) -> Product:
    """Returns the product with its sides in the order of the emitted loops (`ir.tile_orders`).

    The left one is read in strides where it lies with the contracted axes first; of computed sides the price does not know that.
    """
    left, right = p.rows if p.in_columns else 0, p.columns if p.rhs_in_rows else 0
    if left <= right:
        return p
    return replace(p, rows=p.columns, columns=p.rows, in_columns=p.rhs_in_rows, rhs_in_rows=True, rhs_turned=False)


def _block_product(p: Product, device: Device) -> Iterator[Term]:
    p = _with_fewer_strides(p)
    products, packed = _product(p.batch, p.rows, p.columns, p.summed, p.lhs_dtype, device, turned=p.rhs_turned)
    turned = float(p.batch * p.rows * p.summed) if p.in_columns else 0.0
    packed = Term(packed.name, packed.amount + turned, packed.unit, packed.us + 1e-3 * _LEFT_NS * turned)
    for one in (products, packed):
        yield Term(one.name, one.amount * p.times, one.unit, one.us * p.times)
