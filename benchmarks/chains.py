"""Reduction chains on one GPU: pallasfuse beside `jax.jit` of the same function, and beside a copy of as many bytes.

The sum of kernel times; the implementations take turns; medians.

python benchmarks/chains.py --json chains.json
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

import pallasfuse as pf
from benchmarks.cases import normal
from examples import moments


def layer_norm(x, w, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * w + b


def entropy(x):
    log_p = jax.nn.log_softmax(x, -1)
    return -(jnp.exp(log_p) * log_p).sum(-1)


CASES = [
    ("softmax", lambda x: jax.nn.softmax(x, -1), [(8192, 8192)]),
    ("softmax", lambda x: jax.nn.softmax(x, -1), [(4096, 32768)]),
    ("softmax", lambda x: jax.nn.softmax(x, -1), [(4096, 128256)]),
    ("softmax in float32", lambda x: jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype), [(4096, 128256)]),
    ("softmax", lambda x: jax.nn.softmax(x, -1), [(4, 128256)]),
    ("softmax columns", lambda x: jax.nn.softmax(x, 0), [(4096, 4096)]),
    ("logsumexp", lambda x: jax.nn.logsumexp(x, -1), [(4096, 128256)]),
    ("logsumexp", lambda x: jax.nn.logsumexp(x, -1), [(4, 128256)]),
    ("log-softmax", lambda x: jax.nn.log_softmax(x, -1), [(4096, 128256)]),
    ("entropy", entropy, [(4096, 32768)]),
    ("variance", moments.variance.__wrapped__, [(8192, 8192)]),
    ("layer norm", layer_norm, [(8192, 8192), (8192,), (8192,)]),
    ("layer norm", layer_norm, [(4096, 32768), (32768,), (32768,)]),
    ("layer norm", layer_norm, [(4096, 128256), (128256,), (128256,)]),
    ("layer norm", layer_norm, [(65536, 768), (768,), (768,)]),
]
ROUNDS = 4


def bytes_moved(arrays, result):
    """Counts the bytes that a kernel must read and write at least."""
    return sum(x.size * x.dtype.itemsize for x in (*arrays, *jax.tree.leaves(result)))


def measure(function, arrays):
    """Milliseconds of each implementation, which take turns, and its share of what a copy of as many bytes does."""
    fused = {label: pf.fuse(function, target=target) for label, target in (("pallasfuse", None), ("triton", "triton"))}
    calls = {label: jax.jit(f).lower(*arrays).compile() for label, f in ({"jit": function} | fused).items()}
    results = {label: call(*arrays) for label, call in calls.items()}
    moved = bytes_moved(arrays, results["jit"])
    source = jnp.zeros((moved // 2 // 4,), jnp.float32)
    inputs = dict.fromkeys(calls, arrays) | {"copy": [source]}
    calls["copy"] = jax.jit(lambda x: x + 1).lower(source).compile()
    times = {label: [] for label in calls}
    for n in range(ROUNDS):
        for label, call in calls.items():
            measured = profiler.measure(call, iterations=5)(*inputs[label])[1]
            times[label] += measured if n else []
    row = {label: statistics.median(t) for label, t in times.items()}
    row["speedup"], row["of a copy"] = row["jit"] / row["pallasfuse"], row["copy"] / row["pallasfuse"]
    row["difference"] = float(
        jnp.abs(results["jit"].astype(jnp.float32) - results["pallasfuse"].astype(jnp.float32)).max()
    )
    plan = fused["pallasfuse"].explain(*arrays, target="mosaic_gpu")
    row["kernels"] = [f"{k.target.name}: {k.schedule}" for k in plan.kernels]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "chains.json"))
    parser.add_argument("--dtypes", nargs="+", default=["float16", "float32"])
    parser.add_argument("--cases", nargs="+", help="names; all by default")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("No GPU here: nothing to measure.")
        return
    rows = []
    print(f"{'':40} {'jit':>9} {'triton':>9} {'pallasfuse':>10} us {'speedup':>8} {'of a copy':>10} {'difference':>11}")
    for dtype in options.dtypes:
        for name, function, shapes in CASES:
            if options.cases and name not in options.cases:
                continue
            arrays = [normal(n, s, jnp.dtype(dtype)) for n, s in enumerate(shapes)]
            row = {"case": name, "shape": shapes[0], "dtype": dtype}
            try:
                row |= measure(function, arrays)
                us = [f"{1e3 * row[n]:>{w}.1f}" for n, w in (("jit", 9), ("triton", 9), ("pallasfuse", 10))]
                label = f"{name} {'x'.join(map(str, shapes[0]))} {dtype}"
                shares = f"{row['speedup']:>7.2f}x {row['of a copy']:>9.0%} {row['difference']:>12.1e}"
                print(f"{label:40} {' '.join(us)}    {shares}  {'; '.join(row['kernels'])}", flush=True)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:100]}"
                print(row, flush=True)
            rows.append(row)
    content = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
    Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
