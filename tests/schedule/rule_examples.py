"""Examples of the rules, and mutants: wrong versions that evaluation must tell from the right ones.

A mutant spoils what a rule makes of its example, or it makes that of a program on which the condition of the rule does not hold.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, add, apply, mul, postorder, read, rebuild, substitute, with_args
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.region import Region, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import Do, RangeLoop, parse
from pallasfuse.schedule import linearity, merging, recompute
from pallasfuse.schedule.block_program import BlockProgram, Body, Path, needed, replaced, without
from pallasfuse.schedule.rule import Site

M, K, N = (Axis(name, 4) for name in "mkn")
_TYPE = "float32"
_Step = Callable[[BlockProgram], BlockProgram]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong version of a rule, as one might write it by mistake."""

    name: str
    apply: Callable[[BlockProgram], BlockProgram]
    """Returns what it makes of a program."""
    example: Callable[[], BlockProgram] | None = None
    """Makes the program on which it shows; None: on the example of the rule."""


@dataclass
class _Region:
    """A region under construction."""

    inputs: list[Tensor] = field(default_factory=list)
    nests: list[Nest] = field(default_factory=list)

    def input(self, name: str, *axes: Axis) -> Expr:
        self.inputs.append(Tensor(name, axes, _TYPE))
        return read(name, axes, _TYPE)

    def map(self, name: str, axes: tuple[Axis, ...], body: Expr) -> Expr:
        self.nests.append(Nest(name, axes, body, _TYPE))
        return read(name, axes, _TYPE)

    def sum(self, name: str, axes: tuple[Axis, ...], over: Axis, body: Expr) -> Expr:
        self.nests.append(Nest(name, axes, body, _TYPE, (over,), SUM))
        return read(name, axes, _TYPE)

    def program(self, tree: str, *outputs: str, terms: str = "") -> BlockProgram:
        region = verify(Region(tuple(self.nests), tuple(self.inputs), outputs))
        return BlockProgram(region, parse(f"x {{ {tree} }}")[0].body, frozenset(terms.split()))


def _first(sites: Callable[[BlockProgram, Path], Iterator[Site]], program: BlockProgram) -> Site:
    """Returns the first site of a rule, in the outermost body that has one."""
    waiting: list[Path] = [()]
    while waiting:
        path = waiting.pop(0)
        site = next(sites(program, path), None)
        if site is not None:
            return site
        waiting += [(*path, n) for n, node in enumerate(program.at(path)) if isinstance(node, RangeLoop)]
    raise AssertionError  # every example has a site


# --- what mutants do


def _then(step: _Step, spoil: _Step) -> _Step:
    return lambda program: spoil(step(program))


def _with_nest(name: str, change: Callable[[Expr], Expr]) -> _Step:
    """Changes the body of a nest."""

    def changed(program: BlockProgram) -> BlockProgram:
        nests = (replace(n, body=change(n.body)) if n.name == name else n for n in program.region.nests)
        return replace(program, region=replace(program.region, nests=tuple(nests)))

    return changed


def _operation(op: str, by: str) -> Callable[[Expr], Expr]:
    """Puts one operation in the place of another."""

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        return apply(by, *args) if isinstance(node, Apply) and node.op == op else with_args(node, args)

    return lambda body: rebuild(body, step)


def _reads(tensor: str, *axes: Axis, of: str = "") -> Callable[[Expr], Expr]:
    """Reads a tensor at other axes, or another tensor in its place."""

    def change(body: Expr) -> Expr:
        found = [n for n in postorder(body) if isinstance(n, Read) and n.tensor == tensor]
        return substitute(body, {n: read(of or tensor, axes or n.indices, n.dtype) for n in found})

    return change


def _in_first_loop(change: Callable[[Body], Body]) -> _Step:
    def changed(program: BlockProgram) -> BlockProgram:
        n = next(n for n, node in enumerate(program.body) if isinstance(node, RangeLoop))
        return program.with_body((n,), change(program.at((n,))))

    return changed


def _backwards(body: Body) -> Body:
    return tuple(reversed(body))


def _done_twice(name: str) -> _Step:
    return lambda program: replace(program, body=replaced(program.body, name, (Do(name), Do(name))))


def _never_done(name: str) -> _Step:
    return lambda program: replace(program, body=without(program.body, {name}))


