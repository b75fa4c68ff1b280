"""Algebra of sums that are linear in what they read: a factor or a summand leaves the sum (rules 4, 5 and 8)."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from pallasfuse.errors import Refusal
from pallasfuse.fusion.hoisting import Hoisted, hoist, is_bounded
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Expr, Read, apply, convert, postorder, read, substitute
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tree import Do, Node, RangeLoop
from pallasfuse.schedule.block_program import BlockProgram, Body, Path, loops_around, replaced, terms_of, without
from pallasfuse.schedule.merging import inlined
from pallasfuse.schedule.rule import Legality, Site
from pallasfuse.schedule.space import computed


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum, with the nest that has the body of its terms: the sum itself, or a map that only it reads."""

    nest: Nest
    terms: Nest

    @property
    def over(self) -> frozenset[str]:
        return frozenset(a.name for a in self.nest.reduced)

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.nest.name, self.terms.name))

    def of(self, name: str, axes: Collection[object], body: Expr, dtype: str) -> list[Nest]:
        """Returns the nests of another sum over the same axes, with its terms apart if they are."""
        kept = tuple(a for a in self.nest.axes if a in axes)
        summed = replace(self.nest, name=name, axes=kept, body=body, dtype=dtype)
        if self.terms is self.nest:
            return [summed]
        every = (*kept, *self.nest.reduced)
        terms = replace(self.terms, name=terms_of(name), axes=every, body=body, dtype=body.dtype)
        return [terms, replace(summed, body=read(terms.name, every, terms.dtype))]


def sum_of(program: BlockProgram, name: str) -> Sum | None:
    """Returns the sum of a name, if it is one of floating-point numbers."""
    nest = program.region.by_name[name]
    if nest.reducer != SUM or not dtypes.is_float(nest.body.dtype):
        return None
    if isinstance(nest.body, Read) and nest.body.tensor in program.terms:
        return Sum(nest, program.region.by_name[nest.body.tensor])
    return Sum(nest, nest)


def _sums(program: BlockProgram, node: Node) -> Iterator[Sum]:
    """Yields the sums that a node computes together with their terms."""
    for name in sorted(computed(node)):
        found = sum_of(program, name)
        if found is not None and found.names <= computed(node):
            yield found


def _operands(program: BlockProgram, path: Path) -> Iterator[tuple[Site, Sum, Nest]]:
    """Yields the sums of one node of a body with the maps of another one that their terms read."""
    body, nests = program.at(path), program.region.by_name
    for j, node in enumerate(body):
        for found in _sums(program, node):
            for name in sorted(found.terms.reads & nests.keys()):
                makers = [i for i in range(j) if name in computed(body[i])]
                if makers and not nests[name].is_reduction:
                    yield Site(path, (makers[-1], j), found.nest.name, name), found, nests[name]


def _is_ready(program: BlockProgram, site: Site, axes: Collection[str]) -> bool:
    """Returns whether a value has one row inside of the loops around, or the two nodes cannot become one loop there."""
    body = program.at(site.path)
    i, j = (body[n] for n in site.nodes)
    if set(axes) <= {x.axis for x in program.around(site.path)}:
        return True
    return not (isinstance(i, RangeLoop) and isinstance(j, RangeLoop) and i.axis == j.axis)


# --- rule 4: factors


