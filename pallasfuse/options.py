"""Options of `fuse`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FuseOptions:
    """How to fuse.

    Attributes:
      target: name of a target (`pallasfuse.targets.TARGETS`), or None for the best one of the platform that is lowered for.
      strict: raise `FusionError` when anything but layout changes is left to XLA.
      tiles: tile sizes that override the chosen schedule: (axis name, size) pairs, for tuning and tests.
      warps, stages: override the GPU hints of the chosen schedule.
    """

    target: str | None = None
    strict: bool = False
    tiles: tuple[tuple[str, int], ...] = ()
    warps: int | None = None
    stages: int | None = None

    def __post_init__(self) -> None:
        for name, size in self.tiles:
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"FuseOptions.tiles: the size of axis {name!r} must be a positive integer, got {size!r}"
                )
