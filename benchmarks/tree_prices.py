"""Measures schedule trees by Triton on a GPU beside their prices, and beside `jax.jit` of the same function.

python benchmarks/tree_prices.py --json trees.json              # G1 to G12, S1 to S9
python benchmarks/tree_prices.py G1 S3 --candidates 100

For each program: candidates drawn from the search's space (half of them among the best by the model), each with several launches,
lowered, priced again as a tile program, compiled, and timed (the sum of kernel times, the least of some calls). It prints how
the model and the price of the tile program agree with the clock, and where the best measured one stands by price.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.schedule_regions import attention, chain
from benchmarks.tree_search.search import by_model, search
from benchmarks.workloads.chains import ATTENTIONS, PRODUCTS
from pallasfuse.errors import PallasfuseError, Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.region import Region, independent_axes
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.ir.tree import TreeKernel, show
from pallasfuse.pallas_backend import kernel_resources
from pallasfuse.price.kernel import price_kernel
from pallasfuse.schedule import tiles
from pallasfuse.schedule.candidates import ModelPrices, Space, without_equal_trees, without_padding
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.space import all_trees
from pallasfuse.searched import SLOTS, WARPS, launched
from pallasfuse.targets import TARGETS
from pallasfuse.tiling import arithmetic
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from pallasfuse.triton_gpu import kernel, rules

TARGET = TARGETS["triton"]


@dataclass
class Row:
    """One candidate: its tree, its predicted times, and the measured one."""

    tree: str
    model_us: float
    price_us: float
    program: TileProgram
    measured_us: float = float("nan")
    error: str = ""


def region_of(name: str) -> Region:
    if name in PRODUCTS:
        batch, m, n, k, h = PRODUCTS[name]
        return chain(m, n, k, h, batch)
    return attention(*ATTENTIONS[name])


def plain(name: str) -> tuple[Any, tuple[jax.Array, ...]]:
    """The function of a region, and its arguments."""

    def drawn(number: int, *shape: int) -> jax.Array:
        return (jax.random.normal(jax.random.key(number), shape) / shape[-1] ** 0.5).astype(jnp.float16)

    if name in PRODUCTS:
        batch, m, n, k, h = PRODUCTS[name]
        lead = () if batch == 1 else (batch,)
        return (lambda a, b, d: a @ b @ d), (drawn(0, *lead, m, k), drawn(1, *lead, k, n), drawn(2, *lead, n, h))
    heads, m, n, k, h = ATTENTIONS[name]
    lead = () if heads == 1 else (heads,)
    arguments = drawn(0, *lead, m, k), drawn(1, *lead, n, k), drawn(2, *lead, n, h)
    return (lambda q, keys, v: jax.nn.softmax(jnp.einsum("...mk,...nk->...mn", q, keys), -1) @ v), arguments


def candidates(region: Region, count: int, seed: int) -> Iterator[Row]:
    """Candidates that Triton can run: half of them among the best by the model, the others at random."""
    device = TARGET.device
    batch = [a.name for a in independent_axes(region)]
    may_fold = derivable(region)
    space = Space(region, tuple(all_trees(region, may_fold)), tiles.choices(region.axes.values(), batch), may_fold)
    space = without_padding(without_equal_trees(space))
    model = Model(region, device)
    prices = by_model(ModelPrices(space, model))
    found = search(space, prices, keep=count)
    draw = random.Random(seed)
    every = list(dict.fromkeys(c for _, c in found.best[: count // 2]))
    pool = [c for c in ({*space} if space.count < 200_000 else ())]
    pool.sort()
    draw.shuffle(pool)
    seen: dict[str, None] = {}
    made = 0
    for candidate in (*every, *pool[: 40 * count]):
        if made >= count:
            return
        (us,) = prices([candidate])
        if us == float("inf"):
            continue
        warps, slots = draw.choice([(w, s) for w in WARPS for s in SLOTS])
        tree = launched(space.tree(candidate), warps, slots)
        if show((tree,)) in seen:
            continue
        seen[show((tree,))] = None
        program = lowered(region, tree)
        if program is not None:
            made += 1
            yield Row(show((tree,)), us, price_kernel([(program, TARGET)]).us, program)


def lowered(region: Region, tree: TreeKernel) -> TileProgram | None:
    try:
        programs = lower_tree(region, (tree,), FoldsOnDemand(region), Tiles("masked", TARGET.smallest_dot))
    except PallasfuseError:
        return None
    if isinstance(programs, Refusal) or len(programs) != 1:
        return None
    (program,) = (arithmetic.rewrite_for(TARGET, p) for p in programs)
    refused = rules.problem(program) or kernel_resources.too_large(program, TARGET)
    return None if refused else program


def kernel_us(function: Any, *arguments: Any) -> float:
    from jax.experimental.mosaic.gpu import profiler

    return 1e3 * float(np.min(profiler.measure(function, aggregate=True, iterations=5)(*arguments)[1]))


def measure(name: str, count: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Measures one program's candidates."""
    region, start = region_of(name), time.perf_counter()
    function, arguments = plain(name)
    rows = list(candidates(region, count, seed=0))
    planned_s = time.perf_counter() - start
    given = {t.name: a.reshape([x.extent for x in t.axes]) for t, a in zip(region.inputs, arguments, strict=True)}
    programs = [jax.jit(lambda have, p=r.program: kernel.run(p, have)) for r in rows]

    def compiled(program: Any) -> Any:
        try:
            return program.lower(given).compile()
        except Exception as error:  # a compiler's error is this candidate's result
            return str(error)[:120]

    reference = jax.jit(function)
    jit_us = kernel_us(reference, *arguments)
    expected = np.asarray(reference(*arguments), np.float32)
    for row, made in zip(rows, pool.map(compiled, programs), strict=True):
        if isinstance(made, str):
            row.error = made
            continue
        (result,) = made(given).values()
        difference = np.abs(np.asarray(result, np.float32).reshape(expected.shape) - expected).max()
        if not difference <= 2e-2 * np.abs(expected).max():
            row.error = f"differs by {difference}"
            continue
        row.measured_us = kernel_us(made, given)
    kept = [{k: v for k, v in vars(r).items() if k != "program"} for r in rows]
    return {"name": name, "jit_us": jit_us, "planned_s": planned_s, "rows": kept}


