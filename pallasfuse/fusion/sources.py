"""What maps are computed from, where that takes fewer bytes of memory than the maps themselves.

Float32 logits are a sum of a product that was stored in half precision and of a bias of their columns: whoever needs them in
another kernel reads less where they are computed again.
"""

from pallasfuse.fusion.cost import tensor_bytes
from pallasfuse.ir.expr import reads_in
from pallasfuse.ir.loop_program import Nest


class Sources:
    """The sources of maps, which are given in a program's order: what each is computed from that is no such map itself."""

    def __init__(self) -> None:
        self._bytes: dict[str, dict[str, int]] = {}

    def are_narrower(self, nest: Nest) -> bool:
        """Do the sources of a map take fewer bytes than it does? Then they are those of what reads it, too."""
        found: dict[str, int] = {}
        for node in reads_in(nest.body):
            found |= self._bytes.get(node.tensor, {node.tensor: tensor_bytes(node.indices, node.dtype)})
        if sum(found.values()) >= tensor_bytes(nest.axes, nest.dtype):
            return False
        self._bytes[nest.name] = found
        return True
