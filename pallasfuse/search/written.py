"""A loop program as a sequence of operators, and the vocabulary that it is written in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pallasfuse.errors import Refusal
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder, rename_axes, substitute
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.reducers import SUM, Reducer
from pallasfuse.search.operators import (
    HOLE,
    WIDE,
    Contract,
    Input,
    Join,
    Map,
    Operators,
    Reduce,
    Written,
    typed,
)


class _Unreadable(Exception):
    """A part of a program is no operator."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What programs are written with: functions of one tensor, operations on two, and folds over sets of axes."""

    functions: tuple[Expr, ...]
    operations: tuple[str, ...]
    folds: tuple[tuple[Reducer, frozenset[Axis]], ...]

    @staticmethod
    def of(written: Written) -> "Vocabulary":
        """The vocabulary of a program: its functions, operations and folds, with sums, products and quotients."""
        rows = [written.table.rows[n] for n in written.operators]
        functions = dict.fromkeys(r.function for r in rows if isinstance(r, Map))
        operations = dict.fromkeys(("add", "mul", "div", *(r.operation for r in rows if isinstance(r, Join))))
        folds = dict.fromkeys((r.reducer, r.axes) for r in rows if isinstance(r, Reduce))
        folds |= dict.fromkeys((SUM, r.axes) for r in rows if isinstance(r, Contract))
        return Vocabulary(tuple(functions), tuple(operations), tuple(folds))


def written(program: LoopProgram) -> Written | Refusal:
    """The operators of a program with one output, or why it has none: it reads positions or booleans, or XLA computes a part."""
    if len(program.outputs) != 1:
        return Refusal(f"the program has {len(program.outputs)} outputs: variants are made of programs with one")
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    root = nests.get(program.outputs[0])
    if root is None:
        return Refusal(f"the output {program.outputs[0]!r} is not computed by a loop nest")
    axes = [a for t in program.inputs for a in t.axes] + [a for n in nests.values() for a in (*n.axes, *n.reduced)]
    reading = _Reading(nests, _bodies(nests), Operators(tuple(dict.fromkeys(axes))))
    try:
        output = reading.nest(root.name, root.axes)
    except _Unreadable as error:
        return Refusal(str(error))
    precisions = {n.precision for n in nests.values() if n.precision is not None}
    return Written(reading.table, output, program, root, next(iter(sorted(precisions)), None))


@dataclass
class _Reading:
    """Adds the operators that nests are made of to a table."""

    nests: dict[str, Nest]
    bodies: dict[str, Expr]
    """Over inputs and reductions."""
    table: Operators
    _known: dict[Expr, int] = field(default_factory=dict)

    def nest(self, name: str, indices: tuple[Axis, ...]) -> int:
        """The operator that computes a nest's elements at some positions."""
        nest = self.nests[name]
        renaming = {a: b for a, b in zip(nest.axes, indices, strict=True) if a != b}
        if len(set(indices)) < len(indices) or not set(renaming.values()).isdisjoint(nest.reduced):
            raise _Unreadable(
                f"{name!r} is read at {', '.join(map(str, indices))}, along axes that it is not computed over"
            )
        body = rename_axes(self.bodies[name], renaming)
        if nest.reducer is None:
            return self.expression(body)
        axes = frozenset(nest.reduced)
        match body:
            case Apply("mul" | "square") if nest.reducer == SUM:
                left, right = self.expression(body.args[0]), self.expression(body.args[-1])
                if axes <= self.table.axes[left] & self.table.axes[right]:
                    return self.table.number(Contract(axes, left, right))
        operand = self.expression(body)
        if not axes <= self.table.axes[operand]:
            raise _Unreadable(f"{name!r} is reduced over axes along which its terms do not vary")
        return self.table.number(Reduce(nest.reducer, axes, operand))

    def expression(self, root: Expr) -> int:
        """The operator that computes an expression."""
        if root not in self._known:
            self._known[root] = self._expression(root)
        return self._known[root]

    def _expression(self, root: Expr) -> int:
        if isinstance(root, Read):
            if root.tensor in self.nests:
                return self.nest(root.tensor, root.indices)
            if len(root.axes) < len(root.indices):
                raise _Unreadable(f"{root} is a diagonal")
            return self.table.number(Input(root))
        core = _core(root)
        if core is not root:
            return self.table.number(Map(substitute(root, {core: HOLE}), self.expression(core)))
        match root:
            case Apply("square", (a,)):
                return self.table.number(Join("mul", self.expression(a), self.expression(a)))
            case Apply(op, (a, b)) if OPS[op].kind == "arithmetic":
                return self.table.number(Join(op, self.expression(a), self.expression(b)))
        raise _Unreadable(f"{root} is no operation on one or two tensors of real numbers")


def _bodies(nests: Mapping[str, Nest]) -> dict[str, Expr]:
    """The bodies of nests, in the order of the program, over what is no map: real numbers."""
    found: dict[str, Expr] = {}
    for nest in nests.values():
        body = typed(nest.body, WIDE)
        inlined: dict[Expr, Expr] = {}
        for node in postorder(body):
            if isinstance(node, Read) and node.tensor in nests and nests[node.tensor].reducer is None:
                renaming = {a: b for a, b in zip(nests[node.tensor].axes, node.indices, strict=True) if a != b}
                inlined[node] = rename_axes(found[node.tensor], renaming)
        found[nest.name] = substitute(body, inlined)
    return found


def _core(root: Expr) -> Expr:
    """The part of an expression of which it is a function of real numbers: itself where it combines several.

    A square is a product of two.
    """
    if isinstance(root, Read):
        return root
    reads = [n for n in postorder(root) if isinstance(n, Read)]
    if any(isinstance(n, Index) or (isinstance(n, Apply) and OPS[n.op].kind != "arithmetic") for n in postorder(root)):
        return root
    match root:
        case Apply("mul", (a, b)) if a is b:
            return root
        case Apply("square"):
            return root
        case Apply(_, args) if len(reads) > 1:
            own = [a for a in args if not isinstance(a, Const)]
            return _core(own[0]) if len(own) == 1 else root
    return reads[0] if len(reads) == 1 else root