def scaled_operands(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields sums that read a map with a factor that does not vary along what is summed, and sums of terms with such a factor."""
    for site, found, operand in _operands(program, path):
        factors = factors_of(found, inlined(found.terms, operand)).factors
        if factors and _is_ready(program, site, {a.name for f in factors for a in f.value.axes}):
            yield site
    body, open_axes = program.at(path), {x.axis for x in program.around(path)}
    for j, node in enumerate(body):
        for found in _sums(program, node):
            factors = factors_of(found, found.terms.body).factors
            ready = {a.name for f in factors for a in f.value.axes} <= open_axes
            if ready and any(f.value.tensors for f in factors):
                yield Site(path, (j, j), found.nest.name)


def factors_of(found: Sum, body: Expr) -> Hoisted:
    """Returns terms without their factors that do not vary along what is summed."""
    reduced, kept = frozenset(found.nest.reduced), frozenset(found.nest.axes)
    return hoist(body, lambda e: not e.axes & reduced and e.axes <= kept)


def scale_after(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Multiplies a sum by what its terms were multiplied by, unless something else reads the map that did."""
    if site.read and _others_read(program, site):
        return Refusal(f"{site.read} is read by others than the terms of {site.nest}")
    return legality.legal(scaled_after(program, site))


def _others_read(program: BlockProgram, site: Site) -> bool:
    found = sum_of(program, site.nest)
    assert found is not None
    return program.readers[site.read] != (found.terms.name,) or site.read in program.region.outputs


def scaled_after(program: BlockProgram, site: Site) -> BlockProgram:
    """Returns the program with a sum of terms without their factors, and a map that multiplies it by these."""
    found, nests = sum_of(program, site.nest), program.region.by_name
    assert found is not None
    terms = inlined(found.terms, nests[site.read]) if site.read else found.terms.body
    hoisted = factors_of(found, terms)
    name, wide = _fresh(program, f"{site.nest}_unscaled"), dtypes.accumulator(found.nest.body.dtype)
    sums = found.of(name, found.nest.axes, hoisted.rest, wide)
    scaled = convert(hoisted.finish(read(name, found.nest.axes, wide)), found.nest.dtype)
    result = Nest(site.nest, found.nest.axes, scaled, found.nest.dtype, source=found.nest.source)
    body = list(program.at(site.path))
    j = site.nodes[1]
    pure = computed(body[j]) == found.names
    for old, new in zip((found.terms, found.nest), sums if len(sums) == 2 else (sums * 2), strict=True):
        (body[j],) = replaced((body[j],), old.name, (Do(new.name),))
    open_axes = {x.axis for x in program.around(site.path)}

    def multiply(opened: Collection[str]) -> Node:
        return loops_around(program.region, result, opened, (Do(result.name),))

    if pure:
        body.insert(j + 1, multiply(open_axes))
    else:
        body[j : j + 1] = _after_sum((body[j],), name, found.over, multiply, open_axes)
    gone = {site.read} if site.read else set()
    after = without(tuple(body), gone)
    removed = {*found.names, *gone}
    made = program.with_nests(site.path, after, removed, [*sums, result])
    return replace(
        made,
        terms=made.terms | {terms_of(name)},
        conditions=tuple(dict.fromkeys((*made.conditions, *hoisted.conditions, _after(site.nest)))),
    )


def _after(name: str) -> str:
    return f"a factor is applied after the sum {name}: without it no term overflows, and by it none becomes 0 * inf"


def _after_sum(
    body: Body, name: str, over: Collection[str], make: Callable[[Collection[str]], Node], opened: Collection[str]
) -> Body:
    """Returns the body with a node after the loops that finish a sum."""
    nodes: list[Node] = []
    for node in body:
        if isinstance(node, RangeLoop) and name in computed(node) and node.axis not in over:
            nodes.append(replace(node, body=_after_sum(node.body, name, over, make, {*opened, node.axis})))
        else:
            nodes.append(node)
            if name in computed(node):
                nodes.append(make(opened))
    return tuple(nodes)


def _fresh(program: BlockProgram, name: str) -> str:
    known = {*program.region.by_name, *(t.name for t in program.region.inputs)}
    return next(n for n in (name, *(f"{name}_{k}" for k in range(2, 1 << 16))) if n not in known)


# --- rule 5: summands


@dataclass(frozen=True, slots=True)
class Shift:
    """A map as a value and what is added to it, which does not vary along what is summed."""

    value: Expr
    by: Expr
    times: Expr
    """The other factors of the terms."""


def shift_of(found: Sum, operand: Nest) -> Shift | None:
    """Returns the parts of terms that are linear in a map that adds something to each of its rows."""
    reduced = frozenset(found.nest.reduced)
    reads = [n for n in postorder(found.terms.body) if isinstance(n, Read) and n.tensor == operand.name]
    if len(reads) != 1 or not isinstance(operand.body, Apply) or operand.body.op not in ("add", "sub"):
        return None
    a, b = operand.body.args
    minus = operand.body.op == "sub"
    if not b.axes & reduced and a.axes & reduced:
        value, by = a, apply("neg", b) if minus else b
    elif not a.axes & reduced and b.axes & reduced:
        value, by = apply("neg", b) if minus else b, a
    else:
        return None
    linear = hoist(found.terms.body, lambda e: e is reads[0])
    if len(linear.factors) != 1 or linear.factors[0].inverted or operand.name in linear.rest.tensors:
        return None
    return Shift(value, by, linear.rest) if by.axes <= frozenset(found.nest.axes) else None


def shifted_operands(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields sums that read a map which adds something that does not vary along what is summed."""
    for site, found, operand in _operands(program, path):
        shift = shift_of(found, operand)
        alone = computed(program.at(path)[site.nodes[1]]) == found.names
        if alone and shift is not None and _is_ready(program, site, {a.name for a in shift.by.axes}):
            yield site


def shift_after(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Adds to a sum what its terms were shifted by, times the sum of the other factors."""
    found = sum_of(program, site.nest)
    shift = None if found is None else shift_of(found, program.region.by_name[site.read])
    if found is None or shift is None or _others_read(program, site):
        return Refusal(f"{site.read} is read by others than the terms of {site.nest}")
    if legality.stable and not is_bounded(shift.by):
        return Refusal(
            f"{shift.by} is not bounded: without a frame the sums of {shift.value} and of {shift.by} may cancel in {site.nest}"
        )
    return legality.legal(shifted_after(program, site, found, shift))


def shifted_after(program: BlockProgram, site: Site, found: Sum, shift: Shift) -> BlockProgram:
    """Returns the program with two sums for one: that of the values, and that of the other factors over its own axes."""
    nest, wide = found.nest, dtypes.accumulator(found.nest.body.dtype)
    names = [_fresh(program, f"{nest.name}_{what}") for what in ("factors", "shift", "unshifted")]
    dtype = found.terms.body.dtype
    factors = found.of(names[0], shift.times.axes, convert(shift.times, dtype), wide)
    values = found.of(names[2], nest.axes, convert(apply("mul", shift.value, shift.times), dtype), wide)
    total = read(names[0], factors[-1].axes, wide)
    by = Nest(names[1], nest.axes, apply("mul", convert(shift.by, wide), total), wide, source=nest.source)
    sums = (read(names[1], nest.axes, wide), read(names[2], nest.axes, wide))
    result = Nest(nest.name, nest.axes, convert(apply("add", *sums), nest.dtype), nest.dtype, source=nest.source)
    open_axes = {x.axis for x in program.around(site.path)}
    j, body = site.nodes[1], list(program.at(site.path))
    subtrees = (factors, [by], values, [result])
    body[j : j + 1] = [node for nests in subtrees for node in _own_loops(program, nests, open_axes)]
    added = [*factors, by, *values, result]
    after = without(tuple(body), {site.read})
    made = program.with_nests(site.path, after, {site.read, *found.names}, added)
    return replace(made, terms=made.terms | {terms_of(names[0]), terms_of(names[2])})


def _own_loops(program: BlockProgram, nests: list[Nest], opened: Collection[str]) -> Body:
    """Returns the loops of one nest alone, or those of a sum after its terms."""
    last = nests[-1]
    node = loops_around(program.region, last, opened, (Do(last.name),))

    def doubled(of: Node) -> Body:
        if not isinstance(of, RangeLoop) or len(nests) == 1:
            return (of,)
        if of.axis == last.reduced[0].name:
            return (*replaced((of,), last.name, (Do(nests[0].name),)), of)
        return (replace(of, body=tuple(n for x in of.body for n in doubled(x))),)

    return doubled(node)


# --- rule 8: a scale that several sums read


def shared_operands(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields scales, or shifts, that several sums read, with the last of these."""
    scaled = {*scaled_operands(program, path)}
    for site, found, operand in _operands(program, path):
        if len(program.readers[operand.name]) > 1 and (site in scaled or shift_of(found, operand) is not None):
            yield site


def duplicate(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Gives a sum a map of its own in the place of one that other sums read, too."""
    readers, nests = program.readers[site.read], program.region.by_name
    if site.read in program.region.outputs:
        return Refusal(f"{site.read} is a result")
    operand = nests[site.read]
    for name in readers:
        sums = [sum_of(program, s) for s in (name, *program.readers.get(name, ())) if nests[s].is_reduction]
        found = next((s for s in sums if s is not None and s.terms.name == name), None)
        if found is None:
            return Refusal(f"{name}, which reads {site.read}, is no sum")
        is_scale = bool(factors_of(found, inlined(found.terms, operand)).factors)
        if not is_scale and (legality.stable or shift_of(found, operand) is None):
            return Refusal(f"nothing of {site.read} may leave the sum {found.nest.name}")
    return legality.legal(duplicated(program, site))


def duplicated(program: BlockProgram, site: Site) -> BlockProgram:
    """Returns the program with a copy of a map before a sum, which reads that."""
    found, nests = sum_of(program, site.nest), program.region.by_name
    assert found is not None
    operand = nests[site.read]
    copy = replace(operand, name=_fresh(program, operand.name))
    reads = [n for n in postorder(found.terms.body) if isinstance(n, Read) and n.tensor == operand.name]
    body = substitute(found.terms.body, {r: read(copy.name, r.indices, r.dtype) for r in reads})
    opened = {x.axis for x in program.around(site.path)}
    nodes, j = program.at(site.path), site.nodes[1]
    loops = loops_around(program.region, copy, opened, (Do(copy.name),))
    after = (*nodes[:j], loops, *nodes[j:])
    return program.with_nests(site.path, after, {found.terms.name}, [copy, replace(found.terms, body=body)])
