"""Terms of an e-graph on arrays in float64: what every equal term must agree on."""

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import read
from pallasfuse.search.egraph import EGraph, Inverse, Leaf, Number, Over, Plus, Times

I1, J, K, L = (Axis(name, extent) for name, extent in (("i", 2), ("j", 3), ("k", 4), ("l", 5)))
I2 = Axis("i2", 2)
SHAPES = {"a": (I1, K), "b": (K, J), "c": (J, L), "d": (K, J), "x": (K,), "s": (I1,), "y": (J,), "n": ()}
"""The tensors of the tests, with their axes."""


def leaf(graph: EGraph, name: str, *axes: Axis) -> int:
    return graph.leaf(read(name, axes or SHAPES[name], "float64"))


class Arrays(dict):
    """Drawn tensors by name, of the extents with which they are read."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)

    def of(self, node: Leaf) -> np.ndarray:
        shape = [a.extent for a in node.read.indices]
        if node.read.tensor == "delta":
            return np.eye(*shape)
        if node.read.tensor not in self:
            self[node.read.tensor] = self.random.normal(size=shape)
        return self[node.read.tensor]


class Values:
    """The values of classes, each by its first term; one dimension for each axis, in the order of their names."""

    def __init__(self, graph: EGraph, arrays: Arrays) -> None:
        self.graph, self.arrays, self.known = graph, arrays, {}

    def axes(self, number: int) -> list[Axis]:
        return sorted(self.graph.axes(number))

    def value(self, number: int) -> np.ndarray:
        number = self.graph.find(number)
        if number not in self.known:
            self.known[number] = self.of(self.graph.nodes(number)[0], self.axes(number))
        return self.known[number]

    def of(self, node, axes: list[Axis]) -> np.ndarray:
        """The value of one term, over axes."""
        match node:
            case Leaf(of):
                order = [of.indices.index(a) for a in sorted(of.indices)]
                return self._over(self.arrays.of(node).transpose(order), sorted(of.indices), axes)
            case Number(value):
                return self._over(np.asarray(value), [], axes)
            case Times(factors):
                return np.prod([self._at(f, axes) for f in factors], axis=0)
            case Plus(terms):
                return np.sum([self._at(t, axes) for t in terms], axis=0)
            case Inverse(term):
                return 1.0 / self._at(term, axes)
            case Over(summed, term):
                inside = sorted(set(axes) | summed)
                return self._at(term, inside).sum(axis=tuple(inside.index(a) for a in summed))
        raise AssertionError(node)

    def _at(self, number: int, axes: list[Axis]) -> np.ndarray:
        return self._over(self.value(number), self.axes(number), axes)

    def _over(self, value: np.ndarray, own: list[Axis], axes: list[Axis]) -> np.ndarray:
        shape = [a.extent if a in own else 1 for a in axes]
        return np.broadcast_to(value.reshape(shape), [a.extent for a in axes])


def disagreement(graph: EGraph, seed: int = 0) -> str | None:
    """The first term that has another value than its class; None where all agree."""
    values = Values(graph, Arrays(seed))
    for number in graph.classes():
        expected, axes = values.value(number), values.axes(number)
        for node in graph.nodes(number):
            found = values.of(node, axes)
            if not np.allclose(found, expected, rtol=1e-9, atol=1e-9):
                return f"{node} in class {number}: {found} is not {expected}"
    return None
