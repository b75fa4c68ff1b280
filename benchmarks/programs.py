"""Whole programs that users run: `jax.jit`, fused, and every kernel of the plan beside what was predicted for it.

    python benchmarks/programs.py --list
    python benchmarks/programs.py --out rows.json
    python benchmarks/programs.py decoder transformers-gpt2 --no-tune
    python benchmarks/programs.py decoder --explain
    python benchmarks/programs.py --raw --jobs 14 --out raw.json
    python benchmarks/programs.py --report first.json second.json --out both.json

Names are prefixes of programs or groups. A program is compiled by `jax.jit`, fused by price alone (`FuseOptions(check=False)`),
fused as users get it (checked on the clock) and tuned (`pf.tune`). Programs are compiled at the same time (--jobs processes), then
checked, tuned and measured one by one; a program that fails is a row with the reason. Times are in microseconds: on a GPU the sum
of kernel times, on a CPU wall time. A CPU must be otherwise idle.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.program_report import HEADER, compact, line, summary, summary_lines, table, worst_first

Row = dict[str, Any]

COMPILE_S, TOTAL_S = {"gpu": 210.0, "cpu": 420.0}, {"gpu": 350.0, "cpu": 880.0}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="prefixes of names or groups; all by default")
    parser.add_argument("--prefixes", nargs="+", default=[], help="the same")
    parser.add_argument("--size", choices=["gpu", "cpu", "tiny"], help="by default that of the device at hand")
    parser.add_argument("--target", help="of the fused programs; by default the best one")
    parser.add_argument("--out", help="JSON file, written after each row")
    mode = parser.add_argument_group("what is measured")
    mode.add_argument("--raw", action="store_true", help="jax.jit and fused without check only, with XLA's HLO")
    mode.add_argument("--no-tune", action="store_true", help="do not tune")
    mode.add_argument("--tune-s", type=float, default=3.0, help="what tuning one program may take")
    mode.add_argument("--no-kernels", action="store_true", help="do not measure kernels alone")
    mode.add_argument("--all-kernels", action="store_true", help="also kernels not predicted to be faster than XLA's")
    mode.add_argument("--list", action="store_true", help="print the programs")
    mode.add_argument("--explain", action="store_true", help="print the plans for the device at hand; nothing is run")
    mode.add_argument("--report", action="store_true", help="names are files: report on all their rows together")
    limits = parser.add_argument_group("how long it takes")
    limits.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2) - 2), help="processes that compile")
    limits.add_argument("--no-prime", action="store_true", help="do not fill the compiler's cache before checks (GPU)")
    limits.add_argument("--compile-s", type=float, help="no further program is compiled after so many seconds")
    limits.add_argument("--total-s", type=float, help="what is not measured by then is given up")
    limits.add_argument("--each-s", type=float, default=150.0, help="the longest that one step of a program may take")
    return parser.parse_args()


def content(rows: Sequence[Row], about: Row) -> str:
    """The file: what the rows are of, the summary, and one line for each row."""
    ordered = worst_first(rows)
    head = json.dumps(compact({**about, "summary": summary(ordered)}), indent=1)
    lines = ",\n".join(json.dumps(compact(r), separators=(",", ":"), default=str) for r in ordered)
    return f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'


def write(path: str | None, rows: Sequence[Row], about: Row) -> None:
    """The file as a whole: it is complete after each row."""
    if path:
        unfinished = Path(path).with_suffix(".part")
        unfinished.write_text(content(rows, about))
        os.replace(unfinished, path)


def default_size() -> str:
    """Returns the size for the device at hand.

    It looks for the driver, since JAX would take the device's memory in this process.
    """
    return "gpu" if any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"


def measure(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Measure programs, print each row as it is known, and the report at the end."""
    from importlib.metadata import version

    from benchmarks import program_workers

    size = options.size or default_size()
    kind = "gpu" if default_size() == "gpu" else "cpu"
    about: Row = {"jax": version("jax"), "size": size, "device": "", "mode": "raw" if options.raw else "full"}
    rows: list[Row] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        settings = {
            "size": size, "target": options.target, "full": not options.raw, "tune": not options.no_tune, "folder": folder,
            "tune_s": options.tune_s, "kernels": not options.no_kernels, "all_kernels": options.all_kernels,
            "primed": kind == "gpu" and not options.raw and not options.no_prime,
        }  # fmt: skip
        limits = {"compile_s": options.compile_s or COMPILE_S[kind], "total_s": options.total_s or TOTAL_S[kind]}
        print(HEADER, flush=True)
        for row in program_workers.rows(list(names), settings, jobs=options.jobs, each_s=options.each_s, **limits):
            about["device"] = row.pop("device", "") or about["device"]
            rows.append(row | {"at_s": round(time.monotonic() - begin, 1)})
            print(line(row), flush=True)
            write(options.out, rows, about)
    print("", *table(rows), "", *summary_lines(summary(rows)), f"{time.monotonic() - begin:.0f} s", sep="\n")


def report(options: argparse.Namespace) -> None:
    """The report on the rows of files; of a program that several have, the last measured one counts."""
    files = [json.loads(Path(name).read_text()) for name in options.names]
    rows: dict[str, Row] = {}
    for row in (r for f in files for r in f["rows"]):
        if row["name"] not in rows or "jit" in row:
            rows[row["name"]] = row
    about = {k: v for k, v in files[-1].items() if k not in ("rows", "summary")}
    write(options.out, list(rows.values()), about)
    print(*table(list(rows.values())), "", *summary_lines(summary(list(rows.values()))), sep="\n")


def explain(options: argparse.Namespace, chosen: Sequence[Any]) -> None:
    """Prints every plan for the device at hand."""
    from benchmarks import workloads
    from benchmarks.program_variants import fuse_with, step

    for entry in chosen:
        try:
            function, structs = step(workloads.build(entry, options.size or default_size()))
            print(
                f"== {entry.name}", fuse_with(options.target, check=False)(function).explain(*structs).summary, sep="\n"
            )
        except workloads.NotInstalledError as missing:
            print(f"== {entry.name}", missing, sep="\n")


def main() -> None:
    options = arguments()
    if options.report:
        report(options)
        return
    os.environ |= {"PALLASFUSE_PRICE": "1", "PALLASFUSE_CHECK": "1"}  # what users have
    from benchmarks import workloads

    chosen = list(workloads.programs((*options.names, *options.prefixes)))
    if options.list:
        print(*(f"{entry.group:14} {entry.name}" for entry in chosen), f"{len(chosen)} programs", sep="\n")
    elif options.explain:
        explain(options, chosen)
    else:
        measure(options, [entry.name for entry in chosen])


if __name__ == "__main__":
    main()
