"""The kernel of a schedule that the user has written (`FuseOptions.schedule`): the nests that its trees name, run as they say.

The kernel is one `Group` without folds, whose nests are all computed inside; the trees derive what they need. Everything that they
do not name is left to XLA.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pallasfuse import _compat
from pallasfuse.decisions import Grouping, Left, Phase, Placed
from pallasfuse.errors import InvalidProgramError, Refusal, ScheduleError, TargetError
from pallasfuse.fusion.candidate import as_store, unsupported
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.fusion.judging import Judge
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.region import region_of_group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import Do, Keep, Merge, RangeLoop, Tree, parse, renamed, walk
from pallasfuse.jaxpr_frontend import Converted, axes_of
from pallasfuse.lowering import assumptions, lower_on
from pallasfuse.pallas_backend import kernel_resources
from pallasfuse.phases import impossible
from pallasfuse.price.terms import NOTHING
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic
from pallasfuse.tiling.tree_values import Bounded


def scheduled(converted: Converted, text: str, target: Target, *, strict: bool = False) -> tuple[Grouping, Placed]:
    """The group of a schedule, and where it runs: on the first target in turn whose emitter runs trees.

    Raises:
      ScheduleError: the text cannot be read, names what the function does not have, or breaks a rule of trees.
      TargetError: no target runs trees, or none of them the operations.
    """
    program = deduplicate(converted.program)
    tree = _in_names_of(converted, program, parse(text))
    graph = Graph(program, strict=strict)
    group = _group(graph, tree, strict=strict)
    _refuse_waiting(graph, group)
    able = _able(target)
    for nest in (*group.inner, *group.outputs):
        lacking = unsupported(nest, able)
        if lacking is not None:
            raise TargetError(f"FuseOptions.schedule: {lacking}")
    schedule = Schedule((), group.rolled, group.rolled.extent, tree=tree)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
    try:
        folds = FoldsOnDemand(region_of_group(group, tensors), strict=strict)
    except InvalidProgramError as error:
        raise ScheduleError(f"FuseOptions.schedule breaks rule 3 (nests): {error}") from None
    bounded: list[Bounded] = []
    programs = lower_on(able, schedule, folds, bounded=bounded)
    if isinstance(programs, Refusal):
        raise ScheduleError(f"FuseOptions.schedule breaks {programs}")
    phases = tuple(Phase(arithmetic.rewrite_for(able, p), able) for p in programs)
    for phase in phases:
        problem = kernel_resources.beyond_shared_memory(phase.program, able)
        if problem is not None:
            raise ScheduleError(f"FuseOptions.schedule breaks rule 12 (space): {problem}")
        problem = impossible(phase)
        if problem is not None:
            raise ScheduleError(f"FuseOptions.schedule breaks rule 14 (target): {problem}")
    group = replace(group, conditions=tuple(folds.conditions), exceptions=(*folds.exceptions, *assumptions(bounded)))
    names = {n.name for n in (*group.inner, *group.outputs)}
    reductions = (n for n in converted.program.nests if isinstance(n, Nest) and n.is_reduction)
    left = tuple(Left(n.name, "the schedule does not name it", n.source) for n in reductions if n.name not in names)
    return Grouping((group,), left, (Judge(graph, able, lambda *_: NOTHING).replaced(group),)), Placed(
        schedule, phases, ()
    )


def _able(target: Target) -> Target:
    """The target, or the first that stands in for it, whose emitter runs trees."""
    candidate: Target | None = target
    while candidate is not None and not candidate.runs_trees:
        candidate = candidate.fallback
    if candidate is None:
        raise TargetError(f"FuseOptions.schedule: target {target.name!r} runs no schedules that are given")
    return candidate


def _in_names_of(converted: Converted, program: LoopProgram, tree: Tree) -> Tree:
    """The tree in the program's names.

    An axis is called by its letter or as a dimension of an argument (`q.1`), a nest by its name or as a result (`out`, or
    `out.0` of several): `explain` prints both. What is kept is an argument before it is a result.

    program: that of `converted`, in which reductions that are computed twice are copies of the first one.

    Raises:
      ScheduleError: a name is none, or stands for what no kernel computes.
    """
    axes = {a.name: a.name for d in program.definitions() for a in d.axes}
    axes |= {a.name: a.name for n in program.nests if isinstance(n, Nest) for a in n.reduced}
    dimensions = dict(_dimensions(converted, program))
    axes |= {name: found[0].name for name, found in dimensions.items() if len(found) == 1}
    results = {f"out.{n}": name for n, name in enumerate(converted.results) if isinstance(name, str)}
    results |= {"out": results["out.0"]} if len(converted.results) == len(results) == 1 else {}
    nests = {n.name: n.name for n in program.nests if isinstance(n, Nest)} | results
    kept = nests | {d.name: d.name for d in program.definitions() if not isinstance(d, Nest)}
    for kernel in tree:
        for _, node in walk(kernel.body):
            match node:
                case RangeLoop(axis) if axis not in axes:
                    raise _no_axis(axis, dimensions.get(axis), axes)
                case Do(name) | Merge(name):
                    _refuse_uncomputed(program, name, nests.get(name, name))
                    if name not in nests:
                        raise _nothing(name, nests)
                case Keep(name) if name not in kept:
                    raise _nothing(name, kept)
    found = renamed(tree, axes, nests, kept)
    _refuse_copies(converted, program, tree, found)
    return found


def _no_axis(name: str, dimension: tuple[Axis, ...] | None, known: Iterable[str]) -> ScheduleError:
    if dimension is None:
        return ScheduleError(f"FuseOptions.schedule: no axis is called {name}; there are {', '.join(known)}")
    why = f"is {len(dimension)} axes here: {', '.join(a.name for a in dimension)}"
    return ScheduleError(
        f"FuseOptions.schedule: the dimension {name} {why if dimension else 'has one element, and no axis'}"
    )


def _nothing(name: str, known: Iterable[str]) -> ScheduleError:
    return ScheduleError(f"FuseOptions.schedule: nothing is called {name}; there are {', '.join(known)}")


def _refuse_uncomputed(program: LoopProgram, written: str, name: str) -> None:
    """Refuses what XLA keeps for another reason than the schedule. written: the name in the schedule."""
    if any(t.name == name for t in program.inputs):
        raise ScheduleError(f"FuseOptions.schedule: {written} is the argument {name} itself: nothing computes it")
    external = next((n for n in program.nests if isinstance(n, External) and n.name == name), None)
    if external is not None:
        raise ScheduleError(f"FuseOptions.schedule: {written} cannot be in a kernel: {external.reason}")


def _refuse_copies(converted: Converted, program: LoopProgram, tree: Tree, found: Tree) -> None:
    """Refuses reductions that are computed twice where the first of both is not named. found: the tree in the program's names."""
    twice = {n.name for n in converted.program.nests if isinstance(n, Nest) and n.is_reduction}
    copies = (n for n in program.nests if isinstance(n, Nest) and not n.is_reduction and n.name in twice)
    first = {n.name: node.tensor for n in copies for node in _reads(n.body)}
    names = zip(_done(tree), _done(found), strict=True)
    done = set(_done(found))
    for written, name in names:
        if first.get(name, name) not in done:
            raise ScheduleError(f"FuseOptions.schedule: {written} is the same reduction as {first[name]}, which comes first: name "
                                f"{first[name]} where it is reduced, and {written}, if at all, as a copy of it")  # fmt: skip


