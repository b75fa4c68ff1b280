"""Costs of single operations, as kernels of their own: a bound by arithmetic and by memory for each."""

from dataclasses import dataclass

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume

_FUSED = 0.5
"""The share of an elementwise operation's memory traffic that is left where it is computed beside its reader."""
DIVISION = 4
"""The operations that a division takes."""
_MATRIX_SIDE = 4
"""A product with fewer rows or columns is not run by matrix units."""


@dataclass(frozen=True, slots=True)
class Costing:
    """Costs of operations as kernels of their own, in microseconds. dtype: of everything that is stored."""

    device: Device
    dtype: str

    def _moved(self, *elements: int) -> float:
        moved = sum(elements) * dtypes.itemsize_bytes(self.dtype)
        cached = moved < self.device.found_bytes
        return 1e-3 * moved / (self.device.cache_gb_s if cached else self.device.memory_gb_s)

    def _computed(self, operations: float) -> float:
        return 1e-3 * operations / (self.device.vector_gop_s * self._cores())

    def _cores(self) -> int:
        return self.device.multiprocessors if self.device.platform == "cpu" else 1

    def _start(self) -> float:
        return self.device.kernel_us + self.device.launch_us

    def elementwise(self, axes: frozenset[Axis], operations: int) -> float:
        points = volume(axes)
        return max(self._computed(points * operations), self._moved(2 * points)) * _FUSED + 1e-3

    def sum(self, read: frozenset[Axis], kept: frozenset[Axis]) -> float:
        return max(self._computed(volume(read)), self._moved(volume(read), volume(kept))) + self._start()

    def product(self, summed: frozenset[Axis], a: frozenset[Axis], b: frozenset[Axis]) -> float:
        """A contraction of two tensors with the axes a and b."""
        flops = 2.0 * volume(a | b)
        if min(volume(a - b), volume(b - a)) < _MATRIX_SIDE:
            busy = self._computed(flops / 2)
        else:
            rates = self.device.matmul_tflop_s
            busy = 1e-6 * flops / (rates.get(self.dtype, rates["float32"]) * self._cores())
        return max(busy, self._moved(volume(a), volume(b), volume((a | b) - summed))) + self._start()
