"""XLA has a program in this form before it fuses: equal operations are one, and tensors lie in memory as it likes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, Renamings, postorder, read, substitute
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.xla_forms import LibraryProduct
from pallasfuse.price.xla_habits import Habits
from pallasfuse.price.xla_layouts import Layouts


@dataclass(slots=True)
class Known:
    """This keeps the results of earlier calls for one program on one platform, beside other kernels."""

    bodies: dict[tuple[Expr, tuple[tuple[str, Expr], ...]], Expr] = field(default_factory=dict)
    """The bodies of nests, with maps inlined, by the body as it is written and those of the maps that it reads."""
    renamings: Renamings = field(default_factory=Renamings)
    programs: dict[frozenset[str], Layouts] = field(default_factory=dict)
    """Without repetitions, by those of the nests that equal earlier ones which are kept."""
    repeated: list[str] = field(default_factory=list)
    """The nests that equal earlier ones."""
    products: dict[object, LibraryProduct] = field(default_factory=dict)
    """Calls of a library, by all that differs from one call for the program to the next (`_library_product`)."""

    def as_stored(self, program: LoopProgram, kept: frozenset[str], habits: Habits) -> LoopProgram:
        """Returns the program without repetitions, in the orders in which XLA stores its results. kept: these stay as they are."""
        if not self.programs:
            once = without_repetitions(program)
            self.programs[frozenset()] = Layouts(once)
            left = {n.name for n in once.nests}
            self.repeated = [n.name for n in program.nests if n.name not in left]
        key = frozenset(name for name in self.repeated if name in kept)
        if key not in self.programs:
            self.programs[key] = Layouts(without_repetitions(program, key))
        found = self.programs[key]
        return found.beside(kept) if habits.chooses_orders else found.program


# --- equal operations, of which XLA leaves one


def without_repetitions(program: LoopProgram, kept: Collection[str] = ()) -> LoopProgram:
    """Returns the program without nests that equal an earlier one, but for results and those in `kept`.

    Each operation without a nest gives its result new axes, so nests that read equal results differ by the names of their axes.
    They are compared as if these were the axes of the first.
    """
    named = {*program.outputs, *kept}
    first: dict[object, Nest | External] = {}
    same: dict[str, str] = {}
    alike: dict[Axis, Axis] = {}
    """The axes that are first met in what is left out, with those of what it equals."""
    seen = {a for t in program.inputs for a in t.axes}
    renamings = Renamings()
    nests: list[Nest | External] = []
    for nest in program.nests:
        repeated = bool(same.keys() & nest.reads)
        key: object
        if isinstance(nest, External):
            taking = _taking(nest, same) if repeated else nest
            new: Nest | External = taking
            shape = tuple(a.extent for a in nest.axes)
            key = (nest.operation, taking.operands, nest.dtype, shape) if nest.operation else nest.name
        else:
            body = _reading(nest.body, same) if repeated else nest.body
            new = replace(nest, body=body) if repeated else nest
            own = (*nest.axes, *nest.reduced)
            over = tuple(alike.get(a, a) for a in own)
            if over != own and len(set(over)) == len(over):
                own, body = over, renamings.renamed(body, own, over)
            key = own, len(nest.axes), nest.reducer, nest.dtype, nest.precision, nest.picks, body
        earlier = first.setdefault(key, new)
        if earlier is not new and nest.name not in named:
            same[nest.name] = earlier.name
            pairs = zip(nest.axes, earlier.axes, strict=True)
            alike |= {a: alike.get(b, b) for a, b in pairs if a not in alike and a not in seen}
        else:
            nests.append(new)
            seen.update(new.axes)
    return replace(program, nests=tuple(nests)) if same else program


def _taking(node: External, same: Mapping[str, str]) -> External:
    """The operation with other operands, also where it is known which elements of them it takes."""
    operands = tuple(same.get(t, t) for t in node.operands)
    found = node.lookup
    if found is not None:
        source, table = (replace(t, name=same.get(t.name, t.name)) for t in (found.source, found.table))
        found = replace(found, source=source, table=table)
    return replace(node, operands=operands, lookup=found)


def _reading(body: Expr, same: dict[str, str]) -> Expr:
    reads = [n for n in postorder(body) if isinstance(n, Read) and n.tensor in same]
    return substitute(body, {n: read(same[n.tensor], n.indices, n.dtype) for n in reads})
