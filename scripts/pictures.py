"""Draws the pictures of the documentation: docs/pictures/*.svg. Without `--write`, says whether they are current."""

import argparse
import sys
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
INK, PALE, FULL, EDGE, SKIPPED = "#24384d", "#eef2f6", "#7fb2d9", "#f2b66d", "#ffffff"


class Picture:
    """A small SVG of boxes, lines and words."""

    def __init__(self, width: int, height: int, what: str) -> None:
        self.size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.what = what
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = PALE, radius: int = 0) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" stroke="{INK}"/>'
        )

    def words(
        self, x: float, y: float, text: str, *, size: int = 13, anchor: str = "middle", mono: bool = False
    ) -> None:
        font = "ui-monospace, Menlo, Consolas, monospace" if mono else "system-ui, sans-serif"
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-family="{font}" font-size="{size}" text-anchor="{anchor}" '
                          f'fill="{INK}">{escape(text)}</text>')  # fmt: skip

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" marker-end="url(#tip)"/>'
        )

    def __str__(self) -> str:
        tip = ('<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
               f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>')  # fmt: skip
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} role="img" aria-label="{escape(self.what)}">'
        return "\n".join([head, tip, *self.parts, "</svg>\n"])


def stages() -> Picture:
    """The way of a function through the compiler."""
    steps = [("plain", "jax.numpy"), ("trace", "loop program"), ("fuse", "folds, repairs"), ("tile", "tile program"),
             ("emit", "kernels"), ("check", "timed once")]  # fmt: skip
    picture = Picture(800, 84, "plain jax.numpy, traced, fused, tiled, emitted as kernels and checked")
    for n, (above, below) in enumerate(steps):
        x = 8 + 132 * n
        picture.box(x, 16, 112, 52, FULL if n in (2, 3) else PALE, 6)
        picture.words(x + 56, 38, above, size=14)
        picture.words(x + 56, 57, below, size=12)
        if n:
            picture.arrow(x - 19, 42, x - 2, 42)
    return picture


def causal_tiles(rows: int = 128, columns: int = 64, length: int = 512) -> Picture:
    """Which tiles of a causal mask are visited, and which of those are masked."""
    picture = Picture(
        560, 240, "tiles of a causal mask: those below the diagonal are visited without a mask, those on it with one"
    )
    scale = 200 / length
    for i in range(0, length, rows):
        for j in range(0, length, columns):
            last, first = i + rows - 1 >= j, i >= j + columns - 1  # is its last row visible; is all of it
            picture.box(
                40 + j * scale,
                20 + i * scale,
                columns * scale,
                rows * scale,
                FULL if first else EDGE if last else SKIPPED,
            )
    picture.words(140, 12, "keys j", size=12)
    picture.words(36, 124, "i", size=12, anchor="end")
    for n, (fill, text) in enumerate([(FULL, "visited, no mask applied"), (EDGE, "on the edge: visited, mask applied"),
                                      (SKIPPED, "hidden: not read, not computed")]):  # fmt: skip
        picture.box(275, 62 + 34 * n, 20, 20, fill)
        picture.words(305, 77 + 34 * n, text, anchor="start")
    return picture


def repair() -> Picture:
    """A sum that is carried from tile to tile while its maximum grows."""
    picture = Picture(800, 150, "a carried sum is multiplied by exp(r - r') when the maximum grows from r to r'")
    for n, (frame, total) in enumerate([("r = 2", "S = Σ exp(x - 2)"), ("r' = 5", "S · exp(2 - 5) + Σ exp(x - 5)"),
                                        ("r'' = 5", "S · 1 + Σ exp(x - 5)")]):  # fmt: skip
        x = 8 + 266 * n
        picture.box(x, 12, 252, 36, FULL)
        picture.words(x + 126, 35, f"tile {n + 1} of x")
        picture.arrow(x + 126, 48, x + 126, 72)
        picture.box(x, 74, 252, 62, PALE, 6)
        picture.words(x + 126, 98, f"largest so far: {frame}")
        picture.words(x + 126, 122, total, mono=True, size=12)
        if n:
            picture.arrow(x - 14, 105, x - 1, 105)
    return picture


PICTURES = {"stages": stages, "causal_tiles": causal_tiles, "repair": repair}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    stale = []
    for name, draw in PICTURES.items():
        path, content = FOLDER / f"{name}.svg", str(draw())
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            stale.append(path.name)
    print(f"not as scripts/pictures.py draws them: {', '.join(stale)}" if stale else "pictures are current")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
