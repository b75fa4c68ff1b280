"""Prices of whole programs as XLA runs them, beside what `jax.jit` took on a GPU when it was measured: no GPU is needed.

    python benchmarks/xla_prices.py [PART_OF_A_NAME ...] [--results FILE ...] [--against BEFORE.json] [--out NOW.json]

The times are those of `benchmarks/results/programs_price_alone_h100.json`, or of other results of one kind of device, of which the
last one counts. It prints a line for every program that
is predicted outside of 0.6 to 1.6 of its time, or with `--against` for every one whose price has changed since then; then how many
are within.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of each process: nothing is run

import jax

from benchmarks.program_report import is_priced, own_us
from benchmarks.workloads import NotInstalledError, build, programs
from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import price_xla

TIMES = ROOT / "benchmarks" / "results" / "programs_price_alone_h100.json"
LEAST, MOST = 0.6, 1.6
CHANGED = 1.03


def measured_us(files: Sequence[Path] = (TIMES,)) -> tuple[str, dict[str, float]]:
    """Returns the kind of the device of some results, and what XLA took for each program of which all is priced.

    The times are in microseconds, by name; of a program that was measured twice, the last one.

    Raises:
      ValueError: the results are of several kinds of devices, or a file holds none.
    """
    results = []
    for file in files:
        found = json.loads(file.read_text()) if file.is_file() else None
        if not isinstance(found, dict) or not {"device", "rows"} <= found.keys():
            raise ValueError(f"{file} holds no results of programs.py: give a file that its --out has written")
        results.append(found)
    kinds = sorted({r["device"] for r in results})
    if len(kinds) != 1:
        raise ValueError(f"the results are of {' and '.join(kinds)}: give those of one kind of device")
    times = ((r["name"], own_us(r.get("jit", {}))) for of in results for r in of["rows"] if is_priced(r))
    return kinds[0], {name: us for name, us in times if us}


def predicted_us(kind: str, name: str) -> float | None:
    """Returns the price of a program at its size for a GPU of some kind, in microseconds.

    None where its libraries are not installed, and where only a step of it is planned, while all of it was measured.
    """
    program = next(p for p in programs() if p.name == name)
    try:
        built = build(program, "gpu")
    except NotInstalledError:
        return None
    if built.step is not None:
        return None
    function, arguments = built.function, built.structs
    written = convert(flatten(jax.make_jaxpr(function)(*arguments))).program
    return price_xla(written, device.find(kind, "gpu")).us


def lines(predicted: Mapping[str, float], measured: Mapping[str, float], before: Mapping[str, float]) -> Iterator[str]:
    """Yields a line for each program that is to be looked at, the worst first, and then how many are within."""
    ratios = {name: us / measured[name] for name, us in predicted.items()}
    for name in sorted(ratios, key=lambda name: -abs(math.log(ratios[name]))):
        old = before.get(name, predicted[name])
        changed = max(predicted[name], old) > CHANGED * min(predicted[name], old)
        if changed or (not before and not LEAST <= ratios[name] <= MOST):
            was = f"{old:.0f} -> " if changed else ""
            yield f"{ratios[name]:5.2f}  {was}{predicted[name]:.0f} of {measured[name]:.0f} us  {name}"
    within = sum(LEAST <= r <= MOST for r in ratios.values()) / len(ratios)
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    yield f"{len(ratios)} programs, predicted over measured {mean:.3f} (geometric mean), {within:.1%} within {LEAST} to {MOST}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all programs without any")
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[TIMES], help="what was measured, as programs.py wrote it"
    )
    parser.add_argument("--against", type=Path, help="prices of before, as --out wrote them")
    parser.add_argument("--out", type=Path, help="where to write the prices, in microseconds by name")
    options = parser.parse_args(arguments)
    try:
        kind, every = measured_us(options.results)
    except ValueError as wrong:
        sys.exit(str(wrong))
    measured = {n: us for n, us in every.items() if not options.names or any(part in n for part in options.names)}
    if not measured:
        files = " and ".join(file.name for file in options.results)
        sys.exit(f"no program of {files} has a name with {' or '.join(options.names)} in it, and a price")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = zip(measured, pool.map(partial(predicted_us, kind), measured, chunksize=8), strict=True)
        predicted = {name: us for name, us in found if us}
    if options.out:
        options.out.write_text(json.dumps(predicted, indent=1))
    before = json.loads(options.against.read_text()) if options.against else {}
    print("\n".join(lines(predicted, measured, before)))


if __name__ == "__main__":
    main()
