"""The files of `pallasfuse/devices/`: found by a device's kind, merged with what was measured, compared, written."""

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pallasfuse import device
from scripts.calibration.found import Found

Numbers = dict[str, Any]

FOLDER = Path(device.__file__).resolve().parent / "devices"
NOT_MEASURED = ("kind", "platform", "source", "found_share")
FOR_ONE_PLATFORM = {
    "cpu": ("shared_memory_bytes", "latency_us", "cache_latency_us", "longest_row", "clock_ghz"),
    "gpu": ("page_gb_s", "kept_bytes"),
}
"""Fields that the price does not read on a platform."""


def path_of(kind: str, folder: Path = FOLDER) -> Path:
    """The file of a kind of device: the one that has it, or a new one named after it."""
    for path in sorted(folder.glob("*.json")):
        if json.loads(path.read_text()).get("kind") == kind:
            return path
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', kind.lower()).strip('_')}.json"


def read(kind: str, platform: device.Platform, folder: Path = FOLDER) -> Numbers:
    """The numbers so far: those of the file, or the careful ones that the price takes for an unknown device."""
    path = path_of(kind, folder)
    if path.exists():
        return dict(json.loads(path.read_text()))
    return asdict(device.find(kind, platform))


def merged(old: Numbers, found: Iterable[Found], head: str, keep: Sequence[str] = ()) -> Numbers:
    """The file with what was measured in it. Fields of `keep` stay as they are, as does what was not measured.

    head: where, when and with what it was measured.
    """
    new: Numbers = {k: v for k, v in old.items() if k != "how"}
    how: Numbers = dict(old.get("how", {}))
    for one in found:
        if one.field not in keep:
            new[one.field] = _merged_value(old.get(one.field), one.value)
            how[one.field] = f"{one.how} ({head})"
    known = [f.name for f in fields(device.Device) if f.name not in NOT_MEASURED]
    estimates = [n for n in known if n in new and n not in how and n not in FOR_ONE_PLATFORM[new["platform"]]]
    new["source"] = f"measured: {', '.join(n for n in known if n in how)}" + (
        f"; estimated: {', '.join(estimates)}" if estimates else ""
    )
    return new | {"how": how}


def _merged_value(old: Any, new: Any) -> Any:
    if isinstance(new, Mapping):
        return {**(old or {}), **{k: _rounded(v) for k, v in new.items()}}
    return _rounded(new)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(numbers: Numbers, folder: Path = FOLDER) -> Path:
    """The file, as a whole or not at all. Returns where it is."""
    checked = device.Device(**{f.name: numbers[f.name] for f in fields(device.Device) if f.name in numbers})
    path = path_of(checked.kind, folder)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(numbers, indent=1) + "\n")
    os.replace(unfinished, path)
    return path


def comparison(old: Numbers, new: Numbers) -> list[str]:
    """Old and new numbers side by side, with how each was measured."""
    lines = [f"{'field':30} {'old':>12} {'new':>12} {'new/old':>8}  how"]
    how = new.get("how", {})
    for field in new:
        if field in (*NOT_MEASURED, "how"):
            continue
        before, after = old.get(field), new[field]
        if isinstance(after, Mapping):
            for key in after:
                first = (before or {}).get(key)
                lines.append(_line(f"{field} {key}", first, after[key], how.get(field, "not measured")))
        else:
            lines.append(_line(field, before, after, how.get(field, "not measured")))
    return lines


def _line(name: str, old: Any, new: Any, how: str) -> str:
    share = f"{new / old:.2f}" if isinstance(old, int | float) and old else "-"
    return f"{name:30} {_text(old):>12} {_text(new):>12} {share:>8}  {how}"


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


# --- the error of prices

Pairs = Sequence[tuple[float, float]]


def factor_within(pairs: Pairs, share: float) -> float:
    """The factor within which a share of the predictions are: (predicted, measured) pairs.

    Raises:
      ValueError: there are no pairs.
    """
    if not pairs:
        raise ValueError("no kernel has both a predicted and a measured time")
    errors = sorted(abs(math.log(predicted / measured)) for predicted, measured in pairs)
    return math.exp(errors[max(0, math.ceil(share * len(errors)) - 1)])


def error_lines(pairs: Pairs) -> list[str]:
    """Says in words how far predictions are off."""
    ratios = [p / m for p, m in pairs]
    factors = ", ".join(f"{share:.0%} within {factor_within(pairs, share):.2f}" for share in (0.5, 0.8, 0.9, 0.95))
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return [f"{len(pairs)} kernels, predicted over measured {mean:.2f} (geometric mean), {factors}"]
