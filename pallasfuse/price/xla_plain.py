"""Operations without a nest, and without work that is known, as kernels of XLA: they move what they read, or look at it."""

from collections.abc import Mapping

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import volume
from pallasfuse.ir.loop_program import External
from pallasfuse.price.moves import FEW
from pallasfuse.price.xla_forms import Opaque


def condenses(node: External, sizes: Mapping[str, int]) -> bool:
    """Does an operation make much less than it reads, like the position of a maximum? XLA computes maps inside such ones."""
    return FEW * volume(node.axes) <= max((sizes[t] for t in node.operands), default=0)


def plain_kernel(node: External, volumes: Mapping[str, int], sizes: Mapping[str, float]) -> Opaque:
    """Returns the kernel of an operation. volumes: the elements of all tensors; sizes: their bytes."""
    condensed = condenses(node, volumes)
    if node.form == "selection" or (condensed and not dtypes.is_integer(node.dtype)):
        # it makes no positions of what it reads: it takes a part, which is all that it reads
        parts = tuple((t, min(sizes[t], sizes[node.name])) for t in node.operands)
        return Opaque(node.name, sum(b for _, b in parts), sizes[node.name], operands=parts)
    read = tuple((t, sizes[t]) for t in node.operands)
    looked_at = float(sum(volumes[t] for t in node.operands)) if condensed else 0.0
    for_each = looked_at / max(1, volumes[node.name])
    return Opaque(node.name, sum(b for _, b in read), sizes[node.name], looked_at, for_each, operands=read)
