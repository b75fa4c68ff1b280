"""The analytical cost of running nests apart and together (MCFuser, section 4; design, "grouping").

All counts are of whole tensors: flops of every nest, and bytes that must cross the device's memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, applied_in, postorder, reads_in
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.price import xla_products, xla_reductions

TYPICAL_BLOCK = 128
"""Rows of a grid block, for estimating how often an operand without that axis is recomputed."""


@dataclass(frozen=True, slots=True)
class Work:
    """The arithmetic and the traffic of some nests; two can be added."""

    matmul_flops: float = 0.0
    vector_flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    launches: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.vector_flops + other.vector_flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.launches + other.launches,
        )

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.vector_flops

    def least_us(self, device: Device) -> float:
        """The least time: the larger of arithmetic and traffic, plus launches (MCFuser, section 4.1)."""
        cores = 1 if device.platform == "gpu" else device.multiprocessors
        matrix_us = 1e-6 * self.matmul_flops / (max(device.matmul_tflop_s.values()) * cores)
        vector_us = 1e-3 * self.vector_flops / (device.vector_gop_s * cores)
        rate = max(device.memory_gb_s, device.cache_gb_s if self.moved <= device.found_bytes else 0.0)
        return max(matrix_us, vector_us, 1e-3 * self.moved / rate) + self.launches * device.kernel_us

    @property
    def moved(self) -> float:
        """Bytes."""
        return self.bytes_read + self.bytes_written


def product_operands(nest: Nest) -> tuple[Expr, Expr] | None:
    """The operands when the nest is a matrix product: a sum of a product whose sides each keep an axis of their own."""
    return xla_reductions.product_operands(nest.reduced, nest.body) if nest.reducer == SUM else None


def tensor_bytes(axes: Iterable[Axis], dtype: str) -> int:
    return volume(axes) * dtypes.itemsize_bytes(dtype)


def _leaf_bytes(roots: Iterable[Expr]) -> float:
    leaves = {(n.tensor, frozenset(n.indices)): tensor_bytes(n.indices, n.dtype)
              for n in postorder(*roots) if isinstance(n, Read)}  # fmt: skip
    return float(sum(leaves.values()))


def _elementwise_flops(roots: Iterable[Expr]) -> float:
    return float(sum(volume(n.axes) for n in postorder(*roots) if isinstance(n, Apply) and n.op != "convert"))


def apart(nest: Nest) -> Work:
    """One nest as XLA runs it: maps fuse into it, but operands of a matrix product are written to memory first."""
    out = float(tensor_bytes(nest.axes, nest.dtype))
    if nest.picks:  # one element of the reduced axis is looked at
        return Work(0.0, float(volume(nest.axes)), out, out, 1)
    space = float(volume(nest.axes + nest.reduced))
    operands = product_operands(nest)
    if operands is None:
        return Work(0.0, _elementwise_flops([nest.body]) + space, _leaf_bytes([nest.body]), out, 1)
    work = Work(2.0 * space, 0.0, 0.0, out, 1)
    for operand in map(xla_products.without_casts, operands):
        if isinstance(operand, Read):
            work += Work(bytes_read=_leaf_bytes([operand]))
        else:
            stored = float(tensor_bytes(operand.axes, operand.dtype))
            work += Work(0.0, _elementwise_flops([operand]), _leaf_bytes([operand]) + stored, stored, 1)
    return work


def together(
    folds: Iterable[Nest], inner: Iterable[Nest], outputs: Iterable[Nest], parallel: tuple[Axis, ...],
    produced: Mapping[str, int], visited_share: float = 1.0,
) -> Work:  # fmt: skip
    """One kernel for all of them: inputs are read once, only outputs are written, inner nests are computed once per pass.

    `produced` maps the names of nests inside the kernel to the number of passes that need them; `visited_share` is the
    share of the rolled axis that masks leave to visit.
    """
    folds, inner, outputs = list(folds), list(inner), list(outputs)
    everything = [*folds, *inner, *outputs]
    leaves: dict[tuple[str, frozenset[Axis]], float] = {}
    for node in dict.fromkeys(node for n in everything for node in reads_in(n.body)):
        if node.tensor not in produced:
            leaves[node.tensor, node.axes] = float(tensor_bytes(node.indices, node.dtype))
    # to pick an element out of what is computed anyway costs nothing
    applied = frozenset[Apply]().union(*(applied_in(n.body) for n in everything if not n.picks))
    elementwise: set[Expr] = {node for node in applied if node.op != "convert"}
    matmul_flops, vector_flops = 0.0, 0.0
    for nest in everything:
        repeats = float(produced.get(nest.name, 1)) if nest in inner else 1.0
        if nest in inner:
            for axis in parallel:
                if axis not in nest.axes:
                    repeats *= max(1.0, axis.extent / TYPICAL_BLOCK)
        space = float(volume(nest.axes + nest.reduced)) * repeats * visited_share
        if product_operands(nest) is not None:
            matmul_flops += 2.0 * space
            elementwise.discard(nest.body)
        elif nest.is_reduction and not nest.picks:
            vector_flops += space
    vector_flops += visited_share * sum(volume(n.axes) for n in elementwise)
    written = sum(float(tensor_bytes(n.axes, n.dtype)) for n in outputs)
    return Work(matmul_flops, vector_flops, sum(leaves.values()), written, 1)


def sliced(inner: Iterable[Nest], rolled: Axis, longest: int, passes: int) -> Work:
    """Returns the work that products with a sum longer than `longest` add: a library takes the matrix in slices, each copied."""
    copied = sum(
        float(tensor_bytes(operand.axes, xla_products.without_casts(operand).dtype))
        for nest in inner if volume(nest.reduced) > longest
        for operand in product_operands(nest) or () if rolled in operand.axes
    )  # fmt: skip
    return Work(bytes_read=passes * copied, bytes_written=passes * copied)
