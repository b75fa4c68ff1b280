"""Shared memory and registers as foretold and as compiled, for every kernel of `benchmarks/kernels.py` (needs `make venv-aot`).

Each kernel is compiled for an H100, without one. A line for every kernel whose estimate is below what the compiler reports, or
loose; then how tight the estimates are, and where kernels spill. Exits 1 when an estimate is below.
"""

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from benchmarks import h100, kernels  # noqa: E402
from pallasfuse.pallas_backend.kernel_resources import resources  # noqa: E402

SMALL_BYTES = 16 << 10
"""An estimate of so little shared memory limits nothing: it is not called loose."""
LOOSE = 1.3
SPILLING_BYTES = 256
"""A thread that spills less is hardly slower."""
OVERFLOW = re.compile(r"Shared memory size limit exceeded: requested (\d+)")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel: what was foretold, and what the compiler reports."""

    family: str
    name: str
    target: str
    kernel: str
    warps: int
    stages: int
    shared_bytes: int
    registers: int
    spilled_bytes: int
    reported_shared_bytes: int
    reported_registers: int | None
    reported_spilled_bytes: int | None

    @property
    def is_below(self) -> bool:
        return self.shared_bytes < self.reported_shared_bytes or self.registers < (self.reported_registers or 0)

    @property
    def ratio(self) -> float:
        return self.shared_bytes / max(1, self.reported_shared_bytes)

    @property
    def is_loose(self) -> bool:
        return self.shared_bytes > SMALL_BYTES and self.ratio > LOOSE

    def __str__(self) -> str:
        return (
            f"{self.family:16} {self.name:42.42} {self.target:14} {self.warps:2} warps {self.stages} stages  shared "
            f"{self.shared_bytes:7} of {self.reported_shared_bytes:7} ({self.ratio:5.2f})  registers {self.registers:3} of "
            f"{self.reported_registers}  spilled {self.spilled_bytes} of {self.reported_spilled_bytes}"
        )


def measured(family: str, unit: kernels.Unit) -> Row:
    """Compile a kernel. Of tiles that were asked for and do not fit, the compiler says how much they need.

    Raises:
      jax.errors.JaxRuntimeError: it does not compile for another reason.
    """
    foretold = resources(unit.programs, unit.target)
    assert foretold is not None and not isinstance(foretold, str), foretold
    first = unit.programs[0]
    try:
        launch = unit.reported(unit.compile())
    except jax.errors.JaxRuntimeError as error:
        needed = OVERFLOW.search(str(error))
        if needed is None:
            raise
        launch = h100.Launch(first.name, 0, foretold.threads, int(needed[1]), None, None)
    return Row(
        family, unit.name, unit.target.name, first.name, first.warps, first.stages, foretold.shared_bytes, foretold.registers,
        foretold.spilled_bytes, launch.shared_bytes, launch.registers, launch.spilled_bytes,
    )  # fmt: skip


def distinct(families: list[str], every: int) -> Iterator[tuple[str, kernels.Unit]]:
    """Every n-th subject's kernels, none twice."""
    seen = set()
    for family in kernels.FAMILIES:
        if families and family.__name__ not in families:
            continue
        for subject in islice(family(), 0, None, every):
            for unit in kernels.units(subject):
                key = unit.target.name, unit.programs
                if key not in seen:
                    seen.add(key)
                    yield family.__name__, unit


def summary(rows: list[Row]) -> str:
    """Says in words how tight the estimates are, how often they are below the report, and which kernels spill."""
    large = [r for r in rows if r.shared_bytes > SMALL_BYTES]
    ratios = sorted(r.ratio for r in large) or [1.0]
    known = [r for r in rows if r.reported_registers]
    registers = sorted(r.registers / r.reported_registers for r in known if r.reported_registers) or [1.0]
    below = [r for r in rows if r.is_below]
    spilling = [r for r in rows if (r.reported_spilled_bytes or 0) > SPILLING_BYTES]
    foretold = [r for r in rows if r.spilled_bytes > SPILLING_BYTES]
    lines = [
        f"{len(rows)} kernels, {len(below)} estimates below what the compiler reports, {sum(r.is_loose for r in rows)} loose; "
        f"{sum(r.reported_shared_bytes > h100.SHARED_MEMORY_BYTES for r in rows)} do not fit, and "
        f"{sum(r.shared_bytes > h100.SHARED_MEMORY_BYTES >= r.reported_shared_bytes for r in rows)} are refused that would",
        f"shared memory of {len(large)} kernels beyond {SMALL_BYTES} bytes: estimate / report between {ratios[0]:.2f} and "
        f"{ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}",
        f"registers of {len(known)} kernels: estimate / report between {registers[0]:.2f} and {registers[-1]:.2f}, median "
        f"{registers[len(registers) // 2]:.2f}",
        f"{sum(bool(r.reported_spilled_bytes) for r in rows)} kernels spill, {len(spilling)} more than {SPILLING_BYTES} bytes, of "
        f"which {sum(r in foretold for r in spilling)} were foretold to; so were {len(foretold)}, of which "
        f"{sum(r in spilling for r in foretold)} do and {sum(bool(r.reported_spilled_bytes) for r in foretold)} spill something",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=[], choices=[f.__name__ for f in kernels.FAMILIES])
    parser.add_argument("--every", type=int, default=1, help="one subject of so many")
    parser.add_argument("--json", type=Path, help="where to write every row")
    parser.add_argument("--all", action="store_true", help="print every row")
    options = parser.parse_args()
    if not h100.can_compile():
        sys.exit(f"no CUDA plugin or no ptxas: make venv-aot; JAX_PLATFORMS=cpu .venv-aot/bin/python {sys.argv[0]}")
    warnings.filterwarnings("ignore")
    rows: list[Row] = []
    failed = 0
    start = time.perf_counter()
    for family, unit in distinct(options.families, options.every):
        try:
            row = measured(family, unit)
        except Exception as error:
            failed += 1
            print(
                f"FAILED {family} {unit.name} {unit.target.name}: {type(error).__name__}: {str(error)[:200]}",
                flush=True,
            )
            continue
        rows.append(row)
        if options.all or row.is_below or row.is_loose:
            print("BELOW " if row.is_below else "      ", row, flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    print(summary(rows))
    print(f"{failed} kernels did not compile; {time.perf_counter() - start:.0f} s")
    sys.exit(1 if failed or any(r.is_below for r in rows) else 0)


if __name__ == "__main__":
    main()
