"""Attention over keys and values that are sharded over the devices of this machine, beside one device: times and what is exchanged.

`--check` compares with one device. `XLA_FLAGS=--xla_force_host_platform_device_count=4` makes devices of a CPU; give small sizes
then: `python benchmarks/sharded.py --keys 2048 --queries 64 --heads 4 --check`.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pallasfuse as pf


def attend(q: Any, k: Any, v: Any) -> Any:
    """q: (heads, queries, d), k, v: (heads, keys, d)."""
    scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("hij,hje->hie", weights, v)


SHARDINGS = {"keys": (P(), P(None, "devices"), P(None, "devices")), "heads": (P("devices"),) * 3}


def median_ms(run: Callable[[], Any], repeats: int, in_a_row: int) -> float:
    """Wall time of a call among others `in_a_row`, which are dispatched together; median of `repeats` after three more."""
    times = []
    for n in range(repeats + 3):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(in_a_row)])
        if n >= 3:
            times.append(1e3 * (time.perf_counter() - start) / in_a_row)
    return statistics.median(times)


def exchanged_bytes(text: str) -> int:
    """Bytes of the results of all collectives in compiled HLO, on one device."""
    total = 0
    for dtype, shape in re.findall(
        r"(\w+)\[([\d,]*)\]\{[^}]*\}[^=(]* (?:all-gather|all-reduce|all-to-all)(?:-start)?\(", text
    ):
        size = {"pred": 1, "bf16": 2, "f16": 2}.get(dtype, 4)
        total += size * int(np.prod([int(n) for n in shape.split(",") if n], initial=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=131072)
    parser.add_argument("--queries", type=int, nargs="+", default=[4096, 1])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", default=None)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--in-a-row", type=int, nargs="+", default=[1, 8], help="calls that are dispatched together")
    parser.add_argument("--check", action="store_true", help="compare with the result of one device")
    arguments = parser.parse_args()
    devices = jax.devices()
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}: {arguments.heads} heads of {arguments.dimension}, "
          f"{arguments.keys} keys, {arguments.dtype}")  # fmt: skip
    print(
        f"{'queries':>8} {'in a row':>9} {'sharded':>8} {'on':>3} "
        f"{'ms':>10} {'speedup':>8} {'exchanged kB':>13} {'difference':>10}"
    )
    mesh = jax.make_mesh((len(devices),), ("devices",), axis_types=(AxisType.Auto,))
    fused = jax.jit(pf.fuse(attend, target=arguments.target))
    for queries in arguments.queries:
        shapes = [(arguments.heads, n, arguments.dimension) for n in (queries, arguments.keys, arguments.keys)]
        arrays = [jax.random.normal(key, s, jnp.dtype(arguments.dtype))
                  for key, s in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)]  # fmt: skip
        alone_ms = {n: median_ms(lambda a=arrays: fused(*a), arguments.repeats, n) for n in arguments.in_a_row}
        want = np.asarray(fused(*arrays), np.float32) if arguments.check else None
        for n, ms in alone_ms.items():
            print(f"{queries:>8} {n:>9} {'':>8} {1:>3} {ms:>10.3f}", flush=True)
        for name, specs in SHARDINGS.items():
            if len(devices) == 1 or (name == "heads" and arguments.heads % len(devices)):
                continue
            placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
            compiled = fused.lower(*placed).compile()
            kilobytes = exchanged_bytes(compiled.as_text()) / 1e3
            far = "" if want is None else f"{np.abs(np.asarray(compiled(*placed), np.float32) - want).max():.3g}"
            for n, alone in alone_ms.items():
                ms = median_ms(lambda c=compiled, p=placed: c(*p), arguments.repeats, n)
                gain = alone / ms
                print(
                    f"{queries:>8} {n:>9} {name:>8} {len(devices):>3} {ms:>10.3f} {gain:>8.2f} {kilobytes:>13.0f} {far:>10}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
