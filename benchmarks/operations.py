"""Operations that XLA's CPU backend computes one element after the other, alone: `jax.jit` against `pallasfuse.fuse`.

    python benchmarks/operations.py

Each is of a million elements; microseconds, the least of nine calls, without the check and as users get it. The machine must be
idle.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
from jax import lax

import pallasfuse as pf

ROWS = jax.random.normal(jax.random.key(0), (256, 4096))
KEY = jax.random.key(7)
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "argmax of rows": (lambda x: jnp.argmax(x, -1), (ROWS,)),
    "argmin of columns": (lambda x: jnp.argmin(x, 0), (ROWS,)),
    "sort of rows": (lambda x: jnp.sort(x, -1), (ROWS,)),
    "sort of columns": (lambda x: jnp.sort(x, 0), (ROWS,)),
    "argsort of rows": (jnp.argsort, (ROWS,)),
    "median of rows": (lambda x: jnp.median(x, axis=1), (ROWS,)),
    "random bits": (lambda key: jax.random.bits(key, (1000, 1000)), (KEY,)),
    "normal numbers": (lambda key: jax.random.normal(key, (1000, 1000)), (KEY,)),
    "categorical draws": (jax.random.categorical, (KEY, ROWS)),
    "sine": (jnp.sin, (ROWS,)),
    "log-sum-exp along rows": (lambda x: lax.cumlogsumexp(x, 1), (ROWS,)),
    "log-sum-exp along columns": (lambda x: lax.cumlogsumexp(x, 0), (ROWS,)),
}


def microseconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Returns the least wall time of nine calls."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return 1e6 * min(times[1:])


def main() -> None:
    for name, (function, arguments) in OPERATIONS.items():
        plain = microseconds(jax.jit(function), arguments)
        by_price, checked = (
            microseconds(pf.fuse(function, options=pf.FuseOptions(check=check)), arguments) for check in (False, True)
        )
        print(f"{name:26} {plain:9.0f} us {plain / by_price:6.2f}x {plain / checked:6.2f}x checked", flush=True)


if __name__ == "__main__":
    main()
