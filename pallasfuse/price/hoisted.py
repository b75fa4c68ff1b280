"""What does not change from trip to trip of a loop: XLA computes it once, before the loop."""

from pallasfuse.ir.axes import volume
from pallasfuse.ir.loop_program import LoopProgram


def unchanging(body: LoopProgram, constants: int) -> frozenset[str]:
    """The tensors that XLA computes before a loop, as they depend on nothing but its constants: so many first inputs of the body.

    Not what is larger than all that it is computed from and would have to be kept in memory: a broadcast is made in every trip.
    """
    sizes = {d.name: volume(d.axes) for d in body.definitions()}
    fixed = {t.name for t in body.inputs[:constants]}
    found: set[str] = set()
    for node in body.nests:
        if node.reads and node.reads <= fixed and sizes[node.name] <= max(sizes[t] for t in node.reads):
            fixed.add(node.name)
            found.add(node.name)
    return frozenset(found)
