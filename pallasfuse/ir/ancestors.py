"""This tells on what each tensor of a program depends: as bits of integers, since they are united for every nest."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress


class Ancestors(Mapping[str, frozenset[str]]):
    """The tensors that each tensor is computed from, by its name. It holds bits; a set of names is made when it is asked for."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._above: dict[str, int] = {}
        self._sets: dict[str, frozenset[str]] = {}

    def bit(self, tensor: str) -> int:
        """The bit that stands for a tensor."""
        found = self._bits.get(tensor)
        if found is None:
            found = self._bits[tensor] = 1 << len(self._bits)
        return found

    def of(self, tensor: str) -> int:
        """The bits of what a tensor depends on; of an input, none."""
        return self._above.get(tensor, 0)

    def add(self, tensor: str, read: Iterable[str]) -> None:
        """Note what a tensor reads, and with it all that this depends on."""
        found = self._above.get(tensor, 0)
        for name in read:
            found |= self.bit(name) | self._above.get(name, 0)
        self._above[tensor] = found
        self._sets.pop(tensor, None)

    def depend(self, on: Iterable[str]) -> Callable[[str], bool]:
        """Returns the function that says whether a tensor depends on one of these."""
        wanted = 0
        for name in on:
            wanted |= self._bits.get(name, 0)
        return lambda name: self.of(name) & wanted != 0

    def __getitem__(self, tensor: str) -> frozenset[str]:
        found = self._sets.get(tensor)
        if found is None:
            digits = reversed(f"{self._above[tensor]:b}")
            found = self._sets[tensor] = frozenset(compress(self._bits, (digit == "1" for digit in digits)))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._above)

    def __len__(self) -> int:
        return len(self._above)
