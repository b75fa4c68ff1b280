"""Whole models beside `jax.jit`: by the number of tokens (one sequence), or how long it takes to plan and compile many layers.

    python benchmarks/models.py --tokens 512 1024 4096 --out models.json   # fused, checked and alternating; worst first
    python benchmarks/models.py transformers-gpt2 --layers 48               # seconds to trace, plan, lower and compile

Models are those programs of `benchmarks/workloads` that take a number of tokens: attention layers and encoder blocks of Flax, Haiku
and Equinox, and models of `transformers`. What is needed beside the tests' packages is in `requirements/programs.txt`.
"""

import argparse
import gc
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("PALLASFUSE_KEEP_PLANS", "0")  # planning is measured

import jax

import pallasfuse as pf
from benchmarks import workloads
from benchmarks.program_timing import Contender, Row, ratio, reason_of, take_turns
from benchmarks.workloads.registry import Built, Program, Size

SIZE: Size = "gpu" if jax.default_backend() == "gpu" else "cpu"
ROUNDS = 7
"""Times that every model is called at each length, in turn with the other way to run it."""


def models(names: Sequence[str], parameter: str) -> Iterator[Program]:
    """The programs whose builder takes the parameter, and a number of tokens that may be left out."""
    for entry in workloads.programs(tuple(names)):
        parameters = inspect.signature(entry.build).parameters
        if parameter in parameters and "tokens" in parameters and parameters["tokens"].default is None:
            yield entry


def timed(function: Any, *arguments: Any) -> tuple[Any, float]:
    """A result, and the seconds that it took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def by_length(built: Built) -> Row:
    """Times of a model, plain and fused, which take turns; `x` says how many times as fast the fused one is."""
    arrays = built.arrays()
    fused = pf.fuse(built.function)
    plan = fused.explain(*arrays)
    ways = [Contender(jax.jit(f).lower(*arrays).compile()) for f in (built.function, fused)]
    take_turns(ways, arrays, rounds=ROUNDS)
    plain_ms, fused_ms = (1e-3 * statistics.median(map(min, way.samples.rounds)) for way in ways)
    x = ratio(ways[0].samples, ways[1].samples)
    return {"planned": len(plan.kernels), "jit_ms": plain_ms, "fused_ms": fused_ms, "x": x}


def by_layers(built: Built) -> Row:
    """Seconds to trace, plan, lower and compile a model, plain and fused without check; `x` says how many times as long compiling
    takes."""
    structs = built.structs
    fused = pf.fuse(built.function, options=pf.FuseOptions(check=False))
    row: Row = {}
    _, row["trace_s"] = timed(jax.jit(built.function).trace, *structs)
    plan, row["plan_s"] = timed(fused.explain, *structs)
    for name, function in (("jit", built.function), ("fused", fused)):
        lowered, row[f"{name}_lower_s"] = timed(jax.jit(function).lower, *structs)
        _, row[f"{name}_compile_s"] = timed(lowered.compile)
    row |= {"planned": len(plan.kernels), "summary_lines": len(plan.summary.splitlines())}
    return row | {"x": row["fused_compile_s"] / row["jit_compile_s"]}


def measured(entry: Program, extents: dict[str, int]) -> Row:
    """The row of a model at some extents, or why there is none."""
    row: Row = {"name": entry.name, **extents}
    try:
        built = entry.build(SIZE, **extents)  # type: ignore[call-arg]
        row |= by_layers(built) if "layers" in extents else by_length(built)
    except Exception as error:
        row["failed"] = reason_of(error)
    jax.clear_caches()
    gc.collect()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="prefixes of names or groups of programs; all by default")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument(
        "--layers", type=int, help="so many layers, planned and compiled, of the first number of tokens"
    )
    parser.add_argument("--out", type=Path, help="where the rows are written as JSON")
    options = parser.parse_args()
    rows = []
    for entry in models(options.names, "layers" if options.layers else "tokens"):
        for tokens in options.tokens[:1] if options.layers else options.tokens:
            rows.append(measured(entry, {"tokens": tokens} | ({"layers": options.layers} if options.layers else {})))
            print(_line(rows[-1]), flush=True)
    rows.sort(key=lambda row: row.get("x") or 0.0, reverse=bool(options.layers))
    print("\nworst first")
    print("\n".join(map(_line, rows)))
    if options.out:
        device = jax.devices()[0].device_kind
        options.out.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1) + "\n")


def _line(row: Row) -> str:
    shown = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items() if k not in ("name", "tokens")}
    return f"{row['name']:28} {row['tokens']:6} " + " ".join(f"{k} {v}" for k, v in shown.items())


if __name__ == "__main__":
    main()
