"""The kernels that XLA makes of nests: a model of its fusion passes.

XLA fuses maps into the reductions, products' neighbours and outputs that read them. A matrix product is a call of a
library, whose operands are written to memory first. Reductions of the same values share a kernel (multi-output fusion), and on GPUs
rows that are reduced and then read again stay in one (its fusion of diamonds). A map that several kernels read is stored on a
CPU; on a GPU it is computed in each of them, where that does not take longer.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache

from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.ancestors import Ancestors
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, applied_in, postorder, read, reads_in, substitute
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, bytes_by_name
from pallasfuse.price import instruction_fusion
from pallasfuse.price.moves import read_otherwise
from pallasfuse.price.scattered import pieces_changed
from pallasfuse.price.stored_terms import stored_before
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, Opaque, Place, XlaKernel
from pallasfuse.price.xla_fused_products import computed_before, ended_products, reading_in_place
from pallasfuse.price.xla_habits import Habits
from pallasfuse.price.xla_library import joined_calls, reduces_windows, takes_all, takes_reduction
from pallasfuse.price.xla_loops import Fusions, ended_inside, with_short_reductions
from pallasfuse.price.xla_orders import written_as_wanted
from pallasfuse.price.xla_plain import condenses, plain_kernel
from pallasfuse.price.xla_products import as_read, library_product, places, prologues, without_casts
from pallasfuse.price.xla_programs import Known
from pallasfuse.price.xla_reads import Moves, moves_of
from pallasfuse.price.xla_reductions import is_product, product_operands
from pallasfuse.price.xla_rows import Loop, diamonds_in, inner_reductions, row_fusions
from pallasfuse.price.xla_stored import stored_to_save_work
from pallasfuse.price.xla_vectors import stored_matrix, turned_elements


def xla_kernels(
    program: LoopProgram, habits: Habits, made: frozenset[str] = frozenset(), read: frozenset[str] = frozenset(),
    known: Known | None = None, owned: frozenset[str] = frozenset(),
) -> list[XlaKernel]:  # fmt: skip
    """The kernels that compute `program` where other kernels make the tensors `made`, and read `read`.

    known: from earlier calls for this program; grows. owned: the inputs that updates may write over.
    """
    known = Known() if known is None else known
    program = known.as_stored(program, made | read, habits)
    of = moves_of(program) if habits.fuses_moves else Moves(program)
    program = of.program
    needed = needed_nests(program, made, read)
    readers = Counter([t for name, reads in _reads(program) if name in needed for t in reads])
    kept = _stored_maps(program, needed, habits, read, readers) | (of.stored & needed)
    rows = diamonds_in(program, needed, kept, habits)
    kept |= rows.stored
    if habits.fuses_moves:
        kept |= stored_to_save_work(program, of.places_of_their_own, needed, kept, rows.inner)
    bodies = _inline(program, needed, kept, known)
    inlined = {n.name for n in program.nests if isinstance(n, Nest) and not n.is_reduction} & bodies.keys() - kept
    kernels: list[XlaKernel] = []
    loops: list[Loop] = []
    apart: set[str] = set()
    """The nests that store values before a reduction, or matrices before a product with a vector: each has a kernel of its own."""
    above = Ancestors()
    volumes, sizes = _sizes(program)
    given = frozenset(t.name for t in program.inputs)
    shared = frozenset(t for t, n in readers.items() if n > 1) - given
    as_wanted = written_as_wanted(program).difference(shared, program.outputs, read)
    stored_operands: dict[Expr, Nest] = {}
    stored_parts: dict[Expr, Expr] = {}
    """The parts of bodies that are stored before reductions, and the reads that stand for them."""
    by_library: set[str] = set()
    by_work: dict[int, str] = {}
    """The first result of each operation without a nest, by the identity of its work."""

    def stored_as(operand: Expr, reader: Nest) -> Nest:
        """The nest that stores the operand of a product before it."""
        if operand not in stored_operands:
            name = f"{reader.name}.operand{len(stored_operands) + 1}"
            stored = stored_operands[operand] = Nest(name, as_read(operand), operand, operand.dtype)
            above.add(name, operand.tensors)
            loops.append((stored, operand))
        return stored_operands[operand]

    for node in program.nests:
        if node.name not in needed:
            continue
        if isinstance(node, External):
            above.add(node.name, node.operands)
            if node.moves_nothing:
                continue
            if node.lookup is not None:
                kernels.append(gather_of(node.lookup))
                continue
            if node.form == "update":
                stored_by_it = {t: bodies[t] for t in node.operands if t in inlined}
                kernels.append(_update(node, program, sizes, owned, stored_by_it))
                continue
            if node.work is not None:
                first = by_work.setdefault(id(node.work), node.name)
                its_own = {t: sizes[t] for t in node.operands}
                kernels.append(Opaque(
                    node.name, sum(its_own.values()), sizes[node.name], operands=tuple(its_own.items()),
                    work=node.work, computed_with="" if first == node.name else first,
                ))  # fmt: skip
                continue
            kernels.append(plain_kernel(node, volumes, sizes))
            continue
        if node.reducer is None and node.name not in kept:
            continue
        body = bodies[node.name]
        if stored_parts and (parts := stored_parts.keys() & applied_in(body)):
            body = substitute(body, {p: stored_parts[p] for p in parts})
        above.add(node.name, body.tensors)
        operands = product_operands(node.reduced, body) if is_product(node) else None
        if operands is None:
            stored_first = stored_before(node, body, by_library, habits) if rows.inner.isdisjoint(body.tensors) else {}
            for part, nest in stored_first.items():
                above.add(nest.name, part.tensors)
                loops.append((nest, part))
                if part is body:
                    apart.add(nest.name)
                stored_parts[part] = _read_of(nest)
            if stored_first:
                body = substitute(body, {p: stored_parts[p] for p in stored_first})
                above.add(node.name, body.tensors)
            matrix = stored_matrix(node, body, by_library, habits)
            if matrix is not None:
                stored = stored_as(matrix, node)
                apart.add(stored.name)
                above.add(node.name, (stored.name,))
                body = substitute(body, {matrix: _read_of(stored)})
            loops.append((node, body))
            continue
        alone = shared.isdisjoint(node.reads)
        inside = prologues(node, operands, given, habits) if alone else frozenset()
        before = computed_before(node, operands) - inside if alone and habits.fuses_moves else frozenset()
        inside |= before
        for operand in operands:
            core = without_casts(operand)
            if not isinstance(core, Read) and core not in inside:
                stored_as(core, node)
        names = {core: stored.name for core, stored in stored_operands.items()}
        product = _library_product(node, operands, names, inside, given, as_wanted, habits, known)
        kernels.append(replace(product, computes_operand=True) if before - names.keys() else product)
        by_library.add(node.name)
    outside = {t for k in kernels for t in k.sources}.union(program.outputs, read)
    nests = _definitions(program)
    found = _fused(loops, apart, rows.inner, outside, habits, above, of.windows.keys())
    if habits.fuses_moves:
        kernels = ended_inside(kernels, found, outside)
    for fusion in found:
        fusion.in_order = read.union(program.outputs)
        if habits.library_reduces:
            fusion.turned = sum(turned_elements(n, nests) for n in fusion.roots)
        if habits.fuses_moves:
            of.read_once(fusion, sizes)
        fusion.threads = max((of.threads.get(n.name, 0.0) for n in fusion.roots), default=0.0)
    if habits.fuses_moves:
        in_place = reading_in_place(program, of.places_of_their_own, inlined) if by_library else frozenset()
        kernels, found = ended_products(kernels, found, outside, in_place)
    return [*kernels, *found]


def _read_of(nest: Nest) -> Expr:
    return read(nest.name, nest.axes, nest.dtype)


def _fused(
    loops: Sequence[Loop], apart: Collection[str], inner: Set[str], outside: Set[str], habits: Habits, above: Ancestors,
    around: Collection[Place],
) -> list[LoopFusion]:  # fmt: skip
    """The kernels of loops. apart: those that share one with nothing; inner: what is computed inside of diamonds;
    outside: the tensors that something else reads; around: as of `Fusions`."""
    inner = inner_reductions(loops, inner, outside, habits)
    rows = {f.roots[-1].name: f for f in row_fusions(loops, inner)}
    fusions = Fusions(habits, above, around)
    for nest, body in loops:
        if nest.name in rows:
            fusions.all.append(rows[nest.name])
        elif nest.name in apart:
            fusions.all.append(LoopFusion([nest], [body], dict(places(body))))
        elif nest.name not in inner:
            fusions.take(nest, body)
    return with_short_reductions(fusions.all, outside, habits) if habits.fuses_moves else fusions.all


def _library_product(
    node: Nest, operands: tuple[Expr, Expr], stored: Mapping[Expr, str], inside: frozenset[Expr], given: frozenset[str],
    as_wanted: frozenset[str], habits: Habits, known: Known,
) -> LibraryProduct:  # fmt: skip
    """The call of a library, as of `library_product`: the same object each time.

    A product of one program on one platform differs by its operands, by the names of those that are stored or written as it wants
    them, and by what is computed inside of it."""
    names = tuple(stored.get(without_casts(o)) for o in operands)
    key = node.name, operands, names, inside, as_wanted & node.reads
    found = known.products.get(key)
    if found is None:
        layouts = product_operands(node.reduced, node.body) or operands
        found = known.products[key] = library_product(node, operands, layouts, stored, inside, given, as_wanted, habits)
    return found


def _reads_of(program: LoopProgram) -> list[tuple[str, frozenset[str]]]:
    """The nests of a program by their names, and what each of them reads."""
    return [(n.name, n.reads) for n in program.nests]


_reads = Recent(_reads_of)


_definitions = Recent(lambda program: {d.name: d for d in program.definitions()})


def _sizes_of(program: LoopProgram) -> tuple[dict[str, int], dict[str, float]]:
    """The elements of all tensors, and their bytes."""
    volumes = {d.name: volume(d.axes) for d in program.definitions()}
    return volumes, bytes_by_name(program)


_sizes = Recent(_sizes_of)


def _update(
    node: External, program: LoopProgram, sizes: Mapping[str, float], owned: frozenset[str], inside: Mapping[str, Expr]
) -> Opaque:  # fmt: skip
    """The update of a tensor: in its place, unless somebody else needs what was there.

    owned: as in `xla_kernels`. inside: the operands that are computed as they are stored, and their bodies.
    """
    target, *others = node.operands
    source = without_changes(target, program)
    changed = max((sizes[t] for t in others), default=sizes[node.name])
    read = {t: sizes[t] for t in others if t not in inside}
    for body in inside.values():
        read |= {tensor: min(moved, sizes[tensor]) for (tensor, _), moved in places(body)}
    pieces = pieces_changed(node, _definitions(program))
    readers = sum(target in n.reads for n in program.nests)
    needed = readers > 1 or target in program.outputs or any(source == t.name for t in program.inputs)
    written = sizes[node.name]
    if sizes[target] == written and (source in owned or not needed):
        read[target] = 0.0
        written = min(changed, written)
    else:
        read[target] = sizes[target]
    return Opaque(
        node.name,
        sum(read.values()),
        written,
        operands=tuple(read.items()),
        computes=tuple(inside.values()),
        pieces=pieces,
    )


def without_changes(tensor: str, program: LoopProgram) -> str:
    """The tensor that another one is in another shape."""
    makers = {n.name: n for n in program.nests}
    while tensor in makers:
        node = makers[tensor]
        if isinstance(node, External):
            if node.lookup is None or not node.moves_nothing:
                break
            tensor = node.lookup.source.name
        elif not node.is_reduction and isinstance(node.body, Read) and len(node.axes) == len(node.body.indices):
            tensor = node.body.tensor
        else:
            break
    return tensor


def gather_of(lookup: Lookup) -> Opaque:
    """The gather that a lookup stands for: it reads the elements that it stores, and not the others."""
    stored, source, table = (
        float(volume(t.axes) * dtypes.itemsize_bytes(t.dtype)) for t in (lookup.result, lookup.source, lookup.table)
    )
    taken = min(stored, source)
    read = ((lookup.source.name, taken), (lookup.table.name, table))
    return Opaque(lookup.result.name, taken + table, stored, operands=read)


def needed_nests(program: LoopProgram, made: frozenset[str], read: frozenset[str]) -> frozenset[str]:
    """The nests that are still computed."""
    needed: set[str] = set()
    wanted = set(program.outputs) | read
    for name, reads in reversed(_reads(program)):
        if name in wanted and name not in made:
            needed.add(name)
            wanted |= reads
    return frozenset(needed)


def _stored_maps(
    program: LoopProgram, needed: frozenset[str], habits: Habits, read: frozenset[str], readers: Mapping[str, int]
) -> frozenset[str]:
    """Maps that are written to memory: results, operands of what XLA computes by itself, and on some platforms those that
    several nests read. readers: the number of needed nests that read each tensor."""
    stored = {n for n in (*program.outputs, *read) if n in needed}
    sizes, _ = _sizes(program)
    for node in program.nests:
        if not isinstance(node, External) or node.name not in needed:
            continue
        if habits.fuses_moves and node.form == "update":
            stored |= {t for t in node.operands[:1] if t in needed}
        elif node.lookup is not None or not condenses(node, sizes):
            stored |= {t for t in node.reads if t in needed}
    if habits.fuses_moves:
        stored |= read_otherwise(program)
    if not habits.duplicates_maps:
        stored |= _stored_by_loops(program, needed, stored, readers)
    if habits.library_reduces:
        stored |= _before_library(program, needed)
    return frozenset(stored)


def _before_library(program: LoopProgram, needed: frozenset[str]) -> set[str]:
    """Operands of the library's reductions that it cannot compute, and of reductions of stored values by loops."""
    maps = {n.name: n for n in program.nests if isinstance(n, Nest) and not n.is_reduction and n.name in needed}
    reductions = [n for n in program.nests if isinstance(n, Nest) and n.is_reduction and n.name in needed]
    waiting = [
        t for n in reductions
        if takes_reduction(n) and takes_all(n.body) and product_operands(n.reduced, n.body) is None for t in n.reads
    ]  # fmt: skip
    in_windows = {t for n in reductions if reduces_windows(n) for t in n.reads if t in maps and maps[t].body.tensors}
    seen: set[str] = set()
    found: set[str] = set()
    while waiting:
        node = maps.get(waiting.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        if takes_all(node.body):
            waiting += node.reads
        else:
            found.add(node.name)
    return found | in_windows


def _stored_by_loops(
    program: LoopProgram, needed: frozenset[str], stored: Set[str], readers: Mapping[str, int]
) -> set[str]:  # fmt: skip
    """Maps that are stored where XLA fuses instructions one by one, beside what a library computes."""
    nodes = [n for n in program.nests if n.name in needed]
    library = _in_library(nodes, stored)
    sizes, _ = _sizes(program)
    loops = {
        n.name for n in nodes
        if n.name not in library and (
            not is_product(n) if isinstance(n, Nest) else n.lookup is None and condenses(n, sizes)
        )
    }  # fmt: skip
    by_loops = {t for n in nodes if n.name in loops for t in n.reads}
    alive = instruction_fusion.stored(nodes, loops, stored) | library
    maps = [n for n in nodes if isinstance(n, Nest) and not n.is_reduction]
    computing: set[str] = set()
    """The maps in which something is computed, be it by a map that is computed inside of them."""
    for node in maps:
        if _computes(node.body) or any(t in computing and t not in alive for t in node.reads):
            computing.add(node.name)
    return {n.name for n in maps if n.name in alive & computing and (readers.get(n.name, 0) > 1 or n.name in by_loops)}


def _in_library(nodes: Sequence[Nest | External], stored: Set[str]) -> set[str]:
    """The nests in calls of the library that reduce."""
    takes = {
        n.name for n in nodes
        if isinstance(n, Nest) and (is_product(n) or ((takes_reduction(n) or not n.is_reduction) and takes_all(n.body)))
    }  # fmt: skip
    readers: dict[str, set[str]] = {}
    for node in nodes:
        for tensor in node.reads:
            readers.setdefault(tensor, set()).add(node.name)
    inner = [n.name for n in reversed(nodes) if n.name in takes - stored and readers.get(n.name, {""}) <= takes]
    call = joined_calls(inner, {n: n for n in inner}, readers)
    reducing = {
        call(n.name) for n in nodes if n.name in takes and isinstance(n, Nest) and n.is_reduction and not is_product(n)
    }
    return {n for n in takes if call(n) in reducing}


@lru_cache(1 << 12)
def _computes(body: Expr) -> bool:
    """Is there an operation on tensors in it, and not only a change of shape or type?"""
    return bool(body.tensors) and any(isinstance(n, Apply) and n.op != "convert" for n in postorder(body))


def _inline(program: LoopProgram, needed: frozenset[str], kept: frozenset[str], known: Known) -> dict[str, Expr]:
    """The bodies of nests over what is in memory."""
    axes: dict[str, tuple[Axis, ...]] = {}
    bodies: dict[str, Expr] = {}
    for nest in program.nests:
        if not isinstance(nest, Nest) or nest.name not in needed:
            continue
        maps = [t for t in nest.body.tensors if t in axes]
        key = nest.body, tuple([(t, bodies[t]) for t in maps])
        if maps and key not in known.bodies:
            replacements: dict[Expr, Expr] = {}
            for node in reads_in(nest.body):
                if node.tensor in axes:
                    inner = bodies[node.tensor]
                    replacements[node] = known.renamings.renamed(inner, axes[node.tensor], node.indices)
            known.bodies[key] = substitute(nest.body, replacements)
        bodies[nest.name] = known.bodies[key] if maps else nest.body
        if nest.reducer is None and nest.name not in kept:
            axes[nest.name] = nest.axes
    return bodies
