"""Decides which dimensions of a program are the same axis: a union-find over symbols that can also be split into factors.

Every dimension of every tensor starts as a symbol of its own (unit dimensions have none). A *space* is a set of
symbols that must stay distinct: the axes of a tensor, or the iteration space of an equation. `match` says that a
tensor's definition and the view through which an equation reads it run over the same elements. Symbol by symbol it
- merges the two, when no space holds both; or else
- only keeps them *alike*: they are then different axes that are split in the same way, and the equation reads the
  tensor over renamed axes.
So a space never holds an axis twice, and a view always has its definition's extents.

Every change can be undone, so that a caller can try several ways to match (`mark` and `undo`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

type Symbol = int


class Dimensions:
    """Symbols, their classes, and how they are split."""

    def __init__(self) -> None:
        self._extent: list[int] = []
        self._parent: list[Symbol] = []  # union-find: the same axis
        self._spaces: list[set[int]] = []  # of a class, at its root: the spaces that hold it
        self._parts: list[tuple[Symbol, ...]] = []  # of a class, at its root: row-major factors, () when unsplit
        self._alike_parent: list[Symbol] = []  # a coarser union-find: split in the same way
        self._alike: list[list[Symbol]] = []  # of an alike group, at its root: its symbols
        self._space_count = 0
        self._undo: list[Callable[[], None]] = []

    def space(self) -> int:
        """A new space."""
        self._space_count += 1
        return self._space_count - 1

    def mark(self) -> int:
        """A point to return to with `undo`."""
        return len(self._undo)

    def undo(self, mark: int) -> None:
        """Forget everything since `mark`, symbols included."""
        while len(self._undo) > mark:
            self._undo.pop()()

    def fresh(self, extent: int, spaces: Iterable[int]) -> Symbol:
        """A new symbol that lies in `spaces`."""
        symbol = len(self._extent)
        self._extent.append(extent)
        self._parent.append(symbol)
        self._spaces.append(set(spaces))
        self._parts.append(())
        self._alike_parent.append(symbol)
        self._alike.append([symbol])
        self._undo.append(self._forget_last)
        return symbol

    def _forget_last(self) -> None:
        self._extent.pop()
        self._parent.pop()
        self._spaces.pop()
        self._parts.pop()
        self._alike_parent.pop()
        self._alike.pop()

    def fresh_shape(self, shape: Iterable[int], space: int) -> tuple[tuple[Symbol, ...], ...]:
        """Returns a new symbol for each dimension, and nothing for a unit dimension."""
        return tuple((self.fresh(extent, (space,)),) if extent != 1 else () for extent in shape)

    def leaves(self, symbols: Iterable[Symbol]) -> list[Symbol]:
        """The unsplit classes that `symbols` run over, row-major."""
        found: list[Symbol] = []
        stack = list(symbols)[::-1]
        while stack:
            root = _find(self._parent, stack.pop())
            if self._parts[root]:
                stack.extend(reversed(self._parts[root]))
            else:
                found.append(root)
        return found

    def extent(self, symbol: Symbol) -> int:
        return self._extent[symbol]

    def match(self, definition: Sequence[Symbol], view: Sequence[Symbol]) -> int | None:
        """Make `view` run over the elements of `definition` in order.

        Returns the number of axes of `view` that are not the definition's, or None when the factors of the two do not
        nest (some symbols may be split then: `undo`).
        """
        while True:
            left, right = self.leaves(definition), self.leaves(view)
            left_extents, right_extents = [self._extent[s] for s in left], [self._extent[s] for s in right]
            if left_extents == right_extents:
                break
            boundaries = sorted({*_strides(left_extents), *_strides(right_extents)})
            if any(large % small for small, large in pairwise(boundaries)):
                return None
            for symbol, factors in (*_cuts(left, left_extents, boundaries), *_cuts(right, right_extents, boundaries)):
                self._split(symbol, factors)
        return sum(not self._join(a, b) for a, b in zip(left, right, strict=True))

    def _join(self, a: Symbol, b: Symbol) -> bool:
        """Make a and b alike, and the same if no space holds both: then True."""
        a, b = _find(self._parent, a), _find(self._parent, b)
        if a == b:
            return True
        group, other = _find(self._alike_parent, a), _find(self._alike_parent, b)
        if group != other:
            if len(self._alike[group]) < len(self._alike[other]):
                group, other = other, group
            self._absorb_alike(group, other)
        if not self._spaces[a].isdisjoint(self._spaces[b]):
            return False
        if len(self._spaces[a]) < len(self._spaces[b]):
            a, b = b, a
        self._parent[b] = a
        self._spaces[a] |= self._spaces[b]
        self._undo.append(partial(self._part, a, b))
        return True

    def _part(self, a: Symbol, b: Symbol) -> None:
        self._parent[b] = b
        self._spaces[a] -= self._spaces[b]  # they were disjoint

    def _absorb_alike(self, group: Symbol, other: Symbol) -> None:
        size = len(self._alike[group])
        self._alike_parent[other] = group
        self._alike[group] += self._alike[other]
        self._undo.append(partial(self._release_alike, group, other, size))

    def _release_alike(self, group: Symbol, other: Symbol, size: int) -> None:
        self._alike_parent[other] = other
        del self._alike[group][size:]

    def _split(self, symbol: Symbol, factors: Sequence[int]) -> None:
        if self._parts[_find(self._parent, symbol)]:
            return  # an alike symbol was split in this round; the caller looks again
        roots = dict.fromkeys(_find(self._parent, s) for s in self._alike[_find(self._alike_parent, symbol)])
        first: tuple[Symbol, ...] = ()
        for root in roots:
            parts = tuple(self.fresh(extent, self._spaces[root]) for extent in factors)
            self._parts[root] = parts
            self._undo.append(partial(self._parts.__setitem__, root, ()))
            first = first or parts
            for a, b in zip(first, parts, strict=True):
                if a != b:
                    self._absorb_alike(a, b)


def _find(parent: list[Symbol], symbol: Symbol) -> Symbol:
    while parent[symbol] != symbol:  # unions are by size, so paths are short; compressing them could not be undone
        symbol = parent[symbol]
    return symbol


def _strides(extents: Sequence[int]) -> list[int]:
    """The row-major strides between the factors, and the total size."""
    strides = [1]
    for extent in reversed(extents):
        strides.append(strides[-1] * extent)
    return strides


def _cuts(
    symbols: Sequence[Symbol], extents: Sequence[int], boundaries: Sequence[int]
) -> list[tuple[Symbol, list[int]]]:
    """The symbols that a boundary falls into, with the row-major factors that the boundaries cut them into."""
    cuts = []
    low = 1
    for symbol, extent in zip(reversed(symbols), reversed(extents), strict=True):
        inside = [b for b in boundaries if low < b < low * extent]
        if inside:
            marks = [low, *inside, low * extent]
            cuts.append((symbol, [large // small for small, large in pairwise(marks)][::-1]))
        low *= extent
    return cuts