# --- rules 1 and 2


def loops_in_a_row() -> BlockProgram:
    """Makes two loops over rows, of which the second one reads the first."""
    r = _Region()
    a = r.map("a", (M, K), apply("exp", r.input("x", M, K)))
    r.sum("b", (M,), K, mul(a, a))
    return r.program("m:1 k:2 ( a ) m:1 k:1 ( b )", "b")


def sibling_loops() -> BlockProgram:
    """Makes two loops over rows that read the same tensor."""
    r = _Region()
    x = r.input("x", M, K)
    r.sum("a", (M,), K, x)
    r.sum("b", (M,), K, mul(x, x))
    return r.program("m:1 k:2 ( a ) m:1 k:2 ( b )", "a", "b")


def _something_between() -> BlockProgram:
    """Makes two loops, and between them a sum over all of the first one that the second one reads."""
    r = _Region()
    x = r.input("x", K)
    a = r.map("a", (K,), apply("exp", x))
    s = r.sum("s", (), K, a)
    r.map("b", (K,), add(mul(x, a), s))
    return r.program("k:1 ( a ) k:1 ( s ) k:1 ( b )", "b")


def _sum_before() -> BlockProgram:
    """Makes a loop that sums, and one over the same axis that reads the sum."""
    r = _Region()
    x = r.input("x", M, K)
    s = r.sum("s", (M,), K, x)
    r.map("b", (M, K), mul(x, s))
    return r.program("m:1 ( k:1 ( s ) k:1 ( b ) )", "b")


def _merge(program: BlockProgram) -> BlockProgram:
    return merging.merged(program, _first(merging.loops_in_a_row, program))


def _merge_siblings(program: BlockProgram) -> BlockProgram:
    return merging.merged(program, _first(merging.sibling_loops, program))


def _merge_ends(program: BlockProgram) -> BlockProgram:
    return merging.merged(program, Site((), (0, 2)))


MERGED = (
    Mutant("the second loop stands first", _then(_merge, _in_first_loop(_backwards))),
    Mutant("past what is computed from the first loop", _merge_ends, _something_between),
    Mutant("before the sum of the first loop is finished", _merge, _sum_before),
    Mutant("the first loop is lost", _then(_merge, _never_done("a"))),
)
SIBLINGS = (
    Mutant("the second loop is lost", _then(_merge_siblings, _never_done("b"))),
    Mutant("the second loop adds its terms twice", _then(_merge_siblings, _done_twice("b"))),
    Mutant("past what is computed from the first loop", _merge_ends, _something_between),
    Mutant("before the sum of the first loop is finished", _merge_siblings, _sum_before),
)


# --- rule 3


def terms_and_sum() -> BlockProgram:
    """Makes products, and loops that sum them."""
    r = _Region()
    t = r.map("t", (M, N, K), mul(r.input("x", M, K), r.input("y", K, N)))
    r.sum("s", (M, N), K, t)
    return r.program("m:2 n:2 ( k:2 ( t ) k:2 ( s ) )", "s", terms="t")


def _terms_read_twice() -> BlockProgram:
    """Makes terms that are summed, and that another nest reads."""
    r = _Region()
    t = r.map("t", (M, K), apply("exp", r.input("x", M, K)))
    r.map("b", (M, K), mul(t, r.sum("s", (M,), K, t)))
    return r.program("m:2 ( k:2 ( t ) k:2 ( s ) k:2 ( b ) )", "b", terms="t")


def _sum_there(program: BlockProgram) -> BlockProgram:
    return merging.reduced_there(program, _first(merging.terms_and_sums, program))


def _sum_there_always(program: BlockProgram) -> BlockProgram:
    """Keeps the terms in the region, which nothing computes any more."""
    made = _sum_there(program)
    return made.with_nests((), made.body, {"t"}, [program.region.by_name["t"]])


SUMMED = (
    Mutant("the factors of terms are added", _then(_sum_there, _with_nest("s", _operation("mul", "add")))),
    Mutant("terms are read along another axis", _then(_sum_there, _with_nest("s", _reads("y", N, K)))),
    Mutant("terms are added twice", _then(_sum_there, _done_twice("s"))),
    Mutant("terms that another nest reads", _sum_there_always, _terms_read_twice),
)


# --- rule 4


