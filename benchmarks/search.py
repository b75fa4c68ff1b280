"""Counts the schedule trees of a program before and after each pruning rule, and prints the ten best by price; snapshots; variants.

python benchmarks/search.py                     # G1 to G12, S1 to S9, and others; Blockbuster's three examples as snapshots
python benchmarks/search.py G1 S3 "held odd"    # some of them
python benchmarks/search.py attention           # the snapshots of one example, as in the paper and with stable sums only
python benchmarks/search.py --counts            # without the search
python benchmarks/search.py variants            # other programs that compute the same: Mirage's twelve benchmarks, four more
python benchmarks/search.py variants LoRA       # some of them

It needs no device: prices are predictions for the one that `--device` names, as JAX names it.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.schedule_regions import BLOCKS, workloads
from benchmarks.tree_search import expressions, pruning
from benchmarks.tree_search.search import by_model, search
from benchmarks.variant_programs import PROGRAMS, program_of
from pallasfuse.device import Device, assumed, find
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.region import Region, independent_axes
from pallasfuse.price.xla import price_xla
from pallasfuse.schedule import tiles
from pallasfuse.schedule.candidates import ModelPrices, Space, without_equal_trees, without_padding
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model, published_slowdown, rounds_of_blocks
from pallasfuse.schedule.placement import Broken, MayFold, place, show
from pallasfuse.schedule.snapshots import Snapshot, snapshots, snapshots_of_program
from pallasfuse.schedule.space import all_trees
from pallasfuse.search.found import shown
from pallasfuse.search.prefixes import Bounds, Prefixes
from pallasfuse.search.variants import parts, variants
from pallasfuse.search.written import written

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
    return without_padding(without_equal_trees(every))


def print_best(space: Space, model: Model) -> None:
    """Prints the ten best candidates of a space with their predicted times."""
    start = time.perf_counter()
    found = search(space, by_model(ModelPrices(space, model)))
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
    batch = [a.name for a in independent_axes(region)]
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


def us_of(program: LoopProgram, device: Device) -> tuple[float, Snapshot | None]:
    """Returns the price of a program, and its cheapest snapshot if that costs less than XLA's kernels."""
    best: tuple[float, Snapshot | None] = price_xla(program, device).us, None
    try:
        found = snapshots_of_program(program)
    except InvalidProgramError:
        return best
    return min([best, *((s.us(device), s) for s in found)], key=lambda x: x[0])


def print_variants(name: str, device: Device, bounds: Bounds, most_unpruned: int) -> None:
    """Prints the variants of one program, in parts where it is long, and how many prefixes there are with and without pruning."""
    pieces = parts(program_of(name), bounds.operators)
    if isinstance(pieces, Refusal):
        print(f"{name}: {pieces}\n", flush=True)
        return
    for n, piece in enumerate(pieces):
        found = variants(piece, lambda p: us_of(p, device)[0], bounds)
        source = written(piece)
        assert not isinstance(found, Refusal) and not isinstance(source, Refusal)
        every = Prefixes(source, replace(bounds, prefixes=most_unpruned), laws=None, verified=False).run().counted
        part = f", part {n + 1} of {len(pieces)}" if len(pieces) > 1 else ""
        counted, least = found.counted, "" if every.complete else "at least "
        end = "" if counted.complete else " (a bound is reached)"
        print(f"{name}{part}: {found.written.operators} operators, at most {bounds.operators} searched")
        print(
            f"  prefixes: {counted.prefixes:,}{end}, {counted.pruned:,} continuations pruned, {counted.seconds:.2f} s"
        )
        print(f"  without abstract expressions: {least}{every.prefixes:,}, {every.seconds:.1f} s; "
              f"{least}{every.prefixes / counted.prefixes:.0f} times as many")  # fmt: skip
        prices = ", ".join(f"{v.us:.3g}" for v in found.found)
        print(f"  variants: {len(found.found)} verified, {found.rejected} rejected; us: {prices}")
        kept = "as written" if found.best is found.written else "another one"
        print(f"  best: {kept}, {found.best.us:.3g} us; as written {found.written.us:.3g} us")
        for nest in found.best.program.nests:
            print(f"    {shown(nest)}")
        snapshot = us_of(found.best.program, device)[1]
        print(
            "    computed by XLA" if snapshot is None else "\n".join(f"    {k.tree}" for k in snapshot.tiled(device)),
            flush=True,
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="workloads; all by default")
    parser.add_argument("--device", help="a kind of GPU; an H100 by default")
    parser.add_argument("--slowdown", choices=SLOWDOWNS, default="rounds", help="what few blocks cost")
    parser.add_argument(
        "--operators", type=int, default=5, help="of a variant, or of a part of a long program, at most"
    )
    parser.add_argument(
        "--unpruned", type=int, default=500_000, help="prefixes that are counted without pruning, at most"
    )
    parser.add_argument("--counts", action="store_true", help="no search")
    options = parser.parse_args()
    device = find(options.device, "gpu") if options.device else assumed("gpu")
    known = workloads()
    if options.names[:1] == ["variants"]:
        print(
            f"predicted for {device.kind}; prefixes without abstract expressions are counted up to {options.unpruned:,}\n"
        )
        for name in options.names[1:] or PROGRAMS:
            print_variants(name, device, Bounds(options.operators), options.unpruned)
        return
    for name in options.names or (*known, *BLOCKS):
        if name in BLOCKS:
            print_snapshots(name, device)
            continue
        report(name, known[name](), device, options.slowdown, counts_only=options.counts)


if __name__ == "__main__":
    main()
