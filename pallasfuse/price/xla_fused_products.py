"""What XLA computes in the kernel of a matrix product on a GPU: before it multiplies, and before it stores the results.

It looks for operations at either end of a product, each of which is read once: a residual that is added, a scale, a mask, a cast, a
choice; no function that reads its argument twice. It times the kernel that computes all of them and a library's, which adds a
residual, too. (168 products of 12 shapes with and without such operations on an H100.)
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.price.gpu_library import COMPUTED_BEFORE
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, XlaKernel
from pallasfuse.price.xla_products import without_casts
from pallasfuse.price.xla_stored import LAUNCH_BYTES

_FLOPS_PER_BYTE: Mapping[int, float] = {1: 360.0, 2: 180.0, 4: 90.0}
"""The operations of a product in the time of a byte from memory, by the size of an element: about, of an H100."""


def computed_before(node: Nest, operands: tuple[Expr, Expr]) -> frozenset[Expr]:
    """Returns the operands of a product that it computes by itself, each from one tensor, since storing them takes longer."""
    found = set()
    for operand in operands:
        core = without_casts(operand)
        if isinstance(core, Read) or not _is_chain_from_one_tensor(core):
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
    constants = all(isinstance(n, Const | Read) for n in leaves)
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
    kernels: Sequence[XlaKernel], fusions: Sequence[LoopFusion], outside: Collection[str]
) -> tuple[list[XlaKernel], list[LoopFusion]]:  # fmt: skip
    """Returns the kernels and loops with maps at the end of the products whose results they alone read.

    outside: what others than loops read. A map of several products ends the last one.
    """
    left, found = list(fusions), list(kernels)
    for at in reversed(range(len(found))):
        product = found[at]
        if not isinstance(product, LibraryProduct) or product.name in outside:
            continue
        readers = [f for f in left if any(tensor == product.name for tensor, _ in f.reads)]
        if len(readers) != 1 or not _can_end(readers[0], product.name):
            continue
        (end,) = readers
        left = [f for f in left if f is not end]
        others = tuple((tensor, moved) for (tensor, _), moved in end.reads.items() if tensor != product.name)
        found[at] = replace(
            product, name=end.makes[0], written_bytes=end.written_bytes, operands=(*product.operands, *others),
            read_at_end=sum(moved for _, moved in others),
        )  # fmt: skip
    return found, left


def _can_end(fusion: LoopFusion, tensor: str) -> bool:
    """Is a loop one map that reads a product's result once, element by element?"""
    if len(fusion.roots) != 1 or fusion.roots[0].is_reduction or fusion.is_row or fusion.pieces or fusion.threads:
        return False
    (root,), (body,) = fusion.roots, fusion.bodies
    reads = [n for n in postorder(body) if isinstance(n, Read) and n.tensor == tensor]
    return len(reads) == 1 and _long(reads[0].indices) == _long(root.axes) and _is_read_once(reads[0], body)


def _long(axes: Sequence[Axis]) -> list[Axis]:
    return [a for a in axes if a.extent > 1]
