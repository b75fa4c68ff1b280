"""The error of every example's fused program and of the plain one against float64: docs/accuracy.md.

--write measures everything and writes the document. --check asks that the committed document has a row for everything that
is measured, no ratio above the bound, and measures the cheap part again.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pallasfuse as pf  # noqa: E402
from benchmarks.cases import Case, all_cases  # noqa: E402

DOCUMENT = ROOT / "docs" / "accuracy.md"
BOUND = 1.5
TYPES = ("bfloat16", "float16", "float32")
DRAWS = 12
"""The largest error of few draws says little: with 4, that of one element decides a row."""
PRODUCT_LENGTHS = (61, 300, 512, 1024, 1100)
ROW_LENGTHS = (61, 1000, 20_000, 150_000)
"""The longest are rolled in several tiles."""
INTERPRETED = 512
"""Longest length on the interpreter."""
ROWS = frozenset({"variance", "third moment", "layer norm", "cross-entropy and entropy"})
RESULTS = {"cross-entropy and entropy": ("cross-entropy", "entropy")}


type Key = tuple[str, str, str]  # function, element type, target


@dataclass(slots=True)
class Errors:
    """Errors of one program, pooled, in units in the last place of the output's largest magnitude."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, result: Any, reference: np.ndarray, ulp: float, where: np.ndarray) -> None:
        error = np.abs(np.asarray(result, np.float64) - reference)[where] / ulp
        error = np.where(np.isnan(error), np.inf, error)
        self.largest = max(self.largest, float(error.max(initial=0.0)))
        self.squares += float(np.square(error).sum())
        self.count += error.size

    def join(self, other: "Errors") -> None:
        self.largest = max(self.largest, other.largest)
        self.squares += other.squares
        self.count += other.count

    @property
    def rms(self) -> float:
        return (self.squares / max(1, self.count)) ** 0.5


def _ratio(ours: float, theirs: float) -> float:
    return 1.0 if ours == theirs else ours / theirs if theirs else np.inf


@dataclass(frozen=True, slots=True)
class Row:
    """One function, element type and target."""

    function: str
    dtype: str
    target: str
    fused: Errors
    plain: Errors
    worst_length: float
    """The largest rms ratio of the draws of one length."""

    @property
    def ratios(self) -> tuple[float, float]:
        """The ratios, fused to plain, of the largest and of the root mean square errors."""
        return _ratio(self.fused.largest, self.plain.largest), _ratio(self.fused.rms, self.plain.rms)


def names(case: Case) -> tuple[str, ...]:
    """One name for each result."""
    return RESULTS.get(case.name, (case.name,))


def lengths(case: Case, target: str) -> tuple[int, ...]:
    every = ROW_LENGTHS if case.name in ROWS else PRODUCT_LENGTHS
    return every if target == "xla" else tuple(n for n in every if n <= INTERPRETED)


def in_float64(case: Case, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """The results of the plain function in float64 on the same (rounded) inputs."""
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a) for a in arrays]
        exact = jax.jit(case.plain, static_argnums=case.static_argnums)(*wide, *case.static)
        return [np.asarray(x) for x in jax.tree.leaves(exact)]


def measure(case: Case, dtype: str, targets: Sequence[str], draws: int, select: Callable[[int], bool]) -> Iterator[Row]:
    """One row for each result and target, over the lengths that `select` takes."""
    fused = {t: pf.fuse(case.plain, target=t, static_argnums=case.static_argnums) for t in targets}
    plain = jax.jit(case.plain, static_argnums=case.static_argnums)
    found: dict[tuple[str, str], dict[int, tuple[Errors, Errors]]] = {}
    wanted = {t: [n for n in lengths(case, t) if select(n)] for t in targets}
    for length in dict.fromkeys(n for ns in wanted.values() for n in ns):
        for draw in range(draws):
            arrays = case.arrays(length, jnp.dtype(dtype), batch=1, draw=draw)
            exact = in_float64(case, arrays)
            theirs = jax.tree.leaves(plain(*arrays, *case.static))
            for target in (t for t in targets if length in wanted[t]):
                ours = jax.tree.leaves(fused[target](*arrays, *case.static))
                for name, a, b, reference in zip(names(case), ours, theirs, exact, strict=True):
                    assert a.dtype == b.dtype and a.shape == b.shape == reference.shape
                    ulp = float(jnp.finfo(a.dtype).eps) * float(np.abs(reference).max())
                    pair = found.setdefault((name, target), {}).setdefault(length, (Errors(), Errors()))
                    finite = np.isfinite(np.asarray(b, np.float64))
                    pair[0].add(a, reference, ulp, finite)
                    pair[1].add(b, reference, ulp, finite)
    for (name, target), by_length in found.items():
        totals = Errors(), Errors()
        for pair in by_length.values():
            for total, part in zip(totals, pair, strict=True):
                total.join(part)
        yield Row(name, dtype, target, *totals, max(_ratio(a.rms, b.rms) for a, b in by_length.values()))


