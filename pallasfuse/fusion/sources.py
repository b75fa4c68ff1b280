"""Maps that are cheaper to compute again than to read: what they are computed from takes fewer bytes of memory than they do.

Float32 logits are a sum of a product that was stored in half precision and of a bias of their columns. Whoever needs them in
another kernel reads less where they are computed again. Maps that a program could tell from themselves are left out.
"""

from collections.abc import Collection

from pallasfuse.fusion.cost import tensor_bytes
from pallasfuse.ir.expr import reads_in
from pallasfuse.ir.loop_program import Nest


class Sources:
    """The sources of a map are the values that it is computed from, seen through other maps that are cheaper to compute again.

    Maps are added in the order of a program. told_apart: those that are not computed twice (`fusion.roundings`).
    """

    def __init__(self, told_apart: Collection[str] = ()) -> None:
        self._told_apart = told_apart
        self._bytes: dict[str, dict[str, int]] = {}
        self._steps: dict[str, int] = {}

    def add(self, nest: Nest, most_steps: int | None = None) -> bool:
        """Takes a map in, and says whether it is cheaper to compute again than to read.

        most_steps: of so many maps at most, itself included; of any number if None.
        """
        steps = 1 + sum(self._steps.get(t, 0) for t in nest.reads)
        if nest.name in self._told_apart or (most_steps is not None and steps > most_steps):
            return False
        found: dict[str, int] = {}
        for node in reads_in(nest.body):
            found |= self._bytes.get(node.tensor, {node.tensor: tensor_bytes(node.indices, node.dtype)})
        if sum(found.values()) >= tensor_bytes(nest.axes, nest.dtype):
            return False
        self._bytes[nest.name], self._steps[nest.name] = found, steps
        return True
