"""`Schedule`: *how* a group runs: which axes form the grid, which one is rolled, and the tile sizes."""

from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tree import Tree, show


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tiles of one kernel. Axes that are neither in the grid nor rolled are whole inside every tile.

    `warps` and `stages` are hints that only GPU targets read.
    """

    grid: tuple[tuple[Axis, int], ...]
    rolled: Axis
    rolled_tile: int
    warps: int = 4
    stages: int = 2
    parts: int = 1
    """Blocks that share the rolled axis (split-k): each leaves a state, which a later phase combines."""
    alternate: bool = False
    """Two warpgroups take turns: one computes elementwise while the other multiplies."""
    ahead: bool = False
    """The products that a trip begins with are computed together with those that the trip before ends with."""
    persistent: bool = False
    """As many blocks as the device runs at a time; each goes on to the next one while its last results leave."""
    interleave: int = 1
    """When masks make the blocks of the last grid axis unequal: how many blocks of the others share a cache, longest first."""
    eager: bool = False
    """The operands that the next trip begins with are awaited while the last products of a trip run."""
    relative_time: float = 1.0
    """Time for the same visited elements, relative to the best tiling of its kind."""
    most_operations: int = 1 << 30
    """For programs with more of them for each element of a product (`operations_per_score`) there are better schedules."""
    ranges: bool = False
    """The loop is bounded by what masks over data leave, which a pass over the masks finds before the kernel runs."""
    start_trips: float = 0.0
    """The time that it takes to begin and to end a block, in trips."""

    tree: Tree = ()
    """The kernels as trees, which say everything; the rest then says only over which axis something is reduced."""

    def tile(self, axis: Axis) -> int:
        """The tile size along `axis`."""
        if axis == self.rolled:
            return self.rolled_tile
        return dict(self.grid).get(axis, axis.extent)

    @property
    def trips(self) -> int:
        return -(-self.rolled.extent // self.rolled_tile)

    def time(self, share: float) -> float:
        """Returns the schedule's relative time, if it visits this share of the tiles."""
        return self.relative_time * (share + self.start_trips / self.trips)

    def __str__(self) -> str:
        """Returns a tiling expression (MCFuser, section 3.1): grid axes outside, the rolled axis inside."""
        if self.tree:
            return show(self.tree)
        grid = " ".join(f"{a.name}:{t}" for a, t in self.grid)
        switches = [
            f"split into {self.parts} parts" if self.parts > 1 else "",
            "warpgroups alternate" if self.alternate else "", "products a trip ahead" if self.ahead else "",
            "next operands awaited early" if self.eager else "", "persistent" if self.persistent else "",
            f"{self.interleave} side by side" if self.interleave > 1 else "",
            "bounded by masks over data" if self.ranges else "",
        ]  # fmt: skip
        return ", ".join([f"{grid} ({self.rolled.name}:{self.rolled_tile})", *filter(None, switches)])
