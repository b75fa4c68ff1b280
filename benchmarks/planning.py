"""Measures how long a plan takes, for every example: from call to plan, and the Python that a cached call costs.

Each case runs in a process of its own, so that nothing derived for one is remembered for the next. SymPy is imported
before the clock starts. The overhead of a call is its time less that of `jax.jit` of the fused function, which runs
the same executable.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

FIRST_LENGTH, SECOND_LENGTH = 512, 640
CALLS_PER_BLOCK, BLOCKS = 100, 15


def elapsed_s(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def call_us(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Mean time of a call, the result awaited."""
    import jax

    start = time.perf_counter()
    for _ in range(CALLS_PER_BLOCK):
        jax.block_until_ready(function(*arguments))
    return 1e6 * (time.perf_counter() - start) / CALLS_PER_BLOCK


def measure(case_name: str) -> dict[str, Any]:
    """One case in this process."""
    import jax
    import jax.numpy as jnp
    import sympy  # noqa: F401

    from benchmarks.cases import all_cases

    case = next(case for case in all_cases() if case.name == case_name).small()

    def shapes(length: int) -> list[Any]:
        arrays = jax.eval_shape(lambda: case.arrays(length, jnp.float32))
        return [*arrays, *case.static]

    first, second = shapes(FIRST_LENGTH), shapes(SECOND_LENGTH)
    row: dict[str, Any] = {"case": case_name}
    row["first_plan_s"] = elapsed_s(case.fused.explain, *first)
    row["second_shape_s"] = elapsed_s(case.fused.explain, *second)

    arrays = case.arrays(16, jnp.float32)  # small: the arithmetic must not hide the Python
    eager = lambda *a: case.fused(*a, *case.static)  # noqa: E731
    compiled = jax.jit(eager)
    call_us(eager, arrays), call_us(compiled, arrays)
    differences_us = [call_us(eager, arrays) - call_us(compiled, arrays) for _ in range(BLOCKS)]
    row["call_overhead_us"] = statistics.median(differences_us)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="one case, in this process, as a line of JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return

    from benchmarks.cases import all_cases

    print(f"{'case':28}{'first plan s':>14}{'second shape s':>16}{'call overhead us':>18}")
    for case in all_cases():
        command = [sys.executable, __file__, "--case", case.name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"{case.name:28}failed: {done.stderr.strip().splitlines()[-1][:90]}")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{case.name:28}{row['first_plan_s']:14.3f}{row['second_shape_s']:16.3f}{row['call_overhead_us']:18.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
