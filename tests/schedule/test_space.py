"""The space of trees: legal, each once, complete."""

import itertools
import random

import pytest

from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.product_regions import _derived
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import apply, mul, read, sub
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.region import Region, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import Do, RangeLoop, TreeKernel, parse, show, walk
from pallasfuse.schedule import space
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.placement import Broken, place
from tests.schedule.regions import attention, chain, norm_product, random_region, three_products, two_passes

CHAIN = chain(64, 48, 32, 96)
REGIONS = {
    "chain": CHAIN,
    "attention": attention(2, 64, 64, 32, 32),
    "norm": norm_product(64, 96, 128),
    "passes": two_passes(64, 96, 32),
    "three": three_products(64, 32, 48, 64, 32),
} | {f"random {n}": random_region(n) for n in range(4)}


def bodies(region, fold=None):
    fold = fold or derivable(region)
    return [show((t,)).removeprefix("kernel ") for t in space.trees(region, fold)]


def test_the_trees_of_a_chain():
    assert bodies(CHAIN) == [
        "{ i:1@grid l:1@grid k:1 ( j:1 ( t0 ) t1 ) }",
        "{ i:1@grid l:1@grid ( j:1 k:1 ( t0 ) k:1 ( t1 ) ) }",
        "{ i:1@grid k:1 ( j:1 ( t0 ) l:1 ( t1 ) ) }",
        "{ i:1@grid ( j:1 k:1 ( t0 ) k:1 l:1 ( t1 ) ) }",
        "{ i:1@grid ( j:1 k:1 ( t0 ) l:1 k:1 ( t1 ) ) }",
    ]


def test_without_folds_a_norm_takes_a_loop_of_its_own():
    assert "{ i:1@grid k:1@grid j:1 ( t2 t11 ) }" in bodies(REGIONS["norm"])
    assert "{ i:1@grid k:1@grid j:1 ( t2 t11 ) }" not in bodies(REGIONS["norm"], lambda nest, unfinished: False)


@pytest.mark.parametrize("name", REGIONS)
def test_trees_are_legal_and_each_is_its_own_canonical_form(name):
    region, fold = REGIONS[name], derivable(REGIONS[name])
    found = space.trees(region, fold)
    assert found
    for tree in found:
        placement = place(region, tree, fold)
        assert not isinstance(placement, Broken) and not placement.unread
        assert space.canonical(region, tree) == tree
    assert len({space.signature(place(region, t, fold)) for t in found}) == len(found)


def shuffled(region, tree, draw):
    """Returns an equal tree: the grid's loops in another order, and neighbours that do not depend on each other swapped."""
    grid, inside = space._split_grid(tree.body)
    draw.shuffle(grid)

    def swapped(body):
        body = [
            n if not isinstance(n, RangeLoop) else RangeLoop(n.axis, n.size, swapped(n.body), n.level) for n in body
        ]
        for _ in range(3):
            for n in range(len(body) - 1):
                a, b = map(space.computed, body[n : n + 2])
                if not space._depends(region, b, a) and draw.random() < 0.5:
                    body[n], body[n + 1] = body[n + 1], body[n]
        return tuple(body)

    return TreeKernel(tree.name, space._rebuilt(grid, swapped(inside)))


def executed(region, tree, fold):
    """Returns, for each block, the statements that it runs, in order, with the trips of the loops around them."""
    placement = place(region, tree, fold)
    blocks = {}

    def run(body, trips):
        for node in body:
            if hasattr(node, "loop"):
                for trip in range(2):
                    run(node.body, trips | {(node.loop.axis): trip})
            else:
                block = frozenset((a, t) for a, t in trips.items() if a in grid)
                inside = tuple(sorted((a, t) for a, t in trips.items() if a not in grid))
                blocks.setdefault(block, []).append((node.kind, node.name, inside))

    grid = {n.axis for _, n in walk(tree.body) if isinstance(n, RangeLoop) and n.level == "grid"}
    run(placement.body, {})
    return blocks


@pytest.mark.parametrize("name", REGIONS)
def test_equal_trees_have_one_canonical_form_and_run_the_same_statements_in_each_block(name):
    region, fold, draw = REGIONS[name], derivable(REGIONS[name]), random.Random(name)
    for tree in space.trees(region, fold, most=40):
        other = shuffled(region, tree, draw)
        assert space.canonical(region, other) == tree
        mine, others = executed(region, tree, fold), executed(region, other, fold)
        assert mine.keys() == others.keys()
        for block, statements in mine.items():
            for first, second in itertools.product(region.nests, repeat=2):
                if first is second or first.name in second.reads:
                    names = (first.name, second.name)
                    ordered = [
                        [x for x in found if x[0] == "compute" and x[1] in names]
                        for found in (statements, others[block])
                    ]
                    assert ordered[0] == ordered[1]


def test_trees_with_one_signature_run_the_same_statements():
    """Of two kept axes around one nest, which is the outer one counts only where a load moves."""
    region, fold = REGIONS["three"], derivable(REGIONS["three"])
    by_signature = {}
    for tree in {space.canonical(region, t) for t in space.all_trees(region, fold)}:
        placement = place(region, tree, fold)
        if not isinstance(placement, Broken):
            by_signature.setdefault(space.signature(placement), []).append(tree)
    for same in by_signature.values():
        for a, b in itertools.pairwise(same):
            mine, others = executed(region, a, fold), executed(region, b, fold)
            assert {k: sorted(v) for k, v in mine.items()} == {k: sorted(v) for k, v in others.items()}


