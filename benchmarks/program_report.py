"""The report on rows of `benchmarks/programs.py`: a table with the worst program first, and a summary of all."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Pairs = list[tuple[float, float]]

FLOOR = {"checked": 0.97, "fused": 0.85, "tuned": 0.97}
"""No program should be slower than this share of `jax.jit`."""
XLA_RANGE = (0.6, 1.6)
LABELS = {"checked": "checked", "fused": "price alone", "tuned": "tuned"}
WAYS = {"jit": "jax.jit", **LABELS}


# --- numbers of rows


def speedup(row: Row, label: str = "fused") -> float | None:
    """Returns how many times as fast as jax.jit a program is, by the median round."""
    found: float | None = row.get("speedup", {}).get(label)
    if found is not None:
        return found
    jit, other = row.get("jit", {}).get("us"), row.get(label, {}).get("us")
    return jit / other if jit and other else None


def judged(row: Row) -> float | None:
    """The speed-up that a row is ordered by: checked, where it was."""
    found = speedup(row, "checked")
    return speedup(row) if found is None else found


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Failures first, then by speed; what is not installed comes last."""
    return sorted(rows, key=lambda r: ("not_installed" in r, judged(r) or 0.0, r["name"]))


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else None


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end + 1 < len(order) and values[order[end + 1]] == values[order[begin]]:
            end += 1
        for at in order[begin : end + 1]:
            found[at] = 1 + (begin + end) / 2
        begin = end + 1
    return found


def spearman(pairs: Pairs) -> float | None:
    """The correlation of the ranks; None where there is nothing to correlate."""
    if len(pairs) < 3:
        return None
    first, second = (ranks(list(side)) for side in zip(*pairs, strict=True))
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(first, second)


def accuracy(pairs: Pairs, within: tuple[float, float]) -> Row:
    """Summarizes how predictions compare with measurements: (predicted, measured) pairs, both in microseconds."""
    ratios = [p / m for p, m in pairs]
    found: Row = {"number": len(pairs), "geometric_mean": geometric_mean(ratios), "spearman": spearman(pairs)}
    if ratios:
        found |= {"least": min(ratios), "most": max(ratios)}
        found["within"] = sum(within[0] <= r <= within[1] for r in ratios) / len(ratios)
    return found


def own_us(variant: Row) -> float | None:
    """Returns the measured time without that of calling anything; None where some kernels have no time."""
    return None if variant.get("untimed") else variant.get("own_us", variant.get("us"))


def kernel_pairs(rows: Iterable[Row], measured: str, predicted: str) -> Pairs:
    """Lists the predicted and the measured time of every kernel (`measured`: "alone"), or of XLA's code for the same ("xla")."""
    kernels = [k for r in rows for k in r.get("kernels", ())]
    found = [(k.get(predicted), own_us(k.get(measured, {}))) for k in kernels]
    return [(p, m) for p, m in found if p and m]


def is_priced(row: Row) -> bool:
    """Is nothing in a program whose time nobody knows beforehand, like a loop until something holds?

    Rows of before loops had a price do not say it: none of those with loops counts.
    """
    return bool(row.get("priced", not row.get("control_flow")))


def program_pairs(rows: Iterable[Row]) -> Pairs:
    """Lists XLA's predicted and measured time of every program of which all is priced."""
    found = [(r.get("predicted_xla_us"), own_us(r.get("jit", {}))) for r in rows if is_priced(r)]
    return [(p, m) for p, m in found if p and m]


def failure(row: Row) -> str | None:
    """Returns why a program, or one way to run it, could not be measured."""
    if "failed" in row:
        return str(row["failed"])
    found = [f"{words}: {row[n]['reason']}" for n, words in WAYS.items() if "reason" in row.get(n, {})]
    return "; ".join(found) or None


# --- the summary


def summary(rows: Sequence[Row]) -> Row:
    """Figures over all rows."""
    found: Row = {"programs": len(rows)}
    found["not_installed"] = sorted(r["name"] for r in rows if "not_installed" in r)
    found["failed"] = {
        r["name"]: reason for r in rows if "not_installed" not in r and (reason := failure(r)) is not None
    }
    for label, floor in FLOOR.items():
        speeds = {r["name"]: s for r in rows if (s := speedup(r, label))}
        if speeds:
            slow = sorted((s, n) for n, s in speeds.items() if s < floor)
            found[label] = {
                "number": len(speeds), "geometric_mean": geometric_mean(speeds.values()), "least": min(speeds.values()),
                "floor": floor, "below": {n: s for s, n in slow},
                "faster": sum(s > 1.03 for s in speeds.values()),
            }  # fmt: skip
    both = [(f, c) for r in rows if (f := speedup(r, "fused")) and (c := speedup(r, "checked"))]
    found["price_alone_of_checked"] = geometric_mean(f / c for f, c in both)
    found["kernels"] = accuracy(kernel_pairs(rows, "alone", "predicted_us"), (0.5, 2.0))
    found["kernels_by_xla"] = accuracy(kernel_pairs(rows, "xla", "predicted_xla_us"), (0.5, 2.0))
    found["programs_by_xla"] = accuracy(program_pairs(rows), XLA_RANGE)
    found["with_loops"] = sorted(r["name"] for r in rows if not is_priced(r))
    found["plan_s"] = [s for s in (_median(rows, "plan_s"), _most(rows, "plan_s")) if s is not None]
    found["wrong"] = sorted(r["name"] for r in rows if not _close(r))
    found["wrong_by_float64"] = {r["name"]: r["error64"] for r in rows if not _close(r) and r.get("error64")}
    return found


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [r[key] for r in rows if key in r]
    return statistics.median(values) if values else None


