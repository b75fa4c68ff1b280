"""Options of `fuse`."""

import os
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class FuseOptions:
    """The options of `fuse`: how to plan, check and run the kernels of a function.

    Attributes:
      target: name of a target (`pallasfuse.targets.TARGETS`), or None for the best one of the platform that is lowered for.
      strict: raise `FusionError` when anything but layout changes is left to XLA (what `pallasfuse.leave` or `exclude` ask for may
        be), and allow no exceptions (`Plan.exceptions`): NaN and infinities are exactly where the program has them. Costs passes: a
        chain may compute its terms twice, and visits the tiles that a mask hides.
      tiles: tile sizes that override the chosen schedule: (axis name, size) pairs, for tuning and tests.
      parts: into how many parts the reduced axis of every kernel is split (at most one for each tile), each left to blocks of its
        own (split-k); 1: not at all; None: as the cost model says.
      warps, stages: override the GPU hints of the chosen schedule; 'mosaic_cluster' has none.
        Over sharded arrays, all these are for the kernels of each device's piece. Tiles are clipped to it, and chosen anew where
        the target has no kernel for such a piece.
      schedule: the kernels of a function as schedule trees (`docs/schedules.md`), instead of those that would be derived. What they
        do not name is left to XLA. A schedule that breaks a rule raises `ScheduleError`.
      exclude: names of scopes, as of `jax.named_scope`: what is computed inside one is left to XLA, as by `pallasfuse.leave`. A
        name is one scope or several with slashes between them ('decoder/norm'), wherever they are inside the fused function.
      verify: 'stages' tests every stage of each plan over finite fields when it is made (as `pallasfuse.verify` does, without
        running anything; a second or so for a plan). A stage that is wrong raises `VerificationError`.
      check: are kernels timed against XLA's own, once, before they are used (`docs/checking.md`)? None: yes, on a device at hand,
        but not where a target, tiles, parts, warps, stages or `strict` are asked for; True: then too; False: never.
      rewrite: may a program take another form that computes the same? Neighbouring axes, as rows and columns of an image, become
        one axis where nothing tells them apart and no `tiles` are asked for. Sums and products are computed in another order where
        that is predicted to be clearly faster, as a chain of matrix products from its other end; not in a strict plan, nor where
        `price` is False. A product of a sum of softmaxes is a sum of products where a kernel gains by it; not in a strict plan.
      price: fuse what is predicted to be faster than XLA's kernels (the default). False fuses whatever saves kernels, also where
        that is slower (together with check=False), and bounds loops by every mask over data: to save memory, and for tests.
        `PALLASFUSE_PRICE=0` in the environment makes False the default.
    """

    target: str | None = None
    strict: bool = False
    tiles: tuple[tuple[str, int], ...] = ()
    parts: int | None = None
    warps: int | None = None
    stages: int | None = None
    schedule: str | None = None
    exclude: tuple[str, ...] = ()
    verify: Literal["stages"] | None = None
    check: bool | None = None
    rewrite: bool = True
    price: bool = field(default_factory=lambda: os.environ.get("PALLASFUSE_PRICE", "1") != "0")

    @property
    def tries_trees(self) -> bool:
        """Says whether trees are looked for beside listed schedules: not where the user has said how, or on which target."""
        return self.price and not self.shapes_kernels and not self.target

    @property
    def shapes_kernels(self) -> bool:
        """Does the user say how kernels are tiled or launched?"""
        return bool(self.tiles or self.parts or self.warps or self.stages or self.schedule)

    def __post_init__(self) -> None:
        if self.verify not in (None, "stages"):
            raise ValueError(f"FuseOptions.verify is None or 'stages', got {self.verify!r}")
        if self.check is not None and not isinstance(self.check, bool):
            raise ValueError(f"FuseOptions.check is True, False or None, got {self.check!r}")
        pairs = isinstance(self.tiles, tuple) and all(
            isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) for p in self.tiles
        )
        if not pairs:
            raise ValueError(
                f"FuseOptions.tiles is a tuple of (axis name, size) pairs, like (('i', 64),), got {self.tiles!r}"
            )
        if self.schedule is not None and not isinstance(self.schedule, str):
            raise ValueError(f"FuseOptions.schedule is a schedule tree as text, got {self.schedule!r}")
        if self.schedule is not None and (self.tiles or self.parts or self.warps or self.stages):
            raise ValueError("FuseOptions.schedule says all of tiles, parts, warps and stages: give either")
        if not isinstance(self.exclude, tuple) or not all(isinstance(n, str) and n.strip("/") for n in self.exclude):
            raise ValueError(f"FuseOptions.exclude is a tuple of names of scopes, like ('norm',), got {self.exclude!r}")
        for name, value in (("parts", self.parts), ("warps", self.warps), ("stages", self.stages)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"FuseOptions.{name} is a positive integer or None, got {value!r}")
        for name, size in self.tiles:
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"FuseOptions.tiles: the size of axis {name!r} must be a positive integer, got {size!r}"
                )