def ranks(x: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(x)).astype(float)


def told(found: dict[str, Any]) -> str:
    """One line about a program, and its best trees."""
    good = [r for r in found["rows"] if r["measured_us"] == r["measured_us"]]
    failed = [r for r in found["rows"] if r["error"]]
    if not good:
        return f"{found['name']}: nothing ran; {failed[0]['error'] if failed else 'no candidate'}"
    measured = np.array([r["measured_us"] for r in good])
    text = f"{found['name']:4} {len(good):4} ran, {len(failed)} failed; jit {found['jit_us']:.1f} us, best {measured.min():.1f}"
    for kind in ("model_us", "price_us"):
        predicted = np.array([r[kind] for r in good])
        correlation = np.corrcoef(np.log(predicted), np.log(measured))[0, 1]
        straight = np.corrcoef(predicted, measured)[0, 1]
        rank = np.corrcoef(ranks(predicted), ranks(measured))[0, 1]
        eight = measured[np.argsort(predicted)[:8]].min()
        ratio = float(np.exp(np.mean(np.log(predicted / measured))))
        text += (f"; {kind[:-3]}: r {straight:.2f}, of logs {correlation:.2f}, Spearman {rank:.2f}, /measured {ratio:.2f}, "
                 f"first {measured[np.argmin(predicted)]:.1f}, best of 8 {eight:.1f}")  # fmt: skip
    for row in sorted(good, key=lambda r: r["measured_us"])[:3]:
        text += (
            f"\n      {row['measured_us']:6.1f} model {row['model_us']:6.1f} price {row['price_us']:6.1f} {row['tree']}"
        )
    for row in failed[:2]:
        text += f"\n      failed: {row['error']} {row['tree']}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*PRODUCTS, *ATTENTIONS])
    parser.add_argument("--candidates", type=int, default=100, help="of each program")
    parser.add_argument("--jobs", type=int, default=14, help="compilations at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for name in options.names:
            found.append(measure(name, options.candidates, pool))
            print(told(found[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(
                    json.dumps({"device": jax.devices()[0].device_kind, "programs": found}, indent=1)
                )


if __name__ == "__main__":
    main()
