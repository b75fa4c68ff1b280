"""How long single kernels of XLA take on the device at hand, beside their price: a source of the constants of GPUs' prices.

    python benchmarks/xla_alone.py
    python benchmarks/xla_alone.py products --jobs 14 --out alone.json

Kinds of programs:

- `columns`: sums over the middle axis of an array in memory, [kept, reduced, columns]; the last axis is kept.
- `outer`: largest sums of a pair of values, a[kept, reduced] + b[reduced, columns]: nothing of the space lies in memory.
- `rows`: the same where the reduced axis is the last one of both operands.
- `products`: matrix products of [m, k] and [k, n], in either order each, of sizes that are and that are not multiples of eight.

Times are microseconds, sums of kernel times on a GPU and wall times on a CPU, which must be otherwise idle.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.program_kernels import device_at_hand
from benchmarks.scalar_functions import microseconds
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import price_xla

ELEMENTS = {"gpu": 1 << 25, "cpu": 1 << 22}
REDUCED = (4, 16, 64, 333, 1024, 8192)
COLUMNS = (3, 16, 64, 257, 2048)
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "columns": lambda x: jnp.sum(x, axis=1),
    "outer": lambda a, b: jnp.max(a[:, :, None] + b[None], axis=1),
    "rows": lambda a, b: jnp.max(a[:, None, :] + b[None], axis=2),
}
KINDS = (*REDUCTIONS, "products")
SIZES = {"gpu": {"m": 2048, "n": 4096, "k": 2048}, "cpu": {"m": 256, "n": 512, "k": 256}}
BYTES = ((1536, 1152, 4608), (4096, 4096, 4096), (16, 4096, 11008), (333, 1000, 1500), (2048, 2048, 4095))
"""Products of bytes and of integers: m, k, n."""


@dataclass(frozen=True, slots=True)
class Case:
    """One program. label: its kind, shape and type."""

    label: str
    function: Callable[..., Any]
    structs: tuple[jax.ShapeDtypeStruct, ...]


def reductions(kind: str, elements: int) -> Iterator[Case]:
    """Yields reductions over spaces of so many points."""
    for reduced, columns in itertools.product(REDUCED, COLUMNS):
        kept = elements // (reduced * columns)
        if not kept:
            continue
        shapes = {
            "columns": [(kept, reduced, columns)],
            "outer": [(kept, reduced), (reduced, columns)],
            "rows": [(kept, reduced), (columns, reduced)],
        }[kind]
        for dtype in ("float32", "bfloat16") if kind == "columns" else ("float32", "int32", "int16"):
            structs = tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)
            yield Case(f"{kind} {kept} {reduced} {columns} {dtype}", REDUCTIONS[kind], structs)


def product(left: str, right: str, dtype: str, sizes: dict[str, int]) -> Case:
    """A product of operands whose dimensions are m, n and the summed k, in the given orders."""
    wide = jnp.int32 if dtype.startswith("int") else jnp.float32
    numbers = (((left.index("k"),), (right.index("k"),)), ((), ()))

    def multiply(a: Any, b: Any) -> Any:
        found = lax.dot_general(a, b, numbers, preferred_element_type=wide)
        return found if dtype.startswith("int") else found.astype(dtype)

    structs = tuple(jax.ShapeDtypeStruct([sizes[a] for a in order], dtype) for order in (left, right))
    return Case(f"products {left} {right} {' '.join(str(sizes[a]) for a in 'mkn')} {dtype}", multiply, structs)


def products(platform: str) -> Iterator[Case]:
    """Yields products of four layouts, in each of which one size is a little shorter, and products of integers."""
    sizes = SIZES[platform]
    shorter = [sizes, *({**sizes, a: sizes[a] - n} for a in "mnk" for n in (1, 4))]
    for left, right in itertools.product(("mk", "km"), ("kn", "nk")):
        yield from (product(left, right, "bfloat16", s) for s in shorter)
    yield from (product("mk", "kn", "float32", s) for s in shorter)
    for m, k, n in BYTES if platform == "gpu" else BYTES[3:4]:
        yield from (product("mk", right, "int8", {"m": m, "k": k, "n": n}) for right in ("kn", "nk"))
    yield product("mk", "kn", "int32", {"m": 333, "k": 1000, "n": 1500})


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each program: what is measured and what is predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="threads that compile")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args(words)
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    device = device_at_hand()
    kinds: Sequence[str] = options.kinds or KINDS
    cases = [c for k in kinds if k in REDUCTIONS for c in reductions(k, ELEMENTS[device.platform])]
    cases += products(device.platform) if "products" in kinds else []
    with ThreadPoolExecutor(options.jobs) as pool:
        calls = list(pool.map(lambda c: jax.jit(c.function).lower(*c.structs).compile(), cases))
    rows = []
    print(f"{'program':42} {'us':>9} {'price':>9} {'ratio':>6}")
    for case, call in zip(cases, calls, strict=True):
        us = microseconds(call, *(jnp.ones(s.shape, s.dtype) for s in case.structs))
        price_us = price_xla(convert(jax.make_jaxpr(case.function)(*case.structs)).program, device).us
        rows.append([case.label, round(us, 2), round(price_us, 2)])
        print(f"{case.label:42} {us:9.1f} {price_us:9.1f} {price_us / us:6.2f}", flush=True)
    ratios = [price_us / us for _, us, price_us in rows]
    print(f"{len(rows)} programs: predicted over measured {statistics.geometric_mean(ratios):.2f} (geometric mean)")
    if options.out:
        with open(options.out, "w") as file:
            head = json.dumps({"device": device.kind, "jax": jax.__version__, "columns": ["program", "us", "price_us"]})
            file.write(f'{head[:-1]}, "rows": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")


if __name__ == "__main__":
    main()
