"""Cross-entropy of a matrix product: pallasfuse beside `jax.jit` of the same function, time and temporary memory.

On a GPU, the sum of kernel times and the wall time, by default of 4096 rows, 4096 features and 128256 columns; on a CPU wall time
of a smaller size. The implementations take turns; medians.

python benchmarks/linear_cross_entropy.py --tiles 1024 2048 4096 --json linear_cross_entropy.json
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
import numpy as np

import pallasfuse as pf
from benchmarks.attention import gpu_ms, wall_ms
from benchmarks.cases import normal
from examples.linear_cross_entropy import linear_cross_entropy, smoothed_linear_cross_entropy

FUNCTIONS = {
    "plain loss": linear_cross_entropy.__wrapped__,
    "cap, smoothing, z-loss": smoothed_linear_cross_entropy.__wrapped__,
}
ROUNDS = 4


def product(hidden, weights, labels):
    """Nothing but the matrix product, for comparison; its result is stored."""
    return hidden @ weights


def implementations(function, columns, tiles):
    """Returns the functions to compare, by name. `tiles`: sizes along the columns, beside the one that is chosen."""
    found = {"jax.jit": function, "pallasfuse": pf.fuse(function)}
    for tile in tiles:
        found[f"pallasfuse, tiles of {tile}"] = pf.fuse(function, options=pf.FuseOptions(tiles=((columns, tile),)))
    return found


def measure(name, function, arrays, tiles, *, on_gpu):
    plan = pf.fuse(function).explain(*arrays)
    print(f"{name}: {len(plan.kernels)} kernels, " + "; ".join(f"{k.target.name}, {k.schedule}" for k in plan.kernels))
    for fallback in plan.fallbacks:
        print(f"  left to XLA: {fallback}")
    columns = plan.kernels[0].group.rolled.name if plan.kernels else ""
    makers = {"matrix product only": product} | implementations(function, columns, tiles if columns else [])
    compiled = {}
    for key, maker in makers.items():
        start = time.perf_counter()
        compiled[key] = jax.jit(maker).lower(*arrays).compile()
        print(f"  compiled {key} in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    reference = np.asarray(compiled["jax.jit"](*arrays), np.float64)
    times = {key: ([], []) for key in compiled}
    for _ in range(ROUNDS):
        for key, executable in compiled.items():
            times[key][0].extend(wall_ms(executable, arrays))
            if on_gpu:
                times[key][1].extend(gpu_ms(executable, arrays))
    rows = []
    for key, executable in compiled.items():
        temporary = executable.memory_analysis().temp_size_in_bytes / 1e6
        error = (
            None if key == "matrix product only" else float(np.abs(np.asarray(executable(*arrays)) - reference).max())
        )
        wall, kernels = (statistics.median(t) if t else None for t in times[key])
        rows.append({"case": name, "implementation": key, "wall_ms": wall, "gpu_ms": kernels,
                     "temporary_mb": temporary, "difference": error})  # fmt: skip
        shown = "" if kernels is None else f"{kernels:9.3f} ms of kernels"
        print(
            f"  {key:28}{wall:9.3f} ms{shown}{temporary:10.1f} MB"
            + ("" if error is None else f"   differs by {error:.1e}"),
            flush=True,
        )
    return rows


def main():
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096 if on_gpu else 512)
    parser.add_argument("--features", type=int, default=4096 if on_gpu else 2048)
    parser.add_argument("--columns", type=int, default=128256 if on_gpu else 32768)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"] if on_gpu else ["float32"])
    parser.add_argument("--tiles", type=int, nargs="*", default=[])
    parser.add_argument("--functions", nargs="+", default=list(FUNCTIONS), choices=list(FUNCTIONS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {options.rows} x {options.features} x {options.columns}"
    )
    rows = []
    for dtype in options.dtypes:
        hidden = normal(0, (options.rows, options.features), dtype)
        weights = normal(1, (options.features, options.columns), dtype) * jnp.asarray(3 * options.features**-0.5, dtype)
        labels = jax.random.randint(jax.random.key(2), (options.rows,), 0, options.columns)
        for name in options.functions:
            arrays = (hidden, weights, labels)
            found = measure(f"{name}, {dtype}", FUNCTIONS[name], arrays, options.tiles, on_gpu=on_gpu)
            rows += [row | {"dtype": dtype} for row in found]
    path = options.json or (Path(os.environ["OUT"]) / "linear_cross_entropy.json" if os.environ.get("OUT") else None)
    if path:
        shape = [options.rows, options.features, options.columns]
        content = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "shape": shape, "rows": rows}
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
