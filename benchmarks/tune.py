"""Predicted against measured: every way to run every kernel of whole functions, measured by `pallasfuse.tune`.

python benchmarks/tune.py [--all] [--small] [--seconds 60] [--json FILE] [--case NAME ...]

Prints each candidate with its prediction, Spearman's rank correlation over the candidates of each kernel and over all, the share
that is within a factor of two, and the same for XLA's own programs.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ.setdefault("PALLASFUSE_CACHE_DIR", tempfile.mkdtemp(prefix="pallasfuse-tune-"))

import jax
import jax.numpy as jnp

import pallasfuse as pf
from benchmarks.check import cases


def ranks(values: Sequence[float]) -> list[float]:
    """Positions in order, equal values sharing the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for n in order[start:end]:
            found[n] = (start + end - 1) / 2
        start = end
    return found


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation; nan where there is nothing to rank."""
    a, b = ranks(xs), ranks(ys)
    n = len(a)
    mean = (n - 1) / 2
    over = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    under = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return over / under if under else math.nan


def summary(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Summarizes how (predicted, measured) pairs agree."""
    pairs = [(p, m) for p, m in pairs if p > 0 and m > 0]
    ratios = [p / m for p, m in pairs]
    within = sum(0.5 <= r <= 2 for r in ratios) / len(ratios) if ratios else math.nan
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    return {
        "of": name, "count": len(pairs), "spearman": spearman([p for p, _ in pairs], [m for _, m in pairs]),
        "within_a_factor_of_two": within, "geometric_mean_of_predicted_by_measured": mean,
    }  # fmt: skip


def tune_case(name: str, dtype: Any, options: argparse.Namespace) -> dict[str, Any]:
    function, shapes = cases(jax.default_backend() == "gpu", options.small)[name]
    fused = pf.fuse(function, options=pf.FuseOptions(price=not options.all))
    tuned = pf.tune(fused, *(jax.ShapeDtypeStruct(s, dtype) for s in shapes), seconds=options.seconds)
    print(f"\n{name}\n{tuned}", flush=True)
    rows = [
        {"kernel": c.kernel, "schedule": c.schedule, "target": c.target, "predicted_us": c.predicted_us,
         "measured_us": c.measured_us, "xla_us": c.xla_us, "error": c.error, "won": c.won}
        for c in tuned.candidates
    ]  # fmt: skip
    return {"case": name, "seconds": tuned.seconds, "predicted_xla_us": tuned.predicted_xla_us, "candidates": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help="also kernels that are not predicted to be faster than XLA's"
    )
    parser.add_argument("--small", action="store_true", help="a quarter of the sizes")
    parser.add_argument("--seconds", type=float, help="at most so long for a case")
    parser.add_argument("--case", action="append", help="only this one; may be given several times")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    names = options.case or list(cases(jax.default_backend() == "gpu", options.small))
    found = [tune_case(n, dtype, options) for n in names]
    measured = [(r, case) for case in found for r in case["candidates"] if r["measured_us"] is not None]
    summaries = []
    for case in found:
        for kernel in dict.fromkeys(r["kernel"] for r in case["candidates"]):
            own = [(r["predicted_us"], r["measured_us"]) for r, c in measured if c is case and r["kernel"] == kernel]
            if len(own) > 2:
                summaries.append(summary(f"{case['case']}: {kernel}", own))
    summaries.append(summary("all candidates", [(r["predicted_us"], r["measured_us"]) for r, _ in measured]))
    if not options.all:  # else there are no prices of XLA's programs
        xla = {(c["case"], r["kernel"]): (c["predicted_xla_us"][r["kernel"]], r["xla_us"]) for r, c in measured}
        summaries.append(summary("XLA's own", list(xla.values())))
    print()
    for line in summaries:
        print(f"{line['of']}: {line['count']} measured, Spearman {line['spearman']:.2f}, "
              f"{line['within_a_factor_of_two']:.0%} within a factor of 2, "
              f"predicted/measured {line['geometric_mean_of_predicted_by_measured']:.2f}")  # fmt: skip
    if options.json:
        content = {"device": jax.devices()[0].device_kind, "cases": found, "summaries": summaries}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