def _most(rows: Sequence[Row], key: str) -> float | None:
    return max((r[key] for r in rows if key in r), default=None)


SUSPECT = 0.05
"""A difference from `jax.jit`, relative to the largest result, that somebody should look at."""


def _close(row: Row) -> bool:
    errors = [row.get(label, {}).get("error") for label in LABELS]
    return all(e is None or e <= SUSPECT for e in errors)


def summary_lines(found: Row) -> list[str]:
    """A summary, as printed."""
    lines = [
        f"{found['programs']} programs, {len(found['failed'])} failed; not installed: {_listed(found['not_installed'])}"
    ]
    lines += [f"  {name}: {reason}" for name, reason in found["failed"].items()]
    for label, words in LABELS.items():
        if label in found:
            own = found[label]
            lines.append(
                f"{words}: {own['number']} programs, geometric mean {own['geometric_mean']:.3f}x, worst {own['least']:.2f}x, "
                f"{own['faster']} faster by 3%, {len(own['below'])} below {own['floor']}"
            )
            lines += [f"  {s:6.2f}x {n}" for n, s in own["below"].items()]
    if found["price_alone_of_checked"]:
        lines.append(f"price alone over checked: {found['price_alone_of_checked']:.3f} (geometric mean)")
    for key, words in (
        ("kernels", "kernels"), ("kernels_by_xla", "what kernels replace, by XLA"), ("programs_by_xla", "whole programs, by XLA"),
    ):  # fmt: skip
        lines += _accuracy_line(found[key], words, XLA_RANGE if key == "programs_by_xla" else (0.5, 2.0))
    if found["with_loops"]:
        lines.append(f"not in the price of whole programs, as loops in them have none: {_listed(found['with_loops'])}")
    if found["plan_s"]:
        lines.append(f"time to plan: median {found['plan_s'][0]:.3f} s, most {found['plan_s'][1]:.2f} s")
    if found["wrong"]:
        lines.append(f"differ from jax.jit by more than {SUSPECT:.0%}: {_listed(found['wrong'])}")
    for name, errors in found["wrong_by_float64"].items():
        lines.append(f"  {name}, from float64: " + ", ".join(f"{WAYS[n]} {float(e):.2g}" for n, e in errors.items()))
    return lines


def _accuracy_line(own: Row, words: str, within: tuple[float, float]) -> list[str]:
    if not own["number"]:
        return []
    rank = "" if own["spearman"] is None else f"Spearman {own['spearman']:.3f}, "
    return [f"{words}: {own['number']}, predicted over measured {own['geometric_mean']:.2f} (geometric mean), "
            f"{own['least']:.2f} to {own['most']:.2f}, {rank}{own['within']:.0%} within {within[0]} to {within[1]}"]  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


# --- the table

HEADER = (
    f"{'program':36} {'jit us':>10} {'fused':>7} {'checked':>7} {'tuned':>7} {'kernels':>7} {'launches':>11} {'MB':>11} "
    f"{'plan s':>6} {'check s':>7} {'error':>7}  kernels: predicted>measured/XLA's us"
)


def line(row: Row) -> str:
    """A row, as printed: speed-ups, kernels that are kept of those planned, launches and memory (jax.jit's first)."""
    name = f"{row['name']:36}"
    if "failed" in row or "not_installed" in row:
        return f"{name} {row.get('failed') or row['not_installed']}"
    jit, fused, checked = row["jit"], row["fused"], row.get("checked", {})
    if "us" not in jit or not any("us" in row.get(label, {}) for label in LABELS):
        return f"{name} {failure(row)}"
    best = checked if "us" in checked else fused
    kept = f"{checked.get('kernels_kept', row.get('kernels_planned', '-'))}/{row.get('kernels_planned', '-')}"
    launches = f"{jit.get('launches', '-')}>{best.get('launches', '-')}"
    memory = f"{_megabytes(jit)}>{_megabytes(best)}"
    errors = [row[label]["error"] for label in LABELS if "error" in row.get(label, {})]
    error = f"{max(errors):.0e}" if errors else "-"
    speeds = " ".join(f"{_times(speedup(row, label)):>7}" for label in ("fused", "checked", "tuned"))
    text = (
        f"{name} {jit['us']:10.1f} {speeds} {kept:>7} {launches:>11} {memory:>11} {_seconds(row, 'plan_s'):>6} "
        f"{_seconds(checked, 'check_s'):>7} {error:>7}  {' '.join(map(_kernel, row.get('kernels', ())))}"
    )
    reason = failure(row)
    return text.rstrip() if reason is None else f"{text.rstrip()}; {reason}"


def _kernel(k: Row) -> str:
    measured, xla = (own_us(k[n]) or math.nan for n in ("alone", "xla"))
    many = f"{k['count']}*" if k["count"] > 1 else ""
    return f"{many}{k['predicted_us']:.0f}>{measured:.0f}/{xla:.0f}"


def _seconds(row: Row, key: str) -> str:
    return f"{row[key]:.2f}" if key in row else "-"


def _times(found: float | None) -> str:
    return "-" if found is None else f"{found:.2f}x"


def _megabytes(variant: Row) -> str:
    held = variant.get("temporary_bytes")
    return "-" if held is None else f"{held / 1e6:.3g}"


def table(rows: Sequence[Row]) -> list[str]:
    """Every row, the worst first."""
    return [HEADER, *map(line, worst_first(rows))]


# --- the file

_DIGITS = 5


def compact(value: Any) -> Any:
    """A value for a file: numbers with a few digits, empty fields left out."""
    match value:
        case float():
            return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
        case dict():
            return {k: compact(v) for k, v in value.items() if v is not None and v not in ([], {})}
        case list() | tuple():
            return [compact(v) for v in value]
        case _:
            return value
