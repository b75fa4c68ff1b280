"""Sweep tile sizes and switches of the schedule on one GPU, for choosing the defaults in `tiling/choose.py`.

python benchmarks/sweep.py causal global --target mosaic_gpu --length 8192 --json sweep.json

Every schedule is timed in several rounds, in random order: two that follow each other differ by a few per cent from heat alone.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

import pallasfuse as pf
from benchmarks.cases import ATTENTION, MORE_ATTENTION
from pallasfuse import placement

Switches = dict[str, Any]
ROUNDS = 4


def triton() -> Iterator[tuple[int, int, Switches]]:
    """Rows, rolled tile, and what else a schedule says."""
    for m, n in ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (256, 64)):
        for warps, stages in itertools.product((4, 8), (2, 3, 4)):
            if not (m == 64 and warps == 8) and not (m == 256 and warps == 4):
                yield m, n, {"warps": warps, "stages": stages}


def mosaic_gpu() -> Iterator[tuple[int, int, Switches]]:
    """Yields tiles and settings for Mosaic GPU, with one and two warpgroups."""
    for m, n, stages in (
        (64, 64, 2),
        (64, 128, 2),
        (128, 64, 2),
        (128, 64, 3),
        (128, 128, 2),
        (128, 128, 3),
        (128, 256, 2),
    ):
        switches = ("alternate",), ("alternate", "eager"), ("alternate", "ahead"), ("ahead",)
        for on in switches if m == 128 else switches[-1:]:
            yield m, n, {"warps": m // 16, "stages": stages} | {s: s in on for s in ("alternate", "eager", "ahead")}
    yield 128, 128, {"warps": 8, "stages": 2, "interleave": 1}
    yield 128, 128, {"warps": 8, "stages": 2, "persistent": False}


SCHEDULES = {"triton": triton, "mosaic_gpu": mosaic_gpu}


def with_schedule(m: int, n: int, switches: Switches) -> Any:
    """Returns a function that chooses this schedule for every group."""
    everything = placement.choose

    def chosen(*arguments: Any) -> Any:
        (first, *_) = everything(*arguments)
        row = max(first.grid, key=lambda at: at[1])[0]
        grid = tuple((a, m if a == row else t) for a, t in first.grid)
        return [replace(first, grid=grid, rolled_tile=n, **switches)]

    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--target", choices=SCHEDULES, default="mosaic_gpu")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget-s", type=float, default=400)
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "sweep.json"))
    options = parser.parse_args()
    began, rows = time.time(), []
    everything = placement.choose
    for case in (*ATTENTION, *MORE_ATTENTION):
        if options.operators and case.name not in options.operators:
            continue
        arrays = case.arrays(options.length, jnp.float16)
        calls: list[tuple[tuple[int, int, Switches], Any, list[float]]] = []
        for m, n, switches in SCHEDULES[options.target]():
            if time.time() - began > options.budget_s:
                break
            try:
                placement.choose = with_schedule(m, n, switches)
                fused = pf.fuse(case.plain, target=options.target, static_argnums=case.static_argnums)
                (kernel,) = fused.explain(*arrays, *case.static).kernels
                if kernel.declined:
                    print(f"{case.name} {m}x{n} {switches}: {kernel.declined}", flush=True)
                    continue
                call = jax.jit(lambda *a, f=fused, c=case: f(*a, *c.static)).lower(*arrays).compile()
                calls.append(((m, n, switches), call, []))
            except Exception as error:
                print(f"{case.name} {m}x{n} {switches}: {type(error).__name__} {str(error)[:120]!r}", flush=True)
            finally:
                placement.choose = everything
        for _ in range(ROUNDS):
            for _, call, times in random.sample(calls, len(calls)):
                times.extend(profiler.measure(call, iterations=3)(*arrays)[1])
        for (m, n, switches), _, times in sorted(calls, key=lambda c: statistics.median(c[2])):
            ms = statistics.median(times)
            rate = case.flops(options.length) / ms / 1e9
            print(f"{case.name:8} {m}x{n} {switches}: {ms:.4f} ms {rate:.0f} TFLOP/s", flush=True)
            rows.append((case.name, options.length, m, n, switches, ms))
    Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
