"""Tiling expressions: the counts of MCFuser, sections 3.1 and 3.3, by rules that know no chain."""

import pytest

from benchmarks.tree_search import expressions as ex
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import mul, read
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.region import Region, independent_axes, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.schedule import tiles
from tests.schedule.regions import attention, chain, norm_product, three_products, two_passes

pytestmark = pytest.mark.any_jax  # no version of JAX changes it

CHAINS = {"G1": (512, 256, 64, 64), "G12": (1024, 1024, 128, 128, 8), "example": (1024, 1024, 512, 512)}
FULL = {"G1": 212_992, "G12": 6_815_744, "example": 109_051_904}
FITTING = {"G1": 270, "G12": 784, "example": 1764}


def deep_and_flat(region):
    found = ex.expressions(region)
    assert len(set(found)) == len(found)
    deep = sum(map(ex.is_deep, found))
    return deep, len(found) - deep


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_two_products_has_the_papers_space(name):
    region = chain(*CHAINS[name])
    batch = [a.name for a in independent_axes(region)]
    assert deep_and_flat(region) == (24, 2)
    assert 26 * tiles.count(tiles.choices(region.axes.values(), batch)) == FULL[name]
    assert tiles.count(tiles.choices(region.axes.values(), batch, little_padding=True)) == FITTING[name]


def blocks(region, bound):
    whole = {ex.without(e, bound(e, region)) for e in ex.expressions(region)}
    return len(whole), len({e for e in whole if not ex.holds_partial_tiles(e, region)})


@pytest.mark.parametrize("region", [chain(*CHAINS["G12"]), attention(8, 512, 512, 64, 64)], ids=["chain", "attention"])
def test_both_readings_of_the_first_two_rules(region):
    assert deep_and_flat(region) == (24, 2)
    assert blocks(region, ex.bound_where_possible) == (3, 2)
    assert blocks(region, ex.bound_without_recomputing) == (5, 3)


def test_the_five_expressions_of_a_block():
    region = chain(*CHAINS["example"])
    letters = dict(zip("".join(region.axes), "mnkh", strict=True))
    whole = {ex.without(e, ex.bound_without_recomputing(e, region)) for e in ex.expressions(region)}
    shown = {"".join(letters.get(c, c) for c in ex.show(e)) for e in whole}
    assert shown == {"nk", "kn", "nkh", "knh", "n(k,h)"}


@pytest.mark.parametrize(
    ("region", "counts"),
    [
        (norm_product(64, 256, 512), (6, 0)),  # one nest has all axes: no loop may stand beside another
        (two_passes(64, 256, 128), (6, 0)),
        (three_products(512, 64, 256, 64, 512), (120, 26)),
    ],
)
def test_other_regions(region, counts):
    assert deep_and_flat(region) == counts


def test_flat_expressions_by_hand():
    """All forests of four axes are tried: those in whose closure every nest's axes stand on one path are the expressions."""
    region = chain(64, 64, 64, 64)
    nests = [{a.name for a in (*n.axes, *n.reduced)} for n in region.nests]
    names = list(region.axes)

    def forests(parents):
        if len(parents) < len(names):
            for parent in [None, *names]:
                yield from forests([*parents, parent])
        else:
            yield dict(zip(names, parents, strict=True))

    def path(axis, forest):
        found = []
        while axis is not None and axis not in found:
            found.append(axis)
            axis = forest[axis]
        return found if axis is None else None

    legal = 0
    for forest in forests([]):
        every = {axis: path(axis, forest) for axis in names}
        if None not in every.values():
            legal += all(b in every[a] or a in every[b] for nest in nests for a in nest for b in nest)
    assert legal == len(ex.expressions(region))


def test_a_nest_stands_where_what_it_reads_is_finished():
    region = attention(1, 64, 64, 64, 64)
    rows, columns, inner, free = (region.by_name["t0"].axes[0].name, region.by_name["t0"].axes[1].name,
                                  region.by_name["t0"].reduced[0].name, region.by_name["t12"].axes[1].name)  # fmt: skip
    order = (ex.Loops(rows, (ex.Loops(columns, (ex.Loops(free, (ex.Loops(inner),)),)),)),)
    found = ex.places(order, region)
    assert found["t0"] == (rows, columns, free, inner)
    assert found["t1"] == (rows, columns, free)  # not in the loop over the columns, where the scores are not known yet


def test_extents_that_are_no_power_of_two_may_be_padded_a_little():
    assert tiles.multiples(80) == (16, 32, 48, 64, 80)
    assert [s for s in tiles.multiples(80) if tiles.pads_little(80, s)] == [16, 80]
    assert [s for s in tiles.multiples(64) if tiles.pads_little(64, s)] == [16, 32, 64]
    assert tiles.multiples(5) == (16,) and tiles.pads_little(5, 16)
    assert 48 in tiles.choices([a for a in chain(1000, 64, 64, 64).axes.values() if a.extent == 1000],
                               little_padding=True).popitem()[1]  # fmt: skip


def test_an_axis_is_not_independent_where_a_tensor_with_it_is_read_at_another():
    """The rows of one array are queries in one read, and keys in the other."""
    heads, i, j, d = Axis("h", 2), Axis("i", 32), Axis("j", 32), Axis("d", 16)
    rows, keys = (read("x", (heads, a, d), "float32") for a in (i, j))
    scores = Nest("s", (heads, i, j), mul(rows, keys), "float32", (d,), SUM)
    total = Nest("t", (heads, i), read("s", (heads, i, j), "float32"), "float32", (j,), SUM)
    region = verify(Region((scores, total), (Tensor("x", (heads, i, d), "float32"),), ("t",)))
    assert independent_axes(region) == (heads,)
