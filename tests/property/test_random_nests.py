"""Random nests of loops over one axis: windows cut into pieces, sums that are carried or in buffers, staged rows."""

from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.emission import pallas_kernel
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import add
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Buffer, Carry, Get, Let, Load, Reduce, Set, Store
from pallasfuse.xla_backend import loops
from tests.ir.nested_programs import ZERO, F, kernel, over, rounded, tile_of


class RowSums:
    """A program that sums rows of a random length, in up to three levels of windows; segments need not be alike."""

    def __init__(self, seed, tails):
        self.draw, self.tails, self.numbers = np.random.default_rng(seed), tails, count()
        self.rows, self.along = Axis("i", int(self.draw.integers(1, 12))), Axis("j", int(self.draw.integers(1, 70)))
        self.block = int(self.draw.choice([n for n in (1, 2, 4) if n <= self.rows.extent]))
        sizes = [int(self.draw.choice([1, 2, 4]))]
        while self.draw.random() < 0.7 and len(sizes) < 3:
            sizes.insert(0, sizes[0] * int(self.draw.choice([1, 2, 4])))
        x, y = Tensor("x", (self.rows, self.along), F), Tensor("y", (self.rows,), F)
        tiles = (self.rows, self.block), (self.along, sizes[0])
        body = (*self.total("sum", None, sizes, "x"), Store("y", y.axes, tile_of("sum", self.rows)))
        self.program = kernel("sums", (x,), (y,), tiles[:1], tiles, *body)

    def name(self, of):
        return f"{of}.{next(self.numbers)}"

    def loop(self, size, window, body, *carries):
        return over(self.along, size, body, self.tails, *carries, window=window, inside=window is not None)

    def part(self, name, source):
        """Statements that name the current tile of the input, or of a buffer."""
        axes = self.rows, self.along
        return Load(name, "x", axes, F) if source == "x" else Get(name, source, axes, F)

    def total(self, name, window, sizes, source):
        """Statements that name the sum of the current window (None: the axis), by windows of these sizes."""
        rows = (self.rows,)
        if not sizes:
            tile = self.name("x")
            yield self.part(tile, source)
            yield Reduce(name, rows, SUM, tile_of(tile, self.rows, self.along), (self.along,))
            return
        if self.draw.random() < 0.3:
            copy = self.name("copy")
            yield from self.staged(copy, window, sizes[0], source)
            source = copy
        inner = self.name("part")
        if self.draw.random() < 0.5:
            following = self.name("next")

            def step(tile):
                yield from self.total(inner, tile, sizes[1:], source)
                yield Let(following, rows, add(tile_of(name, *rows), tile_of(inner, *rows)))

            yield self.loop(sizes[0], window, step, Carry(name, rows, F, ZERO, following))
            return
        held, old = self.name("held"), self.name("old")

        def change(tile):
            yield from self.total(inner, tile, sizes[1:], source)
            yield Get(old, held, rows, F)
            yield Set(held, rows, add(tile_of(old, *rows), tile_of(inner, *rows)))

        yield Buffer(held, rows, (self.block,), F, ZERO)
        yield self.loop(sizes[0], window, change)
        yield Get(name, held, rows, F)

    def staged(self, copy, window, size, source):
        """Statements that copy the current window to a buffer."""
        axes, tile = (self.rows, self.along), self.name("x")
        length = self.along.extent if window is None else window
        yield Buffer(copy, axes, (self.block, rounded(length, size)), F, ZERO)
        yield self.loop(size, window, lambda _: (self.part(tile, source), Set(copy, axes, tile_of(tile, *axes))))


def inputs_of(sums):
    return np.random.default_rng(1).normal(size=[a.extent for a in (sums.rows, sums.along)])


@pytest.mark.sampled(16, cover=("tails",))
@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("seed", range(60))
def test_random_windows_sum_up_to_whole_rows(seed, tails):
    sums = RowSums(seed, tails)
    x = inputs_of(sums)
    found = evaluate_tiles(sums.program, {"x": x}, move_last_block_back=tails == "exact")["y"]
    np.testing.assert_allclose(found, x.sum(1), rtol=1e-11, atol=1e-12)


@pytest.mark.sampled(32, cover=("backend",))
@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("seed", range(60))
def test_random_windows_as_kernels(seed, backend):
    sums = RowSums(seed, "exact" if backend == "xla" else "masked")
    x = inputs_of(sums)
    arrays = {"x": jnp.asarray(x, jnp.float32)}
    if backend == "xla":
        found = jax.jit(lambda arrays: loops.run(sums.program, arrays))(arrays)["y"]
    else:
        found = pallas_kernel.call(sums.program, arrays, interpret=True)["y"]
    np.testing.assert_allclose(found, x.sum(1), rtol=2e-5, atol=2e-5)
