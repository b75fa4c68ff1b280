"""Reduction chains on one GPU: pallasfuse beside `jax.jit` of the same function. Kernel times, medians of eight calls.

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
import numpy as np
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
    ("softmax", lambda x: jax.nn.softmax(x, -1), [(4096, 128256)]),
    ("softmax columns", lambda x: jax.nn.softmax(x, 0), [(4096, 4096)]),
    ("logsumexp", lambda x: jax.nn.logsumexp(x, -1), [(4096, 128256)]),
    ("entropy", entropy, [(4096, 32768)]),
    ("variance", moments.variance.__wrapped__, [(8192, 8192)]),
    ("layer norm", layer_norm, [(8192, 8192), (8192,), (8192,)]),
    ("layer norm", layer_norm, [(65536, 768), (768,), (768,)]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "chains.json"))
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("No GPU here: nothing to measure.")
        return
    rows = []
    for name, function, shapes in CASES:
        for dtype in (jnp.float32, jnp.float16):
            arrays = [normal(n, s, dtype) for n, s in enumerate(shapes)]
            row = {"case": name, "shape": shapes[0], "dtype": jnp.dtype(dtype).name}
            results = {}
            for label, call in (("jit", jax.jit(function)), ("triton", pf.fuse(function, target="triton"))):
                try:
                    results[label], _ = profiler.measure(call)(*arrays)
                    row[label] = statistics.median(profiler.measure(call, iterations=8)(*arrays)[1])
                except Exception as error:
                    row[label + "_failed"] = f"{type(error).__name__}: {str(error)[:100]}"
            if len(results) == 2:
                pair = [np.asarray(results[k], np.float32) for k in ("jit", "triton")]
                row["difference"] = float(np.abs(pair[0] - pair[1]).max())
                row["speedup"] = row["jit"] / row["triton"]
            rows.append(row)
            print(row, flush=True)
    Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
