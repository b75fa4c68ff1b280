"""Tiles by price: the way down, and prices of tiles that were not lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tile_program import Contract, every
from pallasfuse.price import cpu
from pallasfuse.tiling.descent import cheapest, sizes

ROWS, COLUMNS, FEATURES = Axis("i", 96), Axis("j", 1000), Axis("k", 7)
START = {ROWS: 4, COLUMNS: 1000, FEATURES: 1}


def bowl(**best):
    """A price with one minimum, where every axis has its best tile."""
    return lambda tiles: sum(abs(np.log2(t / best[a.name])) for a, t in tiles.items())


def test_sizes_are_powers_of_two_and_the_whole_axis():
    assert sizes(ROWS) == [1, 2, 4, 8, 16, 32, 64, 96]
    assert sizes(Axis("one", 1)) == [1]
    assert sizes(Axis("two", 2)) == [1, 2]


def test_the_bottom_of_a_bowl_is_found():
    assert cheapest([START], bowl(i=96, j=32, k=4), [ROWS, COLUMNS, FEATURES]) == {ROWS: 96, COLUMNS: 32, FEATURES: 4}


def test_the_best_start_counts_and_only_free_axes_change():
    assert cheapest([START, {**START, ROWS: 64}], bowl(i=64, j=16, k=4), [COLUMNS]) == {
        ROWS: 64,
        COLUMNS: 16,
        FEATURES: 1,
    }
    assert cheapest([START], bowl(i=64, j=16, k=4), []) == START


def test_the_number_of_prices_is_bounded():
    axes = [Axis(f"a{n}", 1 << 20) for n in range(8)]
    asked = []

    def price(tiles):
        asked.append(tiles)
        return -sum(np.log2(t) for t in tiles.values())

    cheapest([dict.fromkeys(axes, 1)], price, axes)
    assert len(asked) < 120


def attention(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v)


def kernel(function, *shapes, **tiles):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    (found,) = (
        pf.fuse(function, target="xla", options=pf.FuseOptions(tiles=tuple(tiles.items()))).explain(*arguments).kernels
    )
    return found


@pytest.mark.parametrize(
    "tiles",
    [{"i": 2, "j": 64, "l": 4, "n": 256}, {"i": 1, "j": 256, "l": 1, "n": 64}, {"i": 4, "j": 16, "l": 8, "n": 128}],
)
def test_tiles_are_priced_about_as_when_they_are_lowered(tiles):
    shapes = [(4, 256, 8, 32)] * 3
    template = kernel(attention, *shapes, i=1, j=128, l=1, n=128)
    lowered = kernel(attention, *shapes, **tiles)
    axes = {a.name: a for a, _ in template.schedule.grid} | {template.schedule.rolled.name: template.schedule.rolled}
    about = cpu.price_by_tiles(template.program, template.target.device)({axes[n]: t for n, t in tiles.items()})
    assert about.us == pytest.approx(lowered.price.us, rel=0.25)


def test_heads_of_a_tile_share_a_batched_product():
    found = kernel(attention, *[(2, 64, 4, 16)] * 3, i=2, j=32, l=4, n=32)
    products = [s for s in every(found.program.body) if isinstance(s, Contract)]
    assert len(products) == 2
    for s in products:
        kept = [{a.name for a in e.axes} - {a.name for a in s.over} for e in (s.lhs, s.rhs)]
        assert {"i", "l"} <= kept[0] & kept[1]
        assert "j" in kept[0], "queries give the rows"
    arrays = [np.random.default_rng(n).normal(size=(2, 64, 4, 16)).astype(np.float32) for n in range(3)]
    options = pf.FuseOptions(tiles=(("i", 2), ("j", 32), ("l", 4), ("n", 32)))
    got = pf.fuse(attention, target="xla", options=options)(*arrays)
    np.testing.assert_allclose(got, jax.jit(attention)(*arrays), rtol=1e-5, atol=1e-5)


def test_the_chosen_tiles_are_no_dearer_than_the_listed_ones():
    shapes = [(4, 512, 8, 64)] * 3
    chosen = kernel(attention, *shapes)
    listed = kernel(attention, *shapes, i=1, j=128, l=1, n=512)
    assert chosen.price.us <= listed.price.us
    assert chosen.tiles["l"] > 1


def test_tiles_that_are_asked_for_stay():
    assert kernel(attention, *[(4, 512, 8, 64)] * 3, l=2).tiles["l"] == 2