def scaled_product() -> BlockProgram:
    """Makes a product of a matrix with scaled rows."""
    r = _Region()
    p = r.map("p", (M, K), mul(r.input("c", M), r.input("a", M, K)))
    r.sum("y", (M, N), K, mul(p, r.input("b", K, N)))
    return r.program("m:2 ( k:2 ( p ) n:1 k:2 ( y ) )", "y")


def _scale_read_twice() -> BlockProgram:
    """Makes a product of a matrix with scaled rows, which is a result as well."""
    made = scaled_product()
    return replace(made, region=replace(made.region, outputs=("y", "p")))


def _scale(program: BlockProgram) -> BlockProgram:
    return linearity.scaled_after(program, _first(linearity.scaled_operands, program))


def _keeping(name: str, step: _Step) -> _Step:
    """Keeps a nest in the region that nothing computes any more."""

    def kept(program: BlockProgram) -> BlockProgram:
        made = step(program)
        return made.with_nests((), made.body, {name}, [program.region.by_name[name]])

    return kept


SCALED = (
    Mutant("divides by the scale", _then(_scale, _with_nest("y", _operation("mul", "div")))),
    Mutant("the scale of columns", _then(_scale, _with_nest("y", _reads("c", N)))),
    Mutant("the scale is lost", _then(_scale, _with_nest("y", lambda body: body.args[0]))),
    Mutant("scaled before and after", _then(_scale, _with_nest("y", lambda body: mul(body, body.args[1])))),
    Mutant("a scaled matrix that is a result", _keeping("p", _scale), _scale_read_twice),
)


# --- rule 5


def shifted_product() -> BlockProgram:
    """Makes a product of a matrix with shifted rows."""
    r = _Region()
    p = r.map("p", (M, K), add(r.input("a", M, K), apply("tanh", r.input("c", M))))
    r.sum("y", (M, N), K, mul(p, r.input("b", K, N)))
    return r.program("m:2 ( k:2 ( p ) n:1 k:2 ( y ) )", "y")


def _shift_read_twice() -> BlockProgram:
    """Makes a product of a matrix with shifted rows, which is a result as well."""
    made = shifted_product()
    return replace(made, region=replace(made.region, outputs=("y", "p")))


def _shift(program: BlockProgram) -> BlockProgram:
    site = _first(linearity.shifted_operands, program)
    found = linearity.sum_of(program, site.nest)
    assert found is not None
    shift = linearity.shift_of(found, program.region.by_name[site.read])
    assert shift is not None
    return linearity.shifted_after(program, site, found, shift)


SHIFTED = (
    Mutant("subtracts the shift", _then(_shift, _with_nest("y", _operation("add", "sub")))),
    Mutant("the sum of rows for that of columns", _then(_shift, _with_nest("y_factors", _reads("b", N, K)))),
    Mutant("the shift of columns", _then(_shift, _with_nest("y_shift", _reads("c", N)))),
    Mutant("the shift once for all terms", _then(_shift, _with_nest("y_shift", lambda body: body.args[0]))),
    Mutant("a shifted matrix that is a result", _keeping("p", _shift), _shift_read_twice),
)


# --- rules 6 and 7


def extendable() -> BlockProgram:
    """Makes a loop that computes what each trip of another one reads."""
    r = _Region()
    a = r.map("a", (K,), apply("exp", r.input("x", K)))
    r.sum("b", (N,), K, mul(a, r.input("y", K, N)))
    return r.program("k:2 ( a ) n:1 ( k:2 ( b ) )", "b")


def _read_from_it() -> BlockProgram:
    """Makes a loop that reads what all trips of another one compute."""
    r = _Region()
    y = r.input("y", K, N)
    b = r.sum("b", (N,), K, y)
    r.sum("c", (K,), N, mul(y, b))
    return r.program("n:1 ( k:2 ( b ) ) k:2 ( n:1 ( c ) )", "c")


def _reduced_by_it() -> BlockProgram:
    """Makes a loop whose trips add to one sum."""
    r = _Region()
    a = r.map("a", (K,), apply("exp", r.input("x", K)))
    b = r.sum("b", (N,), K, mul(a, r.input("y", K, N)))
    r.sum("c", (), N, mul(b, b))
    return r.program("k:2 ( a ) n:1 ( k:2 ( b ) c )", "c")