COLUMNS = 10
HEAD = """| function | type | target | max error, fused | plain | ratio | rms error, fused | plain | ratio | worst length |
|---|---|---|---|---|---|---|---|---|---|"""


def cells(row: Row) -> str:
    largest, rms = row.ratios
    return (f"| {row.function} | {row.dtype} | {row.target} | {row.fused.largest:.3g} | {row.plain.largest:.3g} | {largest:.2f} "
            f"| {row.fused.rms:.3g} | {row.plain.rms:.3g} | {rms:.2f} | {row.worst_length:.2f} |")  # fmt: skip


def ratios(lines: Iterable[str]) -> dict[Key, tuple[float, float, float]]:
    """The ratios in lines of the table, by function, type and target: max, rms, rms at the worst length."""
    found = {}
    for line in lines:
        parts = [p.strip() for p in line.strip().strip("|").split("|")]
        if len(parts) == COLUMNS and parts[1] in TYPES:
            found[parts[0], parts[1], parts[2]] = float(parts[5]), float(parts[8]), float(parts[9])
    return found


def document(lines: Sequence[str]) -> str:
    """docs/accuracy.md around the lines of its table."""
    found = ratios(lines)
    largest, rms, worst = (max(x) for x in zip(*found.values(), strict=True))
    device = f"{jax.devices()[0].platform} ({platform.machine()}, {os.cpu_count()} cores)"
    return f"""# Accuracy

Command: `.venv/bin/python scripts/accuracy.py --write`. Device: {device}. jax {jax.__version__}.

The error of every example's fused program beside that of the plain function under `jax.jit`, both against the plain function
in float64 on the same inputs. Errors are in units in the last place (ulp) of the output type at the largest magnitude of that
output. Inputs are standard normal (logits three times that), {DRAWS} draws at each length, all errors of a row pooled: the
largest (max) and the root mean square (rms) over every element of every draw at which the plain program is finite (a mean
over more elements than float16 can count is not). Lengths: {", ".join(map(str, PRODUCT_LENGTHS))}
queries and keys, or rows of {", ".join(map(str, ROW_LENGTHS))}; on the interpreter those up to {INTERPRETED}.
`worst length` is the largest rms ratio of the draws of one length.

The bound is {BOUND}. Largest ratio of rms errors: {rms:.2f}; {worst:.2f} at one length. Largest ratio of max errors: {largest:.2f}.

{HEAD}
{chr(10).join(lines)}
"""


def expected_keys() -> list[Key]:
    return [(n, d, t) for t in ("xla", "interpret") for c in all_cases() for n in names(c) for d in TYPES]


def problems_of_document() -> list[str]:
    """Lists what is wrong with the committed document."""
    if not DOCUMENT.exists():
        return [f"{DOCUMENT.name} does not exist"]
    text = DOCUMENT.read_text()
    found = []
    if not re.search(r"^Command: `.+`\. Device: .+\. jax \d+\.\d+", text, re.MULTILINE):
        found.append("the header does not name command, device and jax version")
    if HEAD not in text:
        found.append("the columns are not those of the script")
    rows = ratios(text.splitlines())
    if list(rows) != expected_keys():
        differing = set(rows) ^ set(expected_keys())
        found.append(f"the rows are not those of the examples: {sorted(differing) or 'another order'}")
    for key, (largest, rms, _) in rows.items():
        if max(rms, largest) > BOUND:
            found.append(f"{' '.join(key)}: ratios of {largest} (max) and {rms} (rms)")
    return found


def problems_measured() -> list[str]:
    """Ratios above the bound in a cheap measurement of today."""
    found = []
    for case in all_cases():
        for row in measure(case.small(), "float32", ["xla"], 2, lambda n: n == 61):
            if row.ratios[1] > BOUND:
                found.append(f"measured now: {cells(row)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="measure everything and write docs/accuracy.md")
    mode.add_argument("--check", action="store_true", help="check the committed table, and measure a cheap part again")
    options = parser.parse_args()
    if not options.write:
        wrong = problems_of_document() or problems_measured()
        print("\n".join(wrong) or "docs/accuracy.md is current")
        if wrong:
            print("run scripts/accuracy.py --write")
        return bool(wrong)
    rows = []
    for case in all_cases():
        for dtype in TYPES:
            for row in measure(case.small(), dtype, ["xla", "interpret"], DRAWS, lambda n: True):
                print(cells(row), flush=True)
                rows.append(row)
    order = {key: n for n, key in enumerate(expected_keys())}
    rows.sort(key=lambda r: order[r.function, r.dtype, r.target])
    DOCUMENT.write_text(document([cells(r) for r in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
