"""Functions for which schedule trees are written: their regions, and kernels run on all machines."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.region import Region, region_of_program
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.ir.tree import Tree, parse, renamed
from pallasfuse.pallas_backend import interpret
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from pallasfuse.xla_backend import loops
from tests.programs_by_name import program_of

TILES = {
    "exact": Tiles("exact"),
    "masked": Tiles("masked", 1),
    "dots": Tiles("masked", 16),
    "multiples": Tiles("masked", 16, 16),
}
"""How targets have their tiles: loops of XLA, masked tiles of powers of two, the same with matrix units, multiples of sixteen."""


@dataclass(frozen=True)
class Subject:
    """A function, the shapes of its arguments, and names for axes and nests by which trees speak of it."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    nests: str
    """Of the nests of its region, in their order."""
    axes: str = ""
    """Of the axes of its region, in alphabetical order; empty: their own."""
    kept: str = ""
    """Maps that the region has as nests of their own, by the names in the function's program."""

    @property
    def region(self) -> Region:
        return _region(self)

    def tree(self, text: str) -> Tree:
        """The tree of a text in this subject's names."""
        region = self.region
        axes = dict(zip(self.axes.split(), sorted(region.axes), strict=True)) if self.axes else {}
        return renamed(parse(text), axes, dict(zip(self.nests.split(), (n.name for n in region.nests), strict=True)))

    def lowered(self, tree: str | Tree, tiles: Tiles) -> tuple[TileProgram, ...] | Refusal:
        region = self.region
        return lower_tree(region, self.tree(tree) if isinstance(tree, str) else tree, FoldsOnDemand(region), tiles)

    @cache  # noqa: B019
    def arguments(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {t.name: _drawn(rng, t.dtype, [a.extent for a in t.axes]) for t in self.region.inputs}

    @cache  # noqa: B019
    def expected(self) -> list[np.ndarray]:
        """The results in float64, in the order of the region's outputs."""
        with jax.enable_x64():
            given = [
                _wide(self.arguments()[name].reshape(s)) for name, s in zip(self._names(), self.shapes, strict=True)
            ]
            return [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.function)(*given))]

    def _names(self) -> list[str]:
        return [t.name for t in self.region.inputs]


def _drawn(rng: np.random.Generator, dtype: str, shape: list[int]) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x


@cache
def _region(subject: Subject) -> Region:
    program = deduplicate(program_of(subject.function, *subject.shapes))
    kept = frozenset(subject.kept.split())
    return region_of_program(program, Graph(program).inlined(kept), kept)


def in_float64(subject: Subject, programs: tuple[TileProgram, ...], tiles: Tiles) -> None:
    """The evaluator of tile programs agrees with the function."""
    have = dict(subject.arguments())
    for program in programs:
        have |= evaluate_tiles(program, have, move_last_block_back=tiles.tails == "exact")
    for name, want in zip(subject.region.outputs, subject.expected(), strict=True):
        np.testing.assert_allclose(have[name].reshape(want.shape), want, rtol=1e-9, atol=1e-9)


def on_machine(subject: Subject, programs: tuple[TileProgram, ...], run: Callable[..., Any]) -> None:
    """A machine that computes in float32 agrees with the function."""

    @jax.jit
    def all_kernels(have):
        for program in programs:
            have = have | run(program, have)
        return [have[name] for name in subject.region.outputs]

    found = all_kernels({n: jnp.asarray(x) for n, x in subject.arguments().items()})
    for have, want in zip(found, subject.expected(), strict=True):
        scale = float(np.max(np.abs(want)))
        np.testing.assert_allclose(np.asarray(have).reshape(want.shape), want, rtol=2e-4, atol=2e-5 * max(1.0, scale))


MACHINES = {"xla": (TILES["exact"], loops.run), "interpret": (TILES["dots"], interpret.run)}
