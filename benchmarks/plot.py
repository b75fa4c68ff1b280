"""Draw what `benchmarks/attention.py` measured: for every operator, speed over length, pallasfuse beside its peers.

    python benchmarks/plot.py attention.json attention.png

Needs matplotlib, which nothing else does.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = {"pallasfuse mosaic_gpu": "tab:red", "pallasfuse triton": "tab:orange"}
PEERS = ("tab:blue", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:gray", "tab:olive", "tab:cyan", "black")


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    operators = list(dict.fromkeys(row["operator"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    colours = OURS | dict(zip((n for n in names if n not in OURS), PEERS, strict=False))
    columns = min(3, len(operators))
    lines = -(-len(operators) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 2.9 * lines + 0.8), squeeze=False)
    shown = {}
    for axis, operator in zip(axes.flat, operators, strict=False):
        mine = [row for row in rows if row["operator"] == operator and row["ms"] is not None]
        for name in names:
            points = [(row["length"], row["tflops"]) for row in mine if row["implementation"] == name]
            if points:
                width, order = (2.2, 3) if name in OURS else (1, 2)
                (shown[name],) = axis.plot(
                    *zip(*points, strict=True), marker="o", ms=3, lw=width, color=colours[name], zorder=order
                )
        axis.set_xscale("log", base=2)
        axis.set_title(operator)
        axis.set_xlabel("length")
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.legend(shown.values(), shown, loc="lower center", ncol=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    options = parser.parse_args()
    content = json.loads(options.json.read_text())
    draw(content["rows"], f"{content['device']}, jax {content['jax']}, batch 1, float16, kernel time", options.png)


if __name__ == "__main__":
    main()
