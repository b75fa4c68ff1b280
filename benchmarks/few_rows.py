"""Products of few rows with a matrix by Triton on the GPU at hand, in many launches, beside their price.

    python benchmarks/few_rows.py --launches 60 --out few_rows.json
    python benchmarks/few_rows.py --near-cache --launches 36 --out few_rows_near_cache.json

A program is a product of 16 to 128 rows with one matrix, or two, and what follows it. Each runs in launches that are drawn: tiles
along what is summed, parts of it, warps, and trips whose loads are begun ahead. It prints how the price agrees with the times of
kernels alone, and where the launch stands that the price takes for the fastest.
"""

import argparse
import itertools
import json
import random
import sys
import warnings
from collections.abc import Callable, Sequence
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

import pallasfuse as pf
from benchmarks.scalar_functions import microseconds

SHARED_BYTES = 220 << 10
TILES, PARTS, WARPS, STAGES = (32, 64, 128, 256), (1, 2, 4, 8), (2, 4, 8), (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Case:
    """A product of few rows. shapes: of the rows, the matrices, and what is added."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    matrices: int = 1
    dtype: str = "bfloat16"

    @property
    def rows(self) -> int:
        return max(16, 1 << (self.shapes[0][0] - 1).bit_length())


@dataclass(frozen=True)
class Launch:
    """How a product runs: elements that a trip sums, parts of the sum, warps of a block, and trips that are in flight."""

    summed: int
    parts: int
    warps: int
    stages: int


def _of(kind: str, rows: int, k: int, n: int, dtype: str = "bfloat16") -> Case:
    turned = kind == "turned"
    shapes: tuple[tuple[int, ...], ...] = ((rows, k), (n, k) if turned else (k, n))
    shapes += {"gated": ((k, n),), "added": ((rows, n),)}.get(kind, ())
    functions: dict[str, Callable[..., Any]] = {
        "relu": lambda x, w: jax.nn.relu(x @ w),
        "turned": lambda x, w: jax.nn.relu(x @ w.T),
        "gated": lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
        "added": lambda x, w, r: x @ w + r,
    }
    return Case(f"{kind} {rows}x{k}x{n} {dtype}", functions[kind], shapes, 2 if kind == "gated" else 1, dtype)


CASES = (
    _of("gated", 16, 4096, 11008), _of("added", 16, 11008, 4096), _of("relu", 16, 4096, 14336), _of("gated", 16, 3584, 18944),
    _of("relu", 16, 5120, 13824), _of("added", 16, 14336, 4096), _of("gated", 32, 4096, 11008), _of("relu", 64, 4096, 14336),
    _of("added", 32, 11008, 4096), _of("relu", 16, 1024, 4096), _of("gated", 16, 2048, 5504), _of("added", 64, 5504, 2048),
    _of("relu", 16, 4096, 11008, "float32"), _of("gated", 32, 2048, 5632, "float32"), _of("relu", 24, 4096, 12288),
    _of("relu", 128, 4096, 14336), _of("turned", 16, 4096, 32000), _of("turned", 32, 2048, 8192),
)  # fmt: skip


NEAR_CACHE = (
    *(_of("relu", 16, k, n) for k, n in (
        (4096, 4096), (2048, 4096), (4096, 2048), (4096, 6144), (1024, 8192), (2048, 2048), (4096, 1024), (4096, 5120),
        (8192, 4096), (4096, 8192), (8192, 1024),
    )),
    _of("gated", 16, 2048, 2048), _of("gated", 16, 4096, 4096), _of("relu", 64, 2048, 4096), _of("relu", 64, 4096, 4096),
    _of("added", 16, 4096, 4096), _of("relu", 128, 4096, 4096),
)  # fmt: skip
"""With matrices of 8 to 67 MB: the cache of an H100 or H200 has 52."""


def launches(case: Case, most: int, seed: int = 0) -> list[Launch]:
    """Draws launches whose operands fit in shared memory, and whose parts are whole trips."""
    width = jnp.dtype(case.dtype).itemsize
    columns = 64  # as are planned where nothing else is asked for
    found = [
        Launch(*drawn)
        for drawn in itertools.product(TILES, PARTS, WARPS, STAGES)
        if case.shapes[0][1] % (drawn[0] * drawn[1]) == 0
        and (case.rows + case.matrices * columns) * drawn[0] * width * drawn[3] <= SHARED_BYTES
    ]
    random.Random(f"{case.name} {seed}").shuffle(found)
    return found[:most]


def fused(case: Case, launch: Launch) -> Any:
    """Returns the fused function that runs a product so."""
    tiles = (("i", case.rows), ("j", launch.summed))
    options = pf.FuseOptions(
        price=False,
        check=False,
        target="triton",
        tiles=tiles,
        parts=launch.parts,
        warps=launch.warps,
        stages=launch.stages,
    )
    return pf.fuse(case.function, options=options)


def measure(case: Case, asked: Sequence[Launch]) -> tuple[float, list[tuple[Launch, float, float]]]:
    """Returns the time of `jax.jit`, and launches with the time of each and its price, in microseconds."""
    structs = [jax.ShapeDtypeStruct(s, case.dtype) for s in case.shapes]
    arrays = [
        jax.random.uniform(jax.random.key(n), s.shape, jnp.float32, -0.5, 0.5).astype(s.dtype)
        for n, s in enumerate(structs)
    ]

    def made(launch: Launch) -> Any:
        function = fused(case, launch)
        plan = function.explain(*structs)
        return sum(k.price.us for k in plan.kernels), jax.jit(function).lower(*structs).compile()

    with ThreadPoolExecutor(14) as threads:
        compiled = list(threads.map(made, asked))
    by_xla = microseconds(jax.jit(case.function).lower(*structs).compile(), *arrays)
    return by_xla, [(w, microseconds(c, *arrays), us) for w, (us, c) in zip(asked, compiled, strict=True)]


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each program: how price and clock agree, and the fastest launch by either."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=40, help="so many of each program")
    parser.add_argument("--near-cache", action="store_true", help="programs whose matrices the cache holds, or nearly")
    parser.add_argument("--out", type=Path, help="a JSON file for all of them")
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")
    rows, by_jit = [], {}
    for case in NEAR_CACHE if given.near_cache else CASES:
        by_xla, found = measure(case, launches(case, given.launches))
        us, price = (np.array([f[n] for f in found]) for n in (1, 2))
        ranks = [np.argsort(np.argsort(x)) for x in (us, price)]
        print(
            f"{case.name:32} jit {by_xla:6.1f} us, fastest {us.min():6.1f}, by price {us[price.argmin()]:6.1f}; Spearman "
            f"{np.corrcoef(*ranks)[0, 1]:.2f}, price {np.exp(np.log(price / us).mean()):.2f} of the time",
            flush=True,
        )
        by_jit[case.name] = round(by_xla, 2)
        rows += [[case.name, w.summed, w.parts, w.warps, w.stages, round(t, 2), round(p, 2)] for w, t, p in found]
    if given.out is not None:
        columns = ["program", "summed", "parts", "warps", "stages", "us", "price_us"]
        device = jax.devices()[0].device_kind
        given.out.write_text(
            json.dumps({"device": device, "jax": jax.__version__, "jit_us": by_jit, "columns": columns, "rows": rows})
        )


if __name__ == "__main__":
    main()
