"""Maps that XLA stores, and is to store beside our kernels, too.

XLA stores a map where it takes that to be cheaper than computing it in each kernel that reads it. If one of ours computes the map
by itself, fewer readers are left, and XLA may compute it inside of these. That is as well where they read it in order. A gather
computes it at every place that it chooses, from tensors of which it finds no two elements side by side: on an H100, interpolated
shifts of a distribution took 315 us in place of 47. The price does not foresee that: to it the map is stored as before. Only maps
that gathers read as they are count, and only those that no loop stores beside what it computes from them: apart, these would be
two kernels.
"""

from collections.abc import Mapping

from pallasfuse.device import Device
from pallasfuse.ir.axes import volume
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.moves import computed_from
from pallasfuse.price.xla import kernels_on
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.price.xla_kernels import needed_nests
from pallasfuse.price.xla_plain import condenses
from pallasfuse.price.xla_programs import Known

Names = frozenset[str]


def stored_beside(program: LoopProgram, device: Device, made: Names, read: Names) -> Names:
    """Returns the maps that lose a reader to kernels of ours, of which gathers take elements, and that XLA stores, with these
    kernels and without.

    made, read: the tensors that the kernels write and read.
    """
    left = needed_nests(program, made, read)
    replaced = needed_nests(program, frozenset(), frozenset()) - left
    maps = {n.name for n in program.nests if isinstance(n, Nest) and not n.is_reduction}
    lost = {t for n in program.nests if n.name in replaced for t in n.reads}
    sizes = {d.name: volume(d.axes) for d in program.definitions()}
    gathered = {t for n in program.nests if n.name in left and _takes_many(n, sizes) for t in n.reads}
    candidates = (maps & lost & gathered).difference(made, read, program.outputs)
    if not candidates:
        return frozenset()
    known = Known()
    before = {name for made_by_it in _loops(program, device, frozenset(), frozenset(), known) for name in made_by_it}
    makers = {n.name: n for n in program.nests if isinstance(n, Nest)}
    return frozenset(
        name for made_by_it in _loops(program, device, made, read, known) for name in candidates & before & made_by_it
        if not any(name in computed_from(other, makers) for other in made_by_it if other != name)
    )  # fmt: skip


def _takes_many(node: Nest | External, sizes: Mapping[str, int]) -> bool:
    """Does an operation take elements from places that something else says, and not just a few of them?"""
    return isinstance(node, External) and node.form == "selection" and node.run > 0 and not condenses(node, sizes)


def _loops(program: LoopProgram, device: Device, made: Names, read: Names, known: Known) -> list[Names]:
    """Returns what each loop of XLA writes to memory, beside kernels of ours."""
    kernels = kernels_on(device, program, made, read, known)
    return [frozenset(k.makes) for k in kernels if isinstance(k, LoopFusion)]
