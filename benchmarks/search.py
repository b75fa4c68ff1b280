"""Counts the schedule trees of a program before and after each pruning rule, and prints the ten best by price; and snapshots.

python benchmarks/search.py                     # G1 to G12, S1 to S9, and others; Blockbuster's three examples as snapshots
python benchmarks/search.py G1 S3 "held odd"    # some of them
python benchmarks/search.py attention           # the snapshots of one example, as in the paper and with stable sums only
python benchmarks/search.py --counts            # without the search

It needs no device: prices are predictions for the one that `--device` names, as JAX names it.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.schedule_regions import BLOCKS, workloads
from pallasfuse.device import Device, assumed, find
from pallasfuse.ir.region import Region
from pallasfuse.schedule import expressions, pruning, tiles
from pallasfuse.schedule.candidates import ModelPrices, Space
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model, published_slowdown, rounds_of_blocks
from pallasfuse.schedule.placement import Broken, MayFold, place, show
from pallasfuse.schedule.search import search
from pallasfuse.schedule.snapshots import snapshots
from pallasfuse.schedule.space import all_trees

SLOWDOWNS = {"published": published_slowdown, "rounds": rounds_of_blocks}


def print_expressions(region: Region, choices: tiles.Choices) -> None:
    """Prints the paper's counts: tiling expressions, both readings of its first two rules, tuples of tiles."""
    every = expressions.expressions(region)
    deep = sum(map(expressions.is_deep, every))
    print(
        f"  expressions: {deep} deep, {len(every) - deep} flat; full space {len(every) * tiles.count(choices):,} candidates"
    )
    for reading in pruning.READINGS:
        stages = pruning.expression_stages(region, reading)
        counts = " -> ".join(map(str, (stages[0].before, *(s.after for s in stages))))
        print(f"    {' and '.join(s.rule for s in stages)}: {counts}   ({reading})")


def print_trees(region: Region, choices: tiles.Choices, model: Model, may_fold: MayFold) -> Space:
    """Prints what each rule leaves of our own trees; returns the space without equal trees and padding."""
    start = time.perf_counter()
    every = Space(region, tuple(all_trees(region, may_fold)), choices, may_fold)
    pruned, stages = pruning.prune(every)
    memory = pruning.within_memory(pruned, model)
    print(
        f"  trees: {len(every.trees)} built, tuples of tiles: {tiles.count(choices):,} -> {tiles.count(pruned.choices):,}"
    )
    for stage in (*stages, memory):
        print(f"    {stage}")
    print(f"    {time.perf_counter() - start:.2f} s")
    return pruning.PADDING.apply(pruning.EQUAL_TREES.apply(every))


def print_best(space: Space, model: Model) -> None:
    """Prints the ten best candidates of a space with their predicted times."""
    start = time.perf_counter()
    found = search(space, ModelPrices(space, model))
    took = time.perf_counter() - start
    print(f"  search: {space.count:,} candidates, {found.priced:,} priced in {took:.2f} s")
    for us, candidate in found.best:
        tree = space.tree(candidate)
        placement = place(space.region, tree, space.may_fold)
        price = model.price(tree, space.may_fold)
        assert not isinstance(placement, Broken) and not isinstance(price, Broken)
        print(f"    {us:9.3f} us  {price.limit:16} {str(tree).removeprefix('kernel '):60} {show(placement)}")


def report(name: str, region: Region, device: Device, slowdown: str, *, counts_only: bool) -> None:
    """Prints everything about one region."""
    batch = [a.name for a in expressions.independent_axes(region)]
    axes = ", ".join(f"{a.name}:{a.extent}" + (" in the grid" if a.name in batch else "") for a in region.axes.values())
    print(f"{name}: {axes}")
    choices = tiles.choices(region.axes.values(), batch)
    model = Model(region, device, SLOWDOWNS[slowdown])
    print_expressions(region, choices)
    space = print_trees(region, choices, model, derivable(region))
    if not counts_only:
        print_best(space, model)
    print(flush=True)


def print_snapshots(name: str, device: Device) -> None:
    """Prints one of Blockbuster's examples from unfused to most fused: as in the paper, and without what may cancel."""
    make, sizes = BLOCKS[name]
    region = make(*sizes)
    for stable in (False, True):
        start = time.perf_counter()
        found = snapshots(region, stable=stable)
        took = time.perf_counter() - start
        print(f"{name}, {'stable sums only' if stable else 'exact numbers'}: {len(found.found)} snapshots, "
              f"{sum(found.last.counts.values())} applications, {len(found.last.lines)} lines, in {took:.2f} s")  # fmt: skip
        print("\n".join(f"  {line}" for line in found.show(device).splitlines()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="workloads; all by default")
    parser.add_argument("--device", help="a kind of GPU; an H100 by default")
    parser.add_argument("--slowdown", choices=SLOWDOWNS, default="rounds", help="what few blocks cost")
    parser.add_argument("--counts", action="store_true", help="no search")
    options = parser.parse_args()
    device = find(options.device, "gpu") if options.device else assumed("gpu")
    known = workloads()
    for name in options.names or (*known, *BLOCKS):
        if name in BLOCKS:
            print_snapshots(name, device)
            continue
        report(name, known[name](), device, options.slowdown, counts_only=options.counts)


if __name__ == "__main__":
    main()
