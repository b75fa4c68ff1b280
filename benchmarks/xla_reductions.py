"""How long XLA's own reductions take on the device at hand, beside their price: the source of `pallasfuse/price/xla.py` for GPUs.

    python benchmarks/xla_reductions.py
    python benchmarks/xla_reductions.py columns --out $OUT/reductions.json

Three kinds of programs, each over shapes [kept, reduced, columns] of one number of elements:

- `columns`: sums over the middle axis of an array in memory; the last axis is kept.
- `outer`: largest sums of a pair of values, a[kept, reduced] + b[reduced, columns]: nothing of the space lies in memory.
- `rows`: the same where the reduced axis is the last one of both operands.

Times are microseconds, sums of kernel times on a GPU and wall times on a CPU, which must be otherwise idle.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.program_kernels import device_at_hand
from benchmarks.scalar_functions import microseconds
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import price_xla

ELEMENTS = {"gpu": 1 << 25, "cpu": 1 << 22}
REDUCED = (4, 16, 64, 333, 1024, 8192)
COLUMNS = (3, 16, 64, 257, 2048)
KINDS: dict[str, Callable[..., Any]] = {
    "columns": lambda x: jnp.sum(x, axis=1),
    "outer": lambda a, b: jnp.max(a[:, :, None] + b[None], axis=1),
    "rows": lambda a, b: jnp.max(a[:, None, :] + b[None], axis=2),
}


def cases(kinds: Sequence[str], elements: int) -> Iterator[tuple[str, tuple[int, int, int], str, tuple[Any, ...]]]:
    """Yields the kind, [kept, reduced, columns], the type, and the arguments as shapes and types."""
    for kind in kinds:
        for reduced in REDUCED:
            for columns in COLUMNS:
                kept = elements // (reduced * columns)
                if kept < 1:
                    continue
                for dtype in ("float32", "bfloat16") if kind == "columns" else ("float32", "int32", "int16"):
                    shapes = {
                        "columns": [(kept, reduced, columns)],
                        "outer": [(kept, reduced), (reduced, columns)],
                        "rows": [(kept, reduced), (columns, reduced)],
                    }[kind]
                    yield kind, (kept, reduced, columns), dtype, tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="all by default")
    parser.add_argument("--jobs", type=int, default=2, help="threads that compile")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    device = device_at_hand()
    todo = list(cases(options.kinds or list(KINDS), ELEMENTS[device.platform]))
    with ThreadPoolExecutor(options.jobs) as pool:
        calls = list(pool.map(lambda c: jax.jit(KINDS[c[0]]).lower(*c[3]).compile(), todo))
    rows = []
    print(f"{'kind':8} {'kept':>9} {'reduced':>7} {'columns':>7} {'type':9} {'us':>9} {'price':>9} {'ratio':>6}")
    for (kind, shape, dtype, structs), call in zip(todo, calls, strict=True):
        arguments = [jnp.ones(s.shape, s.dtype) for s in structs]
        us = microseconds(call, *arguments)
        price = price_xla(convert(jax.make_jaxpr(KINDS[kind])(*structs)).program, device).us
        rows.append({"kind": kind, "shape": shape, "dtype": dtype, "us": round(us, 2), "price_us": round(price, 2)})
        print(
            f"{kind:8} {shape[0]:9} {shape[1]:7} {shape[2]:7} {dtype:9} {us:9.1f} {price:9.1f} {price / us:6.2f}",
            flush=True,
        )
        if options.out:
            with open(options.out, "w") as file:
                json.dump({"device": device.kind, "rows": rows}, file, indent=0)
    ratios = [r["price_us"] / r["us"] for r in rows]
    print(f"{len(rows)} programs: predicted over measured {statistics.geometric_mean(ratios):.2f} (geometric mean)")


if __name__ == "__main__":
    main()