def _done(tree: Tree) -> list[str]:
    """The nests that a tree computes or merges, in order."""
    return [n.nest for k in tree for _, n in walk(k.body) if isinstance(n, Do | Merge)]


def _dimensions(converted: Converted, program: LoopProgram) -> Iterator[tuple[str, tuple[Axis, ...]]]:
    """The axes of every dimension of the arguments, by names like `q.1`."""
    for tensor in program.inputs:
        shape = _compat.shape_of(converted.variable[tensor.name])
        for n, (_, axes) in enumerate(axes_of(shape, tensor.axes)):
            yield f"{tensor.name}.{n}", axes


def _refuse_waiting(graph: Graph, group: Group) -> None:
    """Refuses a kernel that reads what XLA computes from the kernel's own results: each would wait for the other.

    Raises:
      ScheduleError: naming what stands between.
    """
    own = {n.name for n in (*group.inner, *group.outputs)}
    for name in group.inputs:
        source = min(graph.ancestors.get(name, frozenset()) & own, key=graph.order.__getitem__, default=None)
        if source is None:
            continue
        reader = next(n.name for n in (*group.inner, *group.outputs) if name in n.reads)
        raise ScheduleError(f"FuseOptions.schedule: {reader} reads {name}, which the schedule leaves to XLA, and {name} is "
                            f"computed from {source}: the kernel would wait for itself. Name {name}, too, or leave out "
                            f"{reader}")  # fmt: skip


def _group(graph: Graph, tree: Tree, *, strict: bool) -> Group:
    """The nests of a tree, with maps that it does not name inlined."""
    named = dict.fromkeys(_done(tree))
    maps = frozenset(n for n in named if n in graph.nests and not graph.nests[n].is_reduction)
    bodies = graph.inlined(maps)
    inside = [replace(n, body=bodies[n.name]) for n in graph.nests.values() if n.name in named]
    if not any(n.is_reduction for n in inside):
        raise ScheduleError("FuseOptions.schedule: no nest in it is a reduction: XLA runs what is elementwise as well")
    wanted = frozenset(_read_outside(graph, frozenset(named), bodies))
    stored = [n for n in inside if n.name in wanted]
    outputs = tuple(as_store(n) if n.is_reduction else n for n in stored)
    inner = tuple(n for n in inside if n.is_reduction or n.name not in wanted)
    own = {n.name for n in inside}
    reads = frozenset().union(*(n.reads for n in inside)) - own
    return Group(
        "_".join(k.name for k in tree), _some_axis(inside, tree), (), (), inner, outputs,
        tuple(d.name for d in graph.program.definitions() if d.name in reads), strict=strict, source=inside[0].source,
    )  # fmt: skip


def _some_axis(nests: Iterable[Nest], tree: Tree) -> Axis:
    """The first reduced axis over which the tree loops, else the first reduced one."""
    reduced = [a for n in nests for a in n.reduced]
    looped = {n.axis for k in tree for _, n in walk(k.body) if isinstance(n, RangeLoop)}
    return next((a for a in reduced if a.name in looped), reduced[0])


def _read_outside(graph: Graph, named: frozenset[str], inlined: Mapping[str, Expr]) -> Iterator[str]:
    """The named nests that results, or what XLA computes, read."""
    yield from (n for n in graph.program.outputs if n in named)
    for node in graph.program.nests:
        if isinstance(node, External):
            for operand in node.operands:
                yield from _leaves(graph, operand, inlined, named)
        elif node.name not in named and (node.is_reduction or node.name in graph.outputs):
            yield from (n.tensor for n in _reads(inlined[node.name]) if n.tensor in named)


def _leaves(graph: Graph, name: str, inlined: Mapping[str, Expr], named: frozenset[str]) -> Iterator[str]:
    if name in named:
        yield name
    elif name in graph.nests and not graph.nests[name].is_reduction:
        yield from (n.tensor for n in _reads(inlined[name]) if n.tensor in named)


def _reads(body: Expr) -> Iterator[Read]:
    return (n for n in postorder(body) if isinstance(n, Read))
