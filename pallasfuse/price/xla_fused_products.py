"""What XLA computes in the kernel of a matrix product on a GPU: before it multiplies, and before it stores the results.

It looks for operations at either end of a product, each of which is read once: a residual that is added, a bias, a scale, a given
mask, a narrower type; no function that reads its argument twice. It times the kernel that computes all of them and a library's,
which adds a residual, too. (168 products of 12 shapes on an H100: plain, with rectified or gated operands, with residuals and
activations. Which other maps end a product was compiled, not timed.)
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder, reads_in
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.price.gpu_library import COMPUTED_BEFORE, is_loop
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, XlaKernel
from pallasfuse.price.xla_products import without_casts
from pallasfuse.price.xla_stored import LAUNCH_BYTES

_FEWEST_OF_HALF_TYPES = 8
"""XLA pads matrices of half types to so many rows and columns. (Products of 4 to 8 compiled for an H100.)"""
_FLOPS_PER_BYTE: Mapping[int, float] = {1: 360.0, 2: 180.0, 4: 90.0}
"""The operations of a product in the time of a byte from memory, by the size of an element: about, of an H100."""


def computed_before(node: Nest, operands: tuple[Expr, Expr]) -> frozenset[Expr]:
    """Returns the operands of a product that it computes by itself, each from one tensor, since storing them takes longer."""
    found = set()
    for operand in operands:
        core = without_casts(operand)
        if isinstance(core, Read) or not dtypes.is_float(core.dtype) or not _is_chain_from_one_tensor(core):
            continue
        size = dtypes.itemsize_bytes(core.dtype)
        flops = 2.0 * volume(frozenset((*node.axes, *node.reduced)))
        inside = COMPUTED_BEFORE * flops / _FLOPS_PER_BYTE.get(size, _FLOPS_PER_BYTE[4])
        if inside < LAUNCH_BYTES + 2.0 * volume(core.axes) * size:
            found.add(core)
    return frozenset(found)


def _is_chain_from_one_tensor(core: Expr) -> bool:
    """Is an operand computed of one tensor of its own shape, and of constants, with each value read once?"""
    leaves = [n for n in postorder(core) if not _operands_of(n)]
    reads = [n for n in leaves if isinstance(n, Read)]
    constants = all(isinstance(n, Const | Read) for n in leaves) and all(
        dtypes.is_float(n.dtype) for n in postorder(core)
    )
    return len(reads) == 1 and constants and reads[0].axes == core.axes and _is_read_once(reads[0], core)


def _operands_of(node: Expr) -> tuple[Expr, ...]:
    return node.args if isinstance(node, Apply) else ()


def _is_read_once(leaf: Expr, root: Expr) -> bool:
    """Has each value on the way from a leaf to the root one reader, which reads it once?"""
    parts = list(postorder(root))
    times = Counter(a for n in parts for a in _operands_of(n))
    reader = {a: n for n in parts for a in _operands_of(n)}
    while leaf is not root:
        if times[leaf] != 1:
            return False
        leaf = reader[leaf]
    return True


def ended_products(
    kernels: Sequence[XlaKernel], fusions: Sequence[LoopFusion], outside: Collection[str], in_place: frozenset[str]
) -> tuple[list[XlaKernel], list[LoopFusion]]:  # fmt: skip
    """Returns the kernels and loops with maps at the end of the products whose results they alone read.

    outside: what others than loops read; in_place: the maps that read each element where it is, and nothing that moved. A map of
    several products ends the last one.
    """
    left, found = list(fusions), list(kernels)
    for at in reversed(range(len(found))):
        product = found[at]
        if not isinstance(product, LibraryProduct) or product.name in outside or not _takes_more(product):
            continue
        readers = [f for f in left if any(tensor == product.name for tensor, _ in f.reads)]
        if len(readers) != 1 or not in_place.issuperset(readers[0].makes) or not _can_end(readers[0], product.name):
            continue
        (end,) = readers
        left = [f for f in left if f is not end]
        others = tuple((tensor, moved) for (tensor, _), moved in end.reads.items() if tensor != product.name)
        found[at] = replace(
            product, name=end.makes[0], written_bytes=end.written_bytes, operands=(*product.operands, *others),
            read_at_end=sum(moved for _, moved in others),
        )  # fmt: skip
    return found, left


def reading_in_place(program: LoopProgram, moves: Collection[str], inlined: Collection[str]) -> frozenset[str]:
    """Returns the maps that read each element where it is. moves: those that do not; inlined: those that are computed in others."""
    moved: set[str] = set()
    for node in program.nests:
        if node.name in moves or any(t in moved and t in inlined for t in node.reads):
            moved.add(node.name)
    return frozenset(n.name for n in program.nests if n.name not in moved)


def _takes_more(product: LibraryProduct) -> bool:
    """Does XLA put more into the kernel of a product? Not of integers, nor where it pads half types or makes a loop of it."""
    if dtypes.is_integer(product.operand_dtype) or is_loop(product):
        return False
    sizes = product.rows, product.columns, product.summed
    return dtypes.itemsize_bytes(product.operand_dtype) > 2 or min(sizes) >= _FEWEST_OF_HALF_TYPES


def _can_end(fusion: LoopFusion, tensor: str) -> bool:
    """Is a loop one map that reads a product's result once, element by element, and all else as it is stored?"""
    if len(fusion.roots) != 1 or fusion.roots[0].is_reduction or fusion.is_row or fusion.inside:
        return False
    if fusion.pieces or fusion.threads or fusion.window_operations or fusion.cached_bytes:
        return False
    (root,), (body,) = fusion.roots, fusion.bodies
    reads = [n for n in reads_in(body) if n.tensor == tensor]
    if len(reads) != 1 or _long(reads[0].indices) != _long(root.axes) or not _is_read_once(reads[0], body):
        return False
    if dtypes.itemsize_bytes(root.dtype) > dtypes.itemsize_bytes(reads[0].dtype):
        return False
    return all(_is_as_stored(n, reads[0], root) for n in postorder(body))


def _is_as_stored(node: Expr, result: Read, root: Nest) -> bool:
    """Is a value on the way from a product's result to what is stored, or read as it lies in memory, or a constant?"""
    if isinstance(node, Read):
        order = iter(_long(root.axes))
        return all(a in order for a in _long(node.indices))
    return isinstance(node, Const) or (isinstance(node, Apply) and result.tensor in node.tensors)


def _long(axes: Sequence[Axis]) -> list[Axis]:
    return [a for a in axes if a.extent > 1]