def _moved(program: BlockProgram) -> tuple[Site, set[int]]:
    site = _first(recompute.extendable, program)
    return site, needed(program, program.body, site.nodes, range(max(site.nodes))) - {site.nodes[0]}


def _extend(program: BlockProgram) -> BlockProgram:
    return recompute.extended(program, *_moved(program))


def _extend_always(program: BlockProgram) -> BlockProgram:
    loop, other = program.body
    assert isinstance(loop, RangeLoop)
    return replace(program, body=(recompute.sunk((other,), loop),))


def _peel(program: BlockProgram) -> BlockProgram:
    return recompute.peeled(program, *_moved(program))


def _from_the_third(program: BlockProgram) -> BlockProgram:
    first, rest = program.body
    assert isinstance(rest, RangeLoop)
    return replace(program, body=(first, replace(rest, begin=2)))


EXTENDED = (
    Mutant("what it reads comes last", _then(_extend, _in_first_loop(_backwards))),
    Mutant("what it reads is lost", _then(_extend, _never_done("a"))),
    Mutant("what it reads is added twice", _then(_extend, _done_twice("b"))),
    Mutant("over what is computed from it", _extend_always, _read_from_it),
)
PEELED = (
    Mutant("the second trip is lost", _then(_peel, _from_the_third)),
    Mutant("the first trip is lost", _then(_peel, lambda p: replace(p, body=p.body[1:]))),
    Mutant("what the first trip reads comes last", _then(_peel, _in_first_loop(_backwards))),
    Mutant("a sum of all trips", _peel, _reduced_by_it),
)


# --- rule 8


def shared_scale() -> BlockProgram:
    """Makes two products of one matrix with scaled rows."""
    r = _Region()
    p = r.map("p", (M, K), mul(r.input("c", M), r.input("a", M, K)))
    r.sum("y", (M, N), K, mul(p, r.input("b", K, N)))
    r.sum("z", (M, N), K, mul(p, r.input("d", K, N)))
    return r.program("m:2 ( k:2 ( p ) n:1 k:2 ( y ) n:1 k:2 ( z ) )", "y", "z")


def _duplicate(program: BlockProgram) -> BlockProgram:
    return linearity.duplicated(program, _first(linearity.shared_operands, program))


DUPLICATED = (
    Mutant("the copy adds", _then(_duplicate, _with_nest("p_2", _operation("mul", "add")))),
    Mutant("the copy scales columns", _then(_duplicate, _with_nest("p_2", _reads("c", K)))),
    Mutant("the copy stands after its reader", _then(_duplicate, _in_first_loop(_backwards))),
    Mutant("the first map is lost", _then(_duplicate, _never_done("p"))),
)


# --- rule 9


def maps_in_a_row() -> BlockProgram:
    """Makes a map of a map."""
    r = _Region()
    a = r.map("a", (M,), apply("exp", r.input("x", M)))
    r.map("b", (M,), apply("tanh", a))
    return r.program("m:1 ( a b )", "b")


def _map_read_twice() -> BlockProgram:
    """Makes a map of a map that is a result as well."""
    made = maps_in_a_row()
    return replace(made, region=replace(made.region, outputs=("a", "b")))


def _compose(program: BlockProgram) -> BlockProgram:
    return merging.composed(program, _first(merging.maps_in_a_row, program))


COMPOSED = (
    Mutant("the first map is lost", _then(_compose, _with_nest("b", lambda body: apply("tanh", body.args[0].args[0])))),
    Mutant(
        "in the other order",
        _then(_compose, _with_nest("b", lambda body: apply("exp", apply("tanh", body.args[0].args[0])))),
    ),
    Mutant("a map that is a result", _keeping("a", _compose), _map_read_twice),
)


EXAMPLES: dict[int, tuple[Callable[[], BlockProgram], tuple[Mutant, ...]]] = {
    1: (loops_in_a_row, MERGED),
    2: (sibling_loops, SIBLINGS),
    3: (terms_and_sum, SUMMED),
    4: (scaled_product, SCALED),
    5: (shifted_product, SHIFTED),
    6: (extendable, EXTENDED),
    7: (extendable, PEELED),
    8: (shared_scale, DUPLICATED),
    9: (maps_in_a_row, COMPOSED),
}
"""The example and the mutants of every rule, by its number."""
