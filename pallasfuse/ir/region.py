"""A region of a loop program that schedule trees are about: reductions with their maps inlined, and the maps that are stored."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, reads_in
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """Nests in an order that respects their reads, each over inputs and other nests at the positions where these are computed."""

    nests: tuple[Nest, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    """The nests that are stored: reductions once they are finished, maps where they are computed."""

    by_name: Mapping[str, Nest] = field(init=False, compare=False, repr=False)
    axes: Mapping[str, Axis] = field(init=False, compare=False, repr=False)
    """Every axis by its name, in the order in which nests have them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {n.name: n for n in self.nests})
        object.__setattr__(self, "axes", {a.name: a for n in self.nests for a in (*n.axes, *n.reduced)})

    def reads(self, nest: Nest) -> tuple[Nest, ...]:
        """Returns the nests of the region that one of them reads."""
        return tuple(n for n in self.nests if n.name in nest.reads)

    def __str__(self) -> str:
        lines = [f"input {t.name}[{', '.join(f'{a.name}:{a.extent}' for a in t.axes)}]" for t in self.inputs]
        for n in self.nests:
            over = f" {n.reducer}[{', '.join(a.name for a in n.reduced)}]" if n.is_reduction else " "
            stored = "store " if n.name in self.outputs else ""
            lines.append(f"{stored}{n.name}[{', '.join(a.name for a in n.axes)}]{over}= {n.body}")
        return "\n".join(lines)


def verify(region: Region) -> Region:
    """Checks that every read is an input or an earlier nest at its own positions; returns the region.

    Raises:
      InvalidProgramError: naming the nest and the read.
    """
    known: dict[str, tuple[Axis, ...]] = {}
    inputs = {t.name for t in region.inputs}
    for nest in region.nests:
        for node in reads_in(nest.body):
            if node.tensor in inputs:
                continue
            if known.get(node.tensor) != node.indices:
                raise InvalidProgramError(
                    f"region: {nest.name} reads {node}, which no nest before it computes at these positions"
                )
        known[nest.name] = nest.axes
    missing = set(region.outputs) - {n.name for n in region.nests}
    if missing:
        raise InvalidProgramError(f"region: nothing computes {sorted(missing)}")
    return region


def region_of_group(group: Group, tensors: Mapping[str, Tensor]) -> Region:
    """Returns the nests of a kernel of today. Outputs that are computed of a reduction of the same name are maps of their own."""
    nests = {n.name: n for n in (*group.inner, *(f.nest for f in group.folds))}
    nests |= {n.name: n for n in group.outputs if n.name not in nests}
    depths = _depths(nests)
    ordered = sorted(nests.values(), key=lambda n: depths[n.name])
    return verify(Region(tuple(ordered), tuple(tensors[t] for t in group.inputs), tuple(n.name for n in group.outputs)))


def _depths(nests: Mapping[str, Nest]) -> dict[str, int]:
    """Returns, of each nest, how many stand one after the other before it is known."""
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((depth(t) for t in nests[name].reads if t in nests), default=0)
        return found[name]

    for name in nests:
        depth(name)
    return found


def region_of_program(program: LoopProgram, bodies: Mapping[str, Expr], kept: Set[str] = frozenset()) -> Region:
    """Returns all nests of a program that XLA computes nothing of.

    Args:
      bodies: every nest's, with all maps inlined but those that are kept.
      kept: names of maps that are nests of the region, too, which others read.
    """
    named = {*kept, *program.outputs}
    nests = [n for n in program.nests if isinstance(n, Nest) and (n.is_reduction or n.name in named)]
    inlined = tuple(replace(n, body=bodies[n.name]) for n in nests)
    return verify(Region(inlined, program.inputs, tuple(dict.fromkeys(program.outputs))))


# --- the axes of a region, by what loops over them may be


def independent_axes(region: Region) -> tuple[Axis, ...]:
    """Returns the axes that every nest keeps and every input is read at: blocks along them share nothing, like those of a batch."""
    inputs = {t.name for t in region.inputs}
    kept = [frozenset(n.axes) for n in region.nests]
    read = {frozenset(node.indices) for n in region.nests for node in reads_in(n.body) if node.tensor in inputs}
    found = tuple(a for a in region.axes.values() if all(a in axes for axes in (*kept, *read)))
    return found if any(a not in found and not is_reduced(region, a) for a in region.axes.values()) else ()


def is_reduced(region: Region, axis: Axis) -> bool:
    """Returns whether some nest reduces over the axis."""
    return any(axis in n.reduced for n in region.nests)


def spatial_axes(region: Region) -> tuple[Axis, ...]:
    """Returns the axes that no nest reduces: blocks of a grid may each take a piece of them."""
    return tuple(a for a in region.axes.values() if not is_reduced(region, a))
