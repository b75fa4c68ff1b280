"""Maps that are cheaper to compute again than to read: what they are computed from takes fewer bytes of memory than they do.

Float32 logits are a sum of a product that was stored in half precision and of a bias of their columns. Whoever needs them in
another kernel reads less where they are computed again. Two computations of one value may round apart: only those are looked at
that round in one way wherever that is done, or on whose roundings nothing depends.
"""

from collections.abc import Collection

from pallasfuse.fusion.cost import tensor_bytes
from pallasfuse.fusion.roundings import round_in_one_way
from pallasfuse.ir.expr import Apply, reads_in
from pallasfuse.ir.loop_program import Nest


class Sources:
    """What maps are computed from that is no such map itself. They are added in the order of a program.

    decided: the values on whose roundings something depends (`fusion.roundings`).
    """

    def __init__(self, decided: Collection[str] = ()) -> None:
        self._decided = decided
        self._bytes: dict[str, dict[str, int]] = {}
        self._steps: dict[str, int] = {}
        self._products: set[str] = set()

    def add(self, nest: Nest, most_steps: int | None = None) -> bool:
        """Takes a map in, and says whether it is cheaper to compute again than to read.

        most_steps: of so many maps at most, itself included; of any number if None.
        """
        if isinstance(nest.body, Apply) and nest.body.op == "mul":
            self._products.add(nest.name)
        steps = 1 + sum(self._steps.get(t, 0) for t in nest.reads)
        too_long = most_steps is not None and steps > most_steps
        if too_long or (nest.name in self._decided and not round_in_one_way(nest.body, self._products)):
            return False
        found: dict[str, int] = {}
        for node in reads_in(nest.body):
            found |= self._bytes.get(node.tensor, {node.tensor: tensor_bytes(node.indices, node.dtype)})
        if sum(found.values()) >= tensor_bytes(nest.axes, nest.dtype):
            return False
        self._bytes[nest.name], self._steps[nest.name] = found, steps
        return True
