"""Causal attention on CPU: time and peak memory of whole processes, fused against `jax.jit` of the same function.

python benchmarks/cpu.py fused --length 4096      one process, one line of JSON
python benchmarks/cpu.py jit --length 4096
python benchmarks/cpu.py compare --processes 5    both in turn, medians and ratios
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def peak_rss_mb() -> float:
    """Peak resident memory of this process in MB (1e6 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6


def measure(variant: str, case_name: str, length: int, heads: int, head_dim: int, repeats: int) -> dict[str, Any]:
    """Runs one variant in this process."""
    import jax
    import jax.numpy as jnp

    from benchmarks.cases import ATTENTION

    case = next(case for case in ATTENTION if case.name == case_name)
    groups = case.query_heads // case.key_heads
    case = dataclasses.replace(case, query_heads=heads, key_heads=max(1, heads // groups), head_dim=head_dim)
    function = case.fused if variant == "fused" else jax.jit(case.plain, static_argnums=case.static_argnums)
    arrays = jax.block_until_ready(case.arrays(length, jnp.float32))
    times_ms = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays, *case.static))
        times_ms.append(1e3 * (time.perf_counter() - start))
    return {
        "variant": variant,
        "case": case_name,
        "length": length,
        "heads": heads,
        "head_dim": head_dim,
        "first_call_ms": round(times_ms[0], 2),
        "median_call_ms": round(statistics.median(times_ms[1:]), 2),
        "peak_rss_mb": round(peak_rss_mb(), 1),
    }


def measure_in_process(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process of one variant; `process_s` is its whole life, imports and compilation included."""
    command = [sys.executable, __file__, variant]
    for name in ("case", "length", "heads", "head_dim", "repeats"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    start = time.perf_counter()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    row["process_s"] = round(time.perf_counter() - start, 2)
    return row


def compare(options: argparse.Namespace) -> None:
    rows: dict[str, list[dict[str, Any]]] = {"jit": [], "fused": []}
    for _ in range(options.processes):
        for variant, measured in rows.items():
            measured.append(measure_in_process(variant, options))
    shape = f"{options.length} x {options.length}, {options.heads} heads, head dim {options.head_dim}, float32"
    print(f"{options.case}, {shape}; medians of {options.processes} processes each, {options.repeats} calls in each")
    print(f"{'':16}{'jax.jit':>12}{'fused':>12}{'ratio':>10}")
    for quantity in ("median_call_ms", "first_call_ms", "process_s", "peak_rss_mb"):
        jit, fused = (statistics.median(row[quantity] for row in rows[variant]) for variant in ("jit", "fused"))
        print(f"{quantity:16}{jit:12.1f}{fused:12.1f}{fused / jit:9.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=["fused", "jit", "compare"])
    parser.add_argument("--case", default="causal", choices=["global", "causal", "gqa", "alibi", "softcap", "window"])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls in a process, after the first")
    parser.add_argument("--processes", type=int, default=3, help="compare: processes of each variant")
    options = parser.parse_args()
    if options.variant == "compare":
        compare(options)
    else:
        row = measure(options.variant, options.case, options.length, options.heads, options.head_dim, options.repeats)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