def all_small_trees(region):
    """Yields every tree, by brute force: each node of a body is a nest, or a loop over an axis that is not open yet."""
    names, axes = [n.name for n in region.nests], [a for a in region.axes if a not in grid_of(region)]

    def bodies_of(open_axes, budget):
        yield (), 0
        if not budget:
            return
        for name in names:
            for rest, used in bodies_of(open_axes, budget - 1):
                yield (Do(name), *rest), used + 1
        for axis in axes:
            if axis not in open_axes:
                for inside, count in bodies_of(open_axes | {axis}, budget):
                    if inside:
                        for rest, used in bodies_of(open_axes, budget - count):
                            yield (RangeLoop(axis, 1, inside), *rest), used + count

    for body, _ in bodies_of(frozenset(), len(names)):
        yield body


def grid_of(region):
    return [a for a in region.axes if all(a in {x.name for x in n.axes} for n in region.nests)]


@pytest.mark.parametrize("region", [CHAIN, norm_product(64, 96, 128)], ids=["chain", "norm"])
def test_nothing_is_missing(region):
    """Every legal tree in which each nest stands once, with all its axes looped, is equal to one of the space."""
    fold = derivable(region)
    known = {space.signature(place(region, t, fold)) for t in space.trees(region, fold)}
    needed = {n.name: {a.name for a in (*n.axes, *n.reduced)} for n in region.nests}
    seen = 0
    for body in all_small_trees(region):
        tree = TreeKernel("kernel", space._rebuilt([RangeLoop(a, 1, (), "grid") for a in grid_of(region)], body))
        nodes = [(around, n) for around, n in walk(tree.body) if isinstance(n, Do)]
        if any(not needed[n.nest] <= {x.axis for x in around} for around, n in nodes):
            continue
        tree = space.canonical(region, tree)
        placement = place(region, tree, fold)
        if (
            isinstance(placement, Broken)
            or placement.unread
            or len(nodes) != len(region.nests)
            or wasteful(region, tree)
        ):
            continue
        seen += 1
        assert space.signature(placement) in known, str(tree)
    assert seen >= len(known) / 2


def wasteful(region, tree):
    """Returns whether a loop has a body that could stand before it, or runs the same twice."""
    needed = {n.name: {a.name for a in (*n.axes, *n.reduced)} for n in region.nests}
    for _, node in walk(tree.body):
        if isinstance(node, RangeLoop) and node.level == "serial":
            for inner in node.body:
                names = space.computed(inner)
                reads = {r for n in names for r in region.by_name[n].reads} - names
                if all(node.axis not in needed[n] for n in names) and not reads & space.computed(node):
                    return True
    return False


def test_sizes_are_put_in_and_single_trips_dropped():
    (tree,) = parse("kernel { i:1@grid k:1 ( j:1 ( t0 ) l:1 ( t1 ) ) }")
    assert str(space.tiled(CHAIN, tree, {"i": 16, "k": 16, "j": 32, "l": 16})) == (
        "kernel { i:16@grid k:16 ( t0 l:16 ( t1 ) ) }"
    )


def test_a_loop_that_runs_once_stays_where_it_holds_values_together():
    (tree,) = parse("kernel { i:1@grid l:1@grid ( j:1 k:1 ( t0 ) k:1 ( t1 ) ) }")
    kept = "kernel { i:16@grid l:16@grid ( j:32 k:16 ( t0 ) k:16 ( t1 ) ) }"
    assert str(space.tiled(CHAIN, tree, {"i": 16, "k": 16, "j": 32, "l": 16})) == kept
    dropped = "kernel { i:16@grid l:16@grid ( t0 t1 ) }"
    assert str(space.tiled(CHAIN, tree, {"i": 16, "k": 48, "j": 32, "l": 16})) == dropped


def chained(*, directly):
    """Returns a region whose last sum reads a sum that reads a maximum over the same axis, and the maximum itself, or not."""
    i, j, k = Axis("i", 16), Axis("j", 32), Axis("k", 8)
    x, w = read("x", (i, j), "float32"), read("w", (j, k), "float32")
    largest, total = read("m", (i,), "float32"), read("l", (i,), "float32")
    last = sub(sub(x, largest) if directly else x, apply("log", total))
    nests = (
        Nest("m", (i,), x, "float32", (j,), MAX),
        Nest("l", (i,), apply("exp", sub(x, largest)), "float32", (j,), SUM),
        Nest("o", (i, k), mul(last, w), "float32", (j,), SUM),
    )
    inputs = (Tensor("x", (i, j), "float32"), Tensor("w", (j, k), "float32"))
    return verify(Region(nests, inputs, ("o",)))


@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize("unfinished", [{"l"}, {"m"}, {"m", "l"}])
def test_a_fold_is_derived_whatever_of_its_chain_is_finished(directly, unfinished):
    region = chained(directly=directly)
    if not unfinished <= region.by_name["o"].reads:
        return
    assert isinstance(derivable(region)("o", frozenset(unfinished)), bool)
    assert isinstance(_derived(region, strict=False), FoldsOnDemand)
