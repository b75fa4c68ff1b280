"""Whole programs that users run: `jax.jit`, fused, and every kernel of the plan beside what was predicted for it.

    python benchmarks/programs.py --list
    python benchmarks/programs.py decoder transformers-gpt2 --out rows.json
    python benchmarks/programs.py --raw --jobs 14 --out raw.json

Names are prefixes of programs or groups. Programs are compiled at the same time (--jobs processes) and measured one by one; a
program that fails is a row with the reason. Times are in microseconds: on a GPU the sum of kernel times, on a CPU wall time.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

Row = dict[str, Any]


def speedup(row: Row, label: str = "fused") -> float | None:
    """How many times as fast as jax.jit."""
    jit, other = row.get("jit", {}).get("us"), row.get(label, {}).get("us")
    return jit / other if jit and other else None


def line(row: Row) -> str:
    """A row, as printed."""
    if "failed" in row or "not_installed" in row:
        return f"{row['name']:36} {row.get('failed') or row['not_installed']}"
    jit, fused = row["jit"], row["fused"]
    if "us" not in jit or "us" not in fused:
        return f"{row['name']:36} " + "; ".join(
            f"{n}: {row[n]['reason']}" for n in ("jit", "fused") if "reason" in row[n]
        )
    measured = [
        f"{k['predicted_us']:.0f}>{k['alone'].get('us', math.nan):.0f}/{k['xla'].get('us', math.nan):.0f}"
        for k in row["kernels"]
    ]
    launches = f"{jit.get('launches', '-')}/{fused.get('launches', '-')}"
    return (
        f"{row['name']:36} jit {jit['us']:10.1f} fused {fused['us']:10.1f} {speedup(row):6.2f}x launches {launches:>8} "
        f"error {row.get('error', math.nan):.0e} plan {row.get('plan_s', 0):5.2f} s  {' '.join(measured)}"
    )


def summary(rows: list[Row]) -> list[str]:
    """A few lines over all rows."""
    found = {r["name"]: s for r in rows if (s := speedup(r))}
    failed = [r["name"] for r in rows if r["name"] not in found and "not_installed" not in r]
    missing = [r["name"] for r in rows if "not_installed" in r]
    lines = [
        f"{len(rows)} programs; failed: {', '.join(failed) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    ]
    if found:
        mean = math.exp(statistics.fmean(math.log(s) for s in found.values()))
        slow = sorted((s, n) for n, s in found.items() if s < 0.97)
        lines.append(f"geometric mean {mean:.3f}x; {len(slow)} below 0.97, {sum(s < 0.85 for s, _ in slow)} below 0.85")
        lines += [f"  {s:6.2f}x {n}" for s, n in slow]
    kernels = [k for r in rows for k in r.get("kernels", ()) if "us" in k["alone"]]
    for label, pairs in (
        ("kernels", [(k["predicted_us"], k["alone"]["us"]) for k in kernels]),
        ("XLA's of the same equations", [(k["predicted_xla_us"], k["xla"]["us"]) for k in kernels if "us" in k["xla"]]),
    ):
        ratios = sorted(p / m for p, m in pairs if p > 0 and m > 0)
        if len(ratios) > 1:
            mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
            within = sum(0.5 <= r <= 2 for r in ratios) / len(ratios)
            lines.append(
                f"{label}: {len(ratios)}, predicted over measured {mean:.2f} (geometric mean), "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {within:.0%} within a factor of two"
            )
    return lines


def content(rows: list[Row], options: argparse.Namespace) -> Row:
    import jax

    return {"jax": jax.__version__, "size": options.size, "rows": rows}


def write(path: str | None, rows: list[Row], options: argparse.Namespace) -> None:
    """The file as a whole: it is complete after each row."""
    if path:
        unfinished = Path(path).with_suffix(".part")
        unfinished.write_text(json.dumps(content(rows, options), indent=1, default=str) + "\n")
        os.replace(unfinished, path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="prefixes of names or groups; all by default")
    parser.add_argument("--size", choices=["gpu", "cpu", "tiny"], help="by default that of the device at hand")
    parser.add_argument("--target", help="of the fused programs; by default the best one")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--out", help="JSON file, written after each row")
    parser.add_argument("--raw", action="store_true", help="jax.jit and fused without check, with every kernel")
    parser.add_argument("--no-kernels", action="store_true", help="do not measure kernels alone")
    parser.add_argument(
        "--compile-s", type=float, default=170.0, help="no further program is compiled after so many seconds"
    )
    parser.add_argument("--total-s", type=float, default=345.0, help="what is not measured by then is given up")
    parser.add_argument(
        "--each-s", type=float, default=120.0, help="the longest that one program may compile or measure"
    )
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def default_size() -> str:
    """By asking the driver, since JAX would take the device's memory in this process."""
    return "gpu" if any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"


def main() -> None:
    options = arguments()
    from benchmarks import program_workers, workloads

    chosen = list(workloads.programs(tuple(options.names)))
    if options.list:
        for entry in chosen:
            print(f"{entry.group:14} {entry.name}")
        print(f"{len(chosen)} programs")
        return
    options.size = options.size or default_size()
    settings = {"size": options.size, "target": options.target, "kernels": not options.no_kernels}
    limits = {"compile_s": options.compile_s, "total_s": options.total_s, "each_s": options.each_s}
    rows: list[Row] = []
    begin = time.monotonic()
    for row in program_workers.rows([e.name for e in chosen], settings, jobs=options.jobs, **limits):
        rows.append(row | {"at_s": round(time.monotonic() - begin, 1)})
        print(line(row), flush=True)
        write(options.out, rows, options)
    rows.sort(key=lambda r: speedup(r) or 0.0)
    write(options.out, rows, options)
    print(*summary(rows), f"{time.monotonic() - begin:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
