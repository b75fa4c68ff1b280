"""Targets: what can run a kernel, and on which device."""

from dataclasses import dataclass, replace
from typing import Literal

from pallasfuse.device import Device, assumed
from pallasfuse.errors import TargetError

Tails = Literal["exact", "masked"]


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Target:
    """A backend together with the device that it writes kernels for.

    `tails`: how a tile that does not divide its axis is handled. "exact": the last loop tile is smaller and the last grid block is
    moved back to overlap its neighbour. "masked": every tile has its full size (see `tile_multiple`) and is masked.
    """

    name: str
    platform: Literal["cpu", "gpu", "tpu"]
    tails: Tails
    device: Device
    max_inner: int
    """Largest extent of an axis that is kept whole inside a tile."""
    smallest_dot: int = 1
    """Fewest rows, columns and contracted elements of a matrix product inside a kernel; smaller tiles are padded."""
    tile_multiple: int = 0
    """With masked tails, tiles are rounded up to multiples of this; 0: to powers of two."""
    capability: str = ""
    """The compute capability that kernels are written for; empty: any."""
    warpgroup_rows: int = 0
    """Rows of a matrix product that one warpgroup computes, where kernels are written for warpgroups."""
    warpgroup_warps: int = 4
    pins: bool = False
    """Values can be kept from being contracted into their users (`Let.pinned`)."""
    legalized_ops: frozenset[str] = frozenset()
    """Operations without an instruction, that kernels write with others (`tiling.legalize`)."""
    cluster: int = 0
    """All phases of a split are one kernel, whose blocks keep their parts of a row in shared memory: at most so many blocks, in
    a cluster that any Hopper GPU runs. 0: phases are kernels of their own."""
    static_bounds: bool = False
    """Loops are planned ahead: their bounds depend on no data."""
    otherwise: str = ""
    """The target whose kernels stand in where this one has none."""
    long_products: bool = False
    """It, or one that stands in, runs products whose sum is longer than `max_inner`."""
    slices_sums: bool = False
    """Its own kernels run such products too: they take the operands slice by slice."""
    only_long_products: bool = False
    """It has kernels for groups with such a product only: whatever else is faster without it."""
    looks_up: bool = False
    """Its kernels can read rows of a tensor by a table of indices (`ir.lookup`)."""
    runs_trees: bool = False
    """Its kernels can have any loops: it runs schedules that are trees."""
    timed: bool = False
    """A clock sees what its kernels make of the whole program (`check.py`): a price may be wrong without harm."""
    one_device: bool = True
    """The program runs on one device as a whole: nothing that a product sums is shared out."""
    unsupported_ops: frozenset[str] = frozenset()
    unsupported_reducers: frozenset[str] = frozenset()

    @property
    def writes_kernels(self) -> bool:
        """Says whether its kernels are for a GPU and written here: XLA does not see their arithmetic."""
        return self.platform == "gpu" and not self.only_long_products

    @property
    def stores_slices(self) -> bool:
        """Says whether XLA stores a slice that a kernel reads, as it does not look into the kernel.

        It looks into its own loops, which are those without masks at their ends.
        """
        return self.tails == "masked"

    @property
    def searches_tiles(self) -> bool:
        """Says whether its tiles are found by their prices, from listed ones on: loops of XLA can have any."""
        return self.platform == "cpu" and self.tails == "exact"

    @property
    def spreads_tiles(self) -> bool:
        """Says whether its tiles are spread over the threads of a block, in powers of two: short axes are written out
        (`ir.unrolling`), and loops leave sums to their end (`ir.late_folds`)."""
        return self.tails == "masked" and not self.tile_multiple

    def padded(self, extent: int) -> int:
        """The size of the tile that holds a whole axis."""
        if self.tails == "exact":
            return extent
        return -(-extent // self.tile_multiple) * self.tile_multiple if self.tile_multiple else power_of_two(extent)

    @property
    def multiprocessors(self) -> int:
        return self.device.multiprocessors

    @property
    def shared_memory_bytes(self) -> int:
        """The most bytes of shared memory that one block may hold (GPU targets)."""
        return self.device.shared_memory_bytes

    @property
    def cache_bytes(self) -> int:
        """The bytes of the cache that all blocks share (GPU targets)."""
        return self.device.cache_bytes

    def judged(self, *, timed: bool, one_device: bool = True) -> "Target":
        """Returns the same target with `timed` and `one_device` set."""
        same = (self.timed, self.one_device) == (timed, one_device)
        return self if same else replace(self, timed=timed, one_device=one_device)

    @property
    def margin(self) -> float:
        """The factor by which XLA's price must exceed a kernel's: the error of prices, or its inverse where a clock decides
        later."""
        return 1.0 / self.device.price_error if self.timed else self.device.price_error

    @property
    def fallback(self) -> "Target | None":
        """The target whose kernels stand in where this one has none, for the same device."""
        return find(self.otherwise).on(self.device) if self.otherwise else None

    def on(self, device: Device) -> "Target":
        """Returns the same backend for another device."""
        return self if device == self.device else replace(self, device=device)


_CPU, _GPU = assumed("cpu"), assumed("gpu")
XLA_CPU = Target("xla", "cpu", "exact", _CPU, 1024, long_products=True, looks_up=True, runs_trees=True)
INTERPRET = Target("interpret", "cpu", "masked", _CPU, 1024, smallest_dot=16, looks_up=True, runs_trees=True)
TRITON = Target(
    "triton", "gpu", "masked", _GPU, 256, smallest_dot=16, otherwise="xla_gpu", long_products=True,
    unsupported_ops=frozenset({"nextafter"}), unsupported_reducers=frozenset({"prod"}),
    legalized_ops=frozenset({"erf", "erfc", "rem", "reduce_and", "reduce_or"}), looks_up=True, runs_trees=True,
)  # fmt: skip

MOSAIC_GPU = replace(
    TRITON, name="mosaic_gpu", tile_multiple=16, capability="9.0", warpgroup_rows=64, otherwise="mosaic_cluster",
    pins=True, static_bounds=True, slices_sums=True, looks_up=False, runs_trees=False,
    unsupported_ops=TRITON.unsupported_ops | {"erf_inv", "round_even", "round_away", "rem"},
    unsupported_reducers=TRITON.unsupported_reducers | {"and", "or"},
    legalized_ops=frozenset(
        {"erf", "erfc", "floor", "ceil", "expm1", "log1p", "pow", "cosh", "is_finite", "not", "integer_pow"}
    ),
)  # fmt: skip

MOSAIC_CLUSTER = replace(
    MOSAIC_GPU, name="mosaic_cluster", tile_multiple=1024, warpgroup_rows=0, otherwise="triton", cluster=8,
    slices_sums=False,
)  # fmt: skip
"""Long rows in the shared memory of several blocks: one warpgroup each, whose threads take eight elements at a time."""

XLA_GPU = replace(
    TRITON, name="xla_gpu", tails="exact", smallest_dot=1, otherwise="", only_long_products=True,
    unsupported_ops=frozenset(), legalized_ops=frozenset(), unsupported_reducers=frozenset(), runs_trees=False,
)  # fmt: skip
"""Loops of XLA: a tile is large, and the product in it is XLA's own."""

TARGETS = {t.name: t for t in (XLA_CPU, INTERPRET, TRITON, MOSAIC_GPU, MOSAIC_CLUSTER, XLA_GPU)}


def find(name: str) -> Target:
    """The target called `name`.

    Raises:
      TargetError: there is none; the message lists those that exist.
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise TargetError(f"no target {name!r}: choose one of {', '.join(sorted(TARGETS))}, or None for the best one")
    return TARGETS[name]


def default_for(platform: str, capabilities: frozenset[str] = frozenset()) -> Target:
    """The best target for a platform that JAX lowers for ('cpu', 'cuda', 'rocm', 'tpu').

    capabilities: compute capabilities of the CUDA devices at hand, as '9.0'; empty where there are none.
    """
    if platform == "cuda" and capabilities == {MOSAIC_GPU.capability}:
        return MOSAIC_GPU
    return TRITON if platform in ("cuda", "rocm", "gpu") else XLA_CPU
