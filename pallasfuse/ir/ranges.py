"""`Range`: the interval outside of which a predicate over data is false, found before the kernel runs that it bounds."""

from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, apply, const, index, read
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Range:
    """The interval of `axis` outside of which a predicate over data is false: in every row one, found before the kernel runs.

    `left` counts the positions from the first at which it is true to the end of the axis, `right` those from the start to the last
    one. Both are zero in a row where it is nowhere true. `all_if_none`: all of such a row is visited, not nothing.
    `count` is the number of positions at which it is true: a row is solid where these are all between the first and the last one.
    """

    axis: Axis
    predicate: Expr
    left: Tensor
    right: Tensor
    count: Tensor
    all_if_none: bool = False

    @property
    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Everything that is found of a row before the kernel runs."""
        return self.left, self.right, self.count

    @property
    def nests(self) -> tuple[Nest, Nest, Nest]:
        """The reductions by which it is found, all in one pass over what the predicate reads."""
        here, extent, one = index(self.axis), const(self.axis.extent, "int32"), const(1, "int32")
        terms: tuple[Expr, ...] = apply("sub", extent, here), apply("add", here, one), one
        return tuple(
            Nest(t.name, t.axes, apply("select", self.predicate, n, const(0, "int32")), t.dtype, (self.axis,), reducer)
            for t, n, reducer in zip(self.found, terms, (MAX, MAX, SUM), strict=True)
        )  # type: ignore[return-value]

    def visited(self, end: Expr, right: Expr) -> Expr:
        """An end of what is visited of a row, counted like `left` or `right`, from its value."""
        if not self.all_if_none:
            return end
        zero, extent = const(0, "int32"), const(self.axis.extent, "int32")
        return apply("select", apply("eq", right, zero), extent, end)

    def covers(self) -> Expr:
        """The predicate over positions and the two ends that is true of what is visited for the sake of a row."""
        here, extent = index(self.axis), const(self.axis.extent, "int32")
        left, right = (read(t.name, t.axes, t.dtype) for t in (self.left, self.right))
        after = apply("ge", here, apply("sub", extent, self.visited(left, right)))
        return apply("and", after, apply("lt", here, self.visited(right, right)))

    def solid(self, end: Expr, left: Expr, right: Expr, count: Expr) -> Expr:
        """An end of the range of a row, counted like `left` or `right`, where the row is solid; else that of an empty one, 0."""
        extent = const(self.axis.extent, "int32")
        is_solid = apply("eq", apply("add", count, extent), apply("add", left, right))
        return apply("select", is_solid, end, const(0, "int32"))

    def fills(self) -> Expr:
        """The predicate over positions and what is found that implies `predicate`: true inside the ranges of solid rows."""
        here, extent = index(self.axis), const(self.axis.extent, "int32")
        left, right, count = (read(t.name, t.axes, t.dtype) for t in self.found)
        after = apply("ge", here, apply("sub", extent, self.solid(left, left, right, count)))
        return apply("and", after, apply("lt", here, self.solid(right, left, right, count)))
