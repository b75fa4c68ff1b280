"""The numbers of the device at hand, measured, beside those of `pallasfuse/devices/` (docs/devices.md says what they mean).

    python scripts/calibrate.py
    python scripts/calibrate.py --write
    python scripts/calibrate.py --write --keep launch_us clock_ghz
    python scripts/calibrate.py --check benchmarks/results/programs_h200.json --write

Takes at most three minutes. A CPU must be otherwise idle: rates are the best that was seen, but with noise all the time that is
not the machine's. `--check` measures nothing: it reads kernels, predicted and measured, from a file of `benchmarks/programs.py`,
and sets the error of the price.
"""

import argparse
import datetime
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.program_report import kernel_pairs  # noqa: E402
from pallasfuse import device  # noqa: E402
from scripts.calibration import device_files  # noqa: E402
from scripts.calibration.found import Found, measure  # noqa: E402

SECONDS = 165.0
"""No measurement begins later."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the device's file")
    parser.add_argument("--keep", nargs="+", default=[], metavar="FIELD", help="fields that stay as they are")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="some measurements only, by name")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no measurement begins later")
    parser.add_argument("--each-s", type=float, help="what one set of programs may take (4; on a GPU 2)")
    parser.add_argument("--folder", type=Path, default=device_files.FOLDER, help="of the devices' files")
    check = parser.add_argument_group("the error of the price")
    check.add_argument("--check", type=Path, metavar="RESULTS", help="a file of benchmarks/programs.py")
    check.add_argument("--share", type=float, default=0.8, help="of the prices that are within the error")
    check.add_argument("--kind", help="the device of the file, as JAX names it")
    return parser.parse_args(words)


def device_at_hand() -> tuple[str, device.Platform]:
    """The kind and the platform of the first device.

    Raises:
      SystemExit: prices are for CPUs and GPUs only.
    """
    import jax

    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        raise SystemExit(
            f"no prices are made for a device of the platform {backend!r}: JAX_PLATFORMS=cpu measures the CPU"
        )
    return jax.devices()[0].device_kind, "gpu" if backend == "gpu" else "cpu"


def heading(platform: device.Platform) -> str:
    """Returns a line that says by which script, when and with which versions numbers were measured."""
    from importlib.metadata import version

    from scripts.calibration import driver

    found = driver.version() if platform == "gpu" else ""
    versions = f"jax {version('jax')}" + (f", driver {found}" if found else "")
    return f"scripts/calibrate.py, {datetime.date.today().isoformat()}, {versions}"


def calibrate(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device's old and new numbers."""
    from scripts.calibration import cpu, gpu
    from scripts.calibration.clock import Clock

    kind, platform = device_at_hand()
    clock = Clock(options.each_s or (2.0 if platform == "gpu" else 4.0), on_gpu=platform == "gpu")
    steps = gpu.steps(clock) if platform == "gpu" else cpu.steps(clock)
    chosen = [s for s in steps if not options.only or s.__name__ in options.only]
    begin = time.monotonic()
    found, missing = measure(
        chosen, seconds=options.seconds, seen=lambda name, s: print(f"{name}: {s:.1f} s", flush=True)
    )
    for failure in missing:
        print(f"not measured: {failure.name}: {failure.reason}")
    print(f"{kind}: {time.monotonic() - begin:.0f} s")
    old = device_files.read(kind, platform, options.folder)
    return old, device_files.merged(old, found, heading(platform), options.keep)


def check(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers of the device of a file of results, with the error that its prices have.

    Raises:
      SystemExit: the file has no kernels, or nobody knows the device.
    """
    results = json.loads(options.check.read_text())
    kind = options.kind or results.get("device", "")
    known = {d.kind: d.platform for d in device.known()}
    if kind not in known:
        raise SystemExit(
            f"{options.check} is of the device {kind!r}; measured are {', '.join(sorted(known))}: name it with --kind"
        )
    pairs = kernel_pairs(results["rows"], "alone", "predicted_us")
    if not pairs:
        raise SystemExit(f"{options.check} has no kernel with both a predicted and a measured time")
    print(*device_files.error_lines(pairs), sep="\n")
    advantages = advantage_pairs(results["rows"])
    if advantages:
        print("how much faster than XLA's code for the same:", *device_files.error_lines(advantages))
    error = round(device_files.factor_within(pairs, options.share), 3)
    how = f"{options.share:.0%} of {len(pairs)} kernels of {options.check.name} are priced within it"
    old = device_files.read(kind, known[kind], options.folder)
    date = datetime.date.today().isoformat()
    return old, device_files.merged(old, [Found("price_error", error, how)], f"scripts/calibrate.py --check, {date}")


def advantage_pairs(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Returns how many times as fast as XLA's code every kernel was predicted to be, and was. A choice depends on this ratio."""
    kernels = [
        k
        for r in rows
        for k in r.get("kernels", ())
        if k.get("speedup") and k.get("predicted_us") and k.get("predicted_xla_us")
    ]
    return [(k["predicted_xla_us"] / k["predicted_us"], k["speedup"]) for k in kernels]


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    warnings.filterwarnings("ignore", message=".*Pallas Triton backend is deprecated.*")
    old, new = check(options) if options.check else calibrate(options)
    print(*device_files.comparison(old, new), sep="\n")
    if options.write:
        print(f"written: {device_files.write(new, options.folder)}")


if __name__ == "__main__":
    main()
