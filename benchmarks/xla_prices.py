"""Prices of whole programs as XLA runs them, beside what `jax.jit` took on an H100 when it was measured: no GPU is needed.

    python benchmarks/xla_prices.py [PART_OF_A_NAME ...] [--against BEFORE.json] [--out NOW.json]

The times are those of `benchmarks/results/programs_price_alone_h100.json`. It prints a line for every program that
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
KIND = "NVIDIA H100 80GB HBM3"
LEAST, MOST = 0.6, 1.6
CHANGED = 1.03


def measured_us() -> dict[str, float]:
    """What XLA took for each program of which all is priced, in microseconds, by its name."""
    rows = json.loads(TIMES.read_text())["rows"]
    found = {r["name"]: own_us(r.get("jit", {})) for r in rows if is_priced(r)}
    return {name: us for name, us in found.items() if us}


def predicted_us(name: str) -> float | None:
    """Returns the price of a program at its size for a GPU, in microseconds.

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
    return price_xla(written, device.find(KIND, "gpu")).us


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
    parser.add_argument("--against", type=Path, help="prices of before, as --out wrote them")
    parser.add_argument("--out", type=Path, help="where to write the prices, in microseconds by name")
    options = parser.parse_args(arguments)
    measured = {
        name: us
        for name, us in measured_us().items()
        if not options.names or any(part in name for part in options.names)
    }
    if not measured:
        sys.exit(f"no program of {TIMES.name} has a name with {' or '.join(options.names)} in it")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = zip(measured, pool.map(predicted_us, measured, chunksize=8), strict=True)
        predicted = {name: us for name, us in found if us}
    if options.out:
        options.out.write_text(json.dumps(predicted, indent=1))
    before = json.loads(options.against.read_text()) if options.against else {}
    print("\n".join(lines(predicted, measured, before)))


if __name__ == "__main__":
    main()
