"""Sweep tile sizes, warps and stages of the Triton target on one GPU, for choosing the defaults in `tiling/choose.py`.

python benchmarks/sweep.py causal global --length 8192 --json sweep.json
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

import pallasfuse as pf
from benchmarks.cases import ATTENTION

CONFIGURATIONS = [
    (m, n, warps, stages)
    for m, n in ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (256, 64))
    for warps in (4, 8)
    for stages in (2, 3, 4)
    if not (m == 64 and warps == 8) and not (m == 256 and warps == 4)
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget-s", type=float, default=400)
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "sweep.json"))
    args = parser.parse_args()
    began = time.time()
    rows = []
    for case in ATTENTION:
        if args.operators and case.name not in args.operators:
            continue
        arrays = case.arrays(args.length, jnp.float16)
        plan = case.fused.explain(*arrays, *case.static, target="triton")
        kernel = plan.kernels[0]
        row, rolled = max(kernel.schedule.grid, key=lambda at: at[1])[0].name, kernel.schedule.rolled.name
        results = []
        for m, n, warps, stages in CONFIGURATIONS:
            if time.time() - began > args.budget_s:
                break
            options = pf.FuseOptions(target="triton", tiles=((row, m), (rolled, n)), warps=warps, stages=stages)
            fused = pf.fuse(case.plain, options=options, static_argnums=case.static_argnums)
            call = jax.jit(lambda *a, f=fused, c=case: f(*a, *c.static))
            try:
                profiler.measure(call)(*arrays)
                _, times = profiler.measure(call, iterations=5)(*arrays)
                ms = statistics.median(times)
                results.append((ms, m, n, warps, stages))
            except Exception as error:
                print(
                    f"{case.name} {m}x{n} w{warps} s{stages}: {type(error).__name__} {str(error)[:120]!r}", flush=True
                )
        for ms, m, n, warps, stages in sorted(results)[:6]:
            rate = case.flops(args.length) / ms / 1e9
            print(f"{case.name:8} {m}x{n} warps {warps} stages {stages}: {ms:.4f} ms {rate:.0f} TFLOP/s", flush=True)
        rows += [(case.name, args.length, *r) for r in results]
    Path(args.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
