"""`Tensor`: the name, axes and type of what a program reads or makes."""

from dataclasses import dataclass

from pallasfuse.ir.axes import Axis


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array of a program: one axis for each dimension of the (reshaped) array."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str
