"""The cost of the check, and how right it is: first and cached check of whole functions, their verdicts, and the speed of the
checked function beside `jax.jit`. On a GPU also how its figures for short programs compare with CUPTI's.

python benchmarks/check.py [--small] [--json FILE]
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ["PALLASFUSE_CACHE_DIR"] = tempfile.mkdtemp(prefix="pallasfuse-check-")
os.environ["PALLASFUSE_CHECK"] = "1"

import jax
import jax.numpy as jnp

import pallasfuse as pf
from pallasfuse import timing
from pallasfuse.check import check


def softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


def normalise_and_multiply(x: Any, w: Any) -> Any:
    return ((x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)) @ w


def group_norm(x: Any) -> Any:
    y = x.reshape(*x.shape[:-1], 32, -1)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    return ((y - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)


def causal(q: Any, k: Any, v: Any) -> Any:
    n = q.shape[1]
    s = jnp.einsum("hid,hjd->hij", q, k) / q.shape[-1] ** 0.5
    s = jnp.where(jnp.arange(n) <= jnp.arange(n)[:, None], s, -jnp.inf)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(s, -1), v)


def relative_bias(q: Any, k: Any, v: Any, table: Any) -> Any:
    """A bias from a table, by distance."""
    n = q.shape[1]
    distance = jnp.clip(jnp.arange(n)[:, None] - jnp.arange(n) + 64, 0, 127)
    s = jnp.einsum("hid,hjd->hij", q, k) / q.shape[-1] ** 0.5 + jnp.moveaxis(table[distance], -1, 0)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(s, -1), v)


def encoder(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, w1: Any, w2: Any) -> Any:
    """An encoder of two equal layers."""
    n, d = x.shape
    for _ in range(2):
        h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        q, k, v = (jnp.moveaxis((h @ w).reshape(n, -1, 64), 1, 0) for w in (wq, wk, wv))
        p = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / 8, -1)
        x = x + jnp.moveaxis(p @ v, 0, 1).reshape(n, d) @ wo
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(h @ w1) @ w2
    return x


def cases(gpu: bool, small: bool) -> dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]]:
    """Returns functions with the shapes of their arguments."""
    scale = 4 if small else 1
    rows, width = (16384 if gpu else 4096) // scale, 4096 // scale
    n, heads = (4096 if gpu else 2048) // scale, 16 if gpu else 8
    d = (1024 if gpu else 512) // scale
    head = (heads, n, 64)
    return {
        "softmax": (softmax, [(rows, width)]),
        "softmax, short": (softmax, [(256, 1024)]),
        "normalise and multiply": (normalise_and_multiply, [(rows, 1024), (1024, 1024)]),
        "group norm": (group_norm, [(8, 64 // scale, 64 // scale, 256)]),
        "causal": (causal, [head] * 3),
        "causal, short": (causal, [(heads, 256, 64)] * 3),
        "relative bias": (relative_bias, [*[(heads, n // 2, 64)] * 3, (128, heads)]),
        "encoder": (encoder, [(n // 2, d), *[(d, d)] * 4, (d, 4 * d), (4 * d, d)]),
    }


def calls_ms(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of calls that take turns, on a GPU of eight calls that are awaited together."""
    count = 8 if jax.default_backend() == "gpu" else 1
    taken: dict[str, list[float]] = {n: [] for n in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready([function() for _ in range(count)])
            taken[name].append(1e3 * (time.perf_counter() - start) / count)
    return {n: statistics.median(t) for n, t in taken.items()}


def measure(name: str, function: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: Any) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scale = [1.0 if n == 0 or len(s) != 2 else s[0] ** -0.5 for n, s in enumerate(shapes)]
    arrays = [(jax.random.normal(k, s) * c).astype(dtype) for k, s, c in zip(keys, shapes, scale, strict=True)]
    fused, device = pf.fuse(function), jax.devices()[0]
    plan = fused.trace(*arrays).fuse().tile().plan
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        checked = check(plan, device)
    first_s = time.perf_counter() - start
    cached = []
    for _ in range(5):
        start = time.perf_counter()
        check(plan, device)
        cached.append(1e3 * (time.perf_counter() - start))
    plain = jax.jit(function)
    times = calls_ms({"jit": lambda: plain(*arrays), "checked": lambda: fused(*arrays)}, 15)
    return {
        "case": name, "kernels": len(plan.kernels), "kept": len(checked.kernels), "first_check_s": first_s,
        "first_check_s_a_kernel": first_s / max(1, len(plan.kernels)), "cached_check_ms": min(cached),
        "jit_ms": times["jit"], "checked_ms": times["checked"], "speedup": times["jit"] / times["checked"],
        "verdicts": [str(v) for v in checked.verdicts], "warnings": [str(w.message) for w in caught],
    }  # fmt: skip


def against_cupti(dtype: Any) -> list[dict[str, Any]]:
    """Compares the loop in which short programs are measured with the sum of their kernels' times."""
    from jax.experimental.mosaic.gpu import profiler

    rows = []
    for shape in [(64, 512), (256, 1024), (1024, 1024), (4096, 2048)]:
        x = jax.random.normal(jax.random.key(0), shape).astype(dtype)
        plain = jax.jit(softmax)
        looped = jax.jit(timing.repeated(softmax, 32))
        jax.block_until_ready((plain(x), looped(x)))
        sampled = {}
        for label, program, times in (("sent one by one", plain, 1), ("in a loop", looped, 32)):
            sample = timing.Sampled(functools.partial(program, x), in_flight=True, times=times)
            sampled[label] = statistics.median(1e6 * s / n for s, n in (sample() for _ in range(20)))
        _, kernels_ms = profiler.measure(softmax, iterations=10)(x)
        rows.append({"shape": shape, **sampled, "CUPTI": 1e3 * statistics.median(kernels_ms)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quarter of the sizes")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if gpu else jnp.float32
    rows = []
    for name, (function, shapes) in cases(gpu, options.small).items():
        row = measure(name, function, shapes, dtype)
        rows.append(row)
        print(f"{name:24} {row['kept']}/{row['kernels']} kernels, first check {row['first_check_s']:.2f} s "
              f"({row['first_check_s_a_kernel']:.2f} a kernel), cached {row['cached_check_ms']:.2f} ms; "
              f"jit {row['jit_ms']:.3f} ms, checked {row['checked_ms']:.3f} ms: {row['speedup']:.2f}x", flush=True)  # fmt: skip
        for line in (*row["verdicts"], *row["warnings"]):
            print(f"    {line}")
    if gpu:
        for row in against_cupti(dtype):
            rows.append(row)
            print(row)
    if options.json:
        options.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
