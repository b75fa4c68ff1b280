"""Maps that XLA stores, and is to store beside our kernels, too.

XLA stores a map where it takes that to be cheaper than computing it in each kernel that reads it. If one of ours computes the map
by itself, fewer readers are left, and XLA may compute it inside of them, at the places that a gather chooses, say, or at those of a
transposed array. The price does not foresee that: it takes the rest of the program to be compiled as before.
"""

from pallasfuse.device import Device
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.price.xla import kernels_on
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.price.xla_kernels import Known, needed_nests

Names = frozenset[str]


def stored_beside(program: LoopProgram, device: Device, made: Names, read: Names) -> Names:
    """Returns the maps that lose a reader to kernels of ours, and that XLA stores for the others, with these kernels and without.

    made, read: the tensors that the kernels write and read.
    """
    left = needed_nests(program, made, read)
    replaced = needed_nests(program, frozenset(), frozenset()) - left
    maps = {n.name for n in program.nests if isinstance(n, Nest) and not n.is_reduction}
    lost = {t for n in program.nests if n.name in replaced for t in n.reads}
    needed = {t for n in program.nests if n.name in left for t in n.reads}
    candidates = (maps & lost & needed).difference(made, read, program.outputs)
    if not candidates:
        return frozenset()
    known = Known()
    before = _stored(program, device, frozenset(), frozenset(), known)
    return frozenset(candidates & before & _stored(program, device, made, read, known))


def _stored(program: LoopProgram, device: Device, made: Names, read: Names, known: Known) -> set[str]:
    """The tensors that loops of XLA write to memory, beside kernels of ours."""
    kernels = kernels_on(device, program, made, read, known)
    return {name for k in kernels if isinstance(k, LoopFusion) for name in k.makes}
