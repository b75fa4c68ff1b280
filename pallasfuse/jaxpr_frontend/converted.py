"""The frontend's result: a loop program, and where each of its tensors lives in the jaxpr."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pallasfuse._compat import Jaxpr, Literal, Var
from pallasfuse.errors import InvalidProgramError
from pallasfuse.first_time import Later
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.boundary import Boundary, NamedBoundary
from pallasfuse.ir.loop_program import LoopProgram


@dataclass(frozen=True)
class Converted:
    """A jaxpr and its loop program.

    `jaxpr` is flat: calls are inlined, dead equations are gone. For every tensor of `program`, the value of
    `variable[name]`, reshaped (row-major) to the extents of the tensor's axes, is the tensor; each equation's
    outputs are tensors of the program. `results[i]` is output i of the jaxpr: a tensor's name, or a literal or
    variable that no tensor stands for (an input passed through is named as the input tensor). `original` is the jaxpr
    before that, and `whole` the flat one in the form before, if there was another; of its variables, others stand for those in
    `replaced`. What is new is computed from `leaves`, if that is known, as what it stands for is.
    """

    original: Jaxpr

    jaxpr: Jaxpr
    variable: Mapping[str, Var]
    results: tuple[str | Literal, ...]
    made: Later[LoopProgram]
    """The program. A plan that was kept runs without it."""
    whole: Jaxpr | None = None
    replaced: Mapping[Var, Var | Literal] = field(default_factory=dict)
    leaves: frozenset[Var] | None = None
    terms_apart: bool = False
    """Products of sums are sums of products in it (`term_products`)."""
    unjoined: Later[LoopProgram] | None = None
    """The program before its neighbouring axes became one (`fusion/joined_axes`); None where they did not."""
    leaves_reshapes: bool = False
    """Are reshapes left to XLA for axes that became one?"""

    def joined(self, program: Later[LoopProgram], *, leaves_reshapes: bool = False) -> "Converted":
        """Returns the same with a program in which neighbouring axes are one."""
        return replace(self, made=program, unjoined=self.made, leaves_reshapes=leaves_reshapes)

    @property
    def with_axes_apart(self) -> "Converted":
        """The same with axes for each dimension that the jaxpr has."""
        return (
            self if self.unjoined is None else replace(self, made=self.unjoined, unjoined=None, leaves_reshapes=False)
        )

    @property
    def program(self) -> LoopProgram:
        return self.made.value


def of_flat(original: Jaxpr, flattened: Jaxpr, names: Mapping[Var, str], program: Later[LoopProgram]) -> Converted:
    """A jaxpr that was flattened, with the names of its tensors and its loop program. original: the jaxpr before that."""
    results = tuple(a if isinstance(a, Literal) else names[a] for a in flattened.outvars)
    return Converted(original, flattened, {name: var for var, name in names.items()}, results, program)


def named_boundary(converted: Converted, boundary: Boundary) -> NamedBoundary:
    """The boundary of a body by the names of its tensors; a value that no tensor stands for is left out."""
    names: dict[Any, str] = {v: name for name, v in converted.variable.items()}
    given = [names.get(v) for v in converted.jaxpr.invars]
    made = [names.get(v) if isinstance(v, Var) else None for v in converted.jaxpr.outvars]
    return NamedBoundary(
        frozenset(name for n in boundary.sliced if (name := given[n])),
        frozenset((old, new) for n, m in boundary.carried if (old := given[n]) and (new := made[m])),
        frozenset(name for n in boundary.stacked if (name := made[n])),
    )


def axes_of(shape: Sequence[int], axes: Sequence[Axis]) -> list[tuple[int, tuple[Axis, ...]]]:
    """Returns the row-major axes of every dimension of an array in the tensor that stands for it, each with where they begin."""
    found: list[tuple[int, tuple[Axis, ...]]] = []
    at = 0
    for size in shape:
        first = at
        while math.prod(a.extent for a in axes[first:at]) != size:  # an empty dimension has an axis, too
            if at >= len(axes):  # else this would not end
                raise InvalidProgramError(
                    f"dimensions {tuple(shape)} are not products of axes of {[a.extent for a in axes]}"
                )
            at += 1
        found.append((first, tuple(axes[first:at])))
    return found
