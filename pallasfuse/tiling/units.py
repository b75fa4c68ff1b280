"""A change of units: values that only exponentials look at are computed in units of 1 / log2(e), so that `exp` is `exp2`.

`exp(a - b)` with `b = max a` becomes `exp2(a' - b')`: every term, the maxima and frames made of them, and what a loop carries of
them, is measured in the new units. The factor disappears into constants that are there already. Equal values stay equal:
a difference is taken of values that have been rounded once (products are pinned, so that none is contracted into it), and a
maximum is one of the values it was taken of. That is why the factor is not multiplied into the sides of one difference only.

The family of names in new units is the largest one that is closed: their definitions are homogeneous (sums, choices, extrema and
multiples of scaled values), comparisons see both sides in the same units, no finite value becomes infinite, every
exponential that reads a member is rewritten, no member is added to a score in old units, with which it may cancel, and none is
stored as it is, but in a state (`TileProgram.later`), where what later becomes of it counts.
Other readers multiply by 1 / log2(e).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, apply, const, mul, postorder, read, select, with_args
from pallasfuse.ir.ops import COMPARISONS
from pallasfuse.ir.reducers import MAX, MIN
from pallasfuse.ir.tile_program import Contract, Let, Load, Loop, Reduce, Statement, Store, TileProgram, not_flat

LOG2_E = math.log2(math.e)
_LARGEST = float(np.finfo(np.float32).max)
_FACTORS = (2.0**-20, 2.0**20)
"""Constants that may absorb the factor: far from where a product of theirs is subnormal."""
_STEPS = frozenset({"sign", "floor", "ceil", "round_even", "round_away", "rem"})
_EXPONENTIALS = frozenset({"exp", "exp2"})
_LOGARITHMS = frozenset({"log", "log1p"})


def rewrite(program: TileProgram, coarse: frozenset[str]) -> TileProgram:
    """The same kernel with `exp` of coarse values as `exp2` wherever a closed family allows it.

    coarse: names of values that carry a rounding error in proportion to their size (`exponentials.coarse_values`). Programs with
    loops inside loops, or with buffers, stay as they are.
    """
    if not_flat(program.body) is not None:
        return program
    scaler = _Scaler(_family(program, coarse), coarse)
    if not scaler.family:
        return program
    body, later = (_block(b, scaler, program) for b in (program.body, program.later))
    return replace(program, body=body, later=later)


def _definitions(body: tuple[Statement, ...]) -> Iterator[tuple[str, Expr | None]]:
    """What every name is computed from; None for what is no choice among multiples of its operands."""
    for s in body:
        match s:
            case Let(name, _, value):
                yield name, value
            case Reduce(name, _, reducer, value):
                yield name, value if reducer in (MAX, MIN) else None
            case Load(name) | Contract(name):
                yield name, None
            case Loop(_, carries, segments):
                for c in carries:
                    yield c.name, c.init
                    yield c.name, read(c.next_name, c.axes, c.dtype)
                for segment in segments:
                    yield from _definitions(segment.body)
            case Store():
                pass


def _expressions(body: tuple[Statement, ...]) -> Iterator[tuple[str, Expr]]:
    """Every expression, with the name of what it defines."""
    for s in body:
        match s:
            case Let() | Reduce():
                yield s.name, s.value
            case Store():
                yield "", s.value
            case Contract():
                yield s.name, s.lhs
                yield s.name, s.rhs
            case Loop():
                yield from ((c.name, c.init) for c in s.carries)
                for segment in s.segments:
                    yield from _expressions(segment.body)
            case Load():
                pass


def _family(program: TileProgram, coarse: frozenset[str]) -> frozenset[str]:
    """The names that the exponentials need in new units; empty where that is not closed."""
    definitions: dict[str, list[Expr | None]] = {}
    for name, value in _definitions(program.followed):
        definitions.setdefault(name, []).append(value)
    statements = list(_expressions(program.followed))
    scores = _scores(program.followed)
    allowed = {n for n, values in definitions.items()
               if n in coarse and all(v is not None and v.dtype == "float32" for v in values)}  # fmt: skip
    while True:
        scaler = _Scaler(frozenset(allowed), coarse)
        refused = {n for n in allowed if any(v is None or scaler.scaled(v) is None for v in definitions[n])}
        for _, root in statements:
            scaler.plain(root)
        refused |= (scaler.refused | _cancelling(statements, allowed, scores)) & allowed
        if not refused:
            break
        allowed -= refused
    return _closure({n for u in scaler.rewritten for n in u.tensors & allowed}, definitions, allowed)


def _closure(names: set[str], definitions: Mapping[str, list[Expr | None]], allowed: set[str]) -> frozenset[str]:
    found, new = set(names), set(names)
    while new:
        new = {t for n in new for v in definitions[n] if v is not None for t in v.tensors & allowed} - found
        found |= new
    return frozenset(found)


def _outside(root: Expr, ops: frozenset[str]) -> frozenset[str]:
    """What an expression reads, but for the operands of some operations."""
    found: set[str] = set()
    seen: set[Expr] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen or (isinstance(node, Apply) and node.op in ops):
            continue
        seen.add(node)
        if isinstance(node, Read):
            found.add(node.tensor)
        stack.extend(node.args)
    return frozenset(found)


def _scores(body: tuple[Statement, ...]) -> frozenset[str]:
    """Names whose values are as large as products are: what is made of them other than by exponentials and logarithms."""
    found: set[str] = set()

    def visit(body: tuple[Statement, ...]) -> None:
        for s in body:
            match s:
                case Contract(name):
                    found.add(name)
                case Let(name, _, value) | Reduce(name, _, _, value) if (
                    _outside(value, _EXPONENTIALS | _LOGARITHMS | COMPARISONS) & found
                ):
                    found.add(name)
                case Loop(_, carries, segments):
                    for segment in segments:
                        visit(segment.body)
                    found.update(c.name for c in carries if c.next_name in found)

    before = -1
    while before != len(found):  # carried values reach the statements before them
        before = len(found)
        visit(body)
    return frozenset(found)


def _cancelling(statements: list[tuple[str, Expr]], family: set[str], scores: frozenset[str]) -> set[str]:
    """Members whose rounding to old units shows: they meet scores there, are compared in disguise, or are stored as they are."""
    behind = {n: {n} for n in family}
    refused: set[str] = set()
    for name, root in [*statements, *statements]:  # twice: what a loop carries reaches its first statements
        if name in family:
            continue
        reads = _outside(root, _EXPONENTIALS | COMPARISONS)
        members = set().union(*(behind.get(t, ()) for t in reads))
        nodes = [n for n in postorder(root) if isinstance(n, Apply)]
        if members and any(t in scores and t not in behind for t in reads):
            refused |= members
        if not name and not any(n.op in _LOGARITHMS for n in nodes):
            refused |= members
        for node in nodes:
            if node.op in COMPARISONS or is_step(node):
                refused |= set().union(*(behind[t] for t in node.tensors if t in behind and t not in family))
        if name and members:
            behind[name] = members
    return refused


def is_step(node: Apply) -> bool:
    return node.op in _STEPS or (node.op == "convert" and node.dtype.startswith("int"))


class _Scaler:
    """Expressions in old and new units, with the members of `family` in new ones."""

    def __init__(self, family: frozenset[str], coarse: frozenset[str]) -> None:
        self.family, self.coarse = family, coarse
        self.refused: set[str] = set()
        """Members that are read where new units would be wrong."""
        self.rewritten: list[Expr] = []
        """Arguments of the exponentials that become `exp2`."""
        self._plain: dict[Expr, Expr] = {}
        self._scaled: dict[Expr, Expr | None] = {}
        self._largest: dict[Expr, float] = {}

    def plain(self, root: Expr) -> Expr:
        """`root`, whose members are read as multiples of 1 / log2(e)."""
        self._visit(root)
        return self._plain[root]

    def scaled(self, root: Expr) -> Expr | None:
        """log2(e) times `root`; None where it is not a multiple of its members, or could overflow."""
        self._visit(root)
        return self._scaled[root]

    def _visit(self, root: Expr) -> None:
        for node in postorder(root):
            if node not in self._plain:
                _bound(node, self._largest)
                self._plain[node] = self._in_old_units(node)
                self._scaled[node] = self._in_new_units(node)

    def _in_old_units(self, node: Expr) -> Expr:
        match node:
            case Read(tensor) if tensor in self.family:
                return mul(node, const(1 / LOG2_E, "float32"))
            case Apply("exp", (u,), "float32") if u.tensors & self.coarse:
                argument = self._argument(u)
                if argument is not None:
                    self.rewritten.append(u)
                    return apply("exp2", argument)
                self.refused |= u.tensors & self.family
            case Apply(op, args) if op in COMPARISONS and node.tensors & self.family:
                scaled = [a if _is_invariant(a) else self._scaled[a] for a in args]
                compared = [a for a in scaled if a is not None]
                if len(compared) == len(args) and not any(isinstance(a, Const) and not _is_invariant(a) for a in args):
                    return apply(op, *compared, dtype=node.dtype)
                self.refused |= node.tensors & self.family
            case Apply() if is_step(node):
                self.refused |= node.tensors & self.family
        return with_args(node, tuple(self._plain[a] for a in node.args))

    def _argument(self, u: Expr) -> Expr | None:
        """Of an exponential: a difference that overflows is as good as a large one."""
        match u:
            case Apply("sub" | "add", (x, y)):
                left, right = self._scaled[x], self._scaled[y]
                if left is not None and right is not None:
                    return apply(u.op, left, right)
        return self._scaled[u]

    def _in_new_units(self, node: Expr) -> Expr | None:
        if node.dtype != "float32":
            return None
        if not node.tensors & (self.coarse | self.family):
            return self._multiple(node)  # as a whole: what cancels in it goes on cancelling
        match node:
            case Read(tensor) if tensor in self.family:
                return node
            case Apply("mul", (x, Const() as c)) | Apply("mul", (Const() as c, x)) if not x.tensors & self.family:
                return self._folded(x, float(c.value))
            case Apply("div", (x, Const(value))) if value and x.tensors & self.coarse and not x.tensors & self.family:
                return self._folded(x, 1 / float(value))
            case Apply("select", (p, x, y)):
                on_true, on_false = self._scaled[x], self._scaled[y]
                return None if on_true is None or on_false is None else _chosen(self._plain[p], on_true, on_false)
            case Apply("add" | "sub" | "neg" | "abs" | "max" | "min" as op, args):
                scaled = [self._scaled[a] for a in args]
                present = [a for a in scaled if a is not None]
                if (
                    op == "neg"
                    and isinstance(scaled[0], Apply)
                    and scaled[0].op == "mul"
                    and isinstance(scaled[0].args[1], Const)
                ):
                    return mul(scaled[0].args[0], const(-float(scaled[0].args[1].value), "float32"))
                sums = op in ("add", "sub") and sum(self._largest_scaled(a) for a in args) > _LARGEST
                return None if len(present) < len(args) or sums else apply(op, *present, dtype="float32")
        return None if node.tensors & self.family else self._multiple(node)

    def _multiple(self, node: Expr) -> Expr | None:
        """A factor of its own, for what holds no member; in a product, for the factor that varies less."""
        match node:
            case Const(value):
                scaled = float(np.float32(value)) * LOG2_E
                fits = _is_invariant(node) or abs(scaled) <= _LARGEST
                return const(scaled if math.isfinite(scaled) else value, "float32") if fits else None
            case Apply("mul", (x, Const(value))) | Apply("mul", (Const(value), x)) if (
                _FACTORS[0] < abs(value) < _FACTORS[1]
            ):
                return self._folded(x, float(value))
            case Apply("mul", (a, b)) if self._largest[node] * LOG2_E <= _LARGEST:
                few, many = sorted((self._plain[a], self._plain[b]), key=lambda e: len(e.axes))
                return mul(mul(few, const(LOG2_E, "float32")), many)
        return self._folded(node, 1.0)

    def _folded(self, x: Expr, factor: float) -> Expr | None:
        scaled = factor * LOG2_E
        if not _FACTORS[0] < abs(scaled) < _FACTORS[1] or self._largest[x] * abs(scaled) > _LARGEST:
            return None
        return mul(self._plain[x], const(scaled, "float32"))

    def _largest_scaled(self, node: Expr) -> float:
        return min(_LARGEST, self._largest[node] * LOG2_E)


def _bound(root: Expr, known: dict[Expr, float]) -> float:
    """What the absolute value of a number in old units does not exceed, if it is finite."""
    for node in postorder(root):
        if node not in known:
            known[node] = min(_bound_of(node, [known[a] for a in node.args]), _largest_of(node.dtype))
    return known[root]


def _bound_of(node: Expr, largest: list[float]) -> float:
    match node:
        case Const(value):
            return abs(float(value)) if math.isfinite(value) else 0.0
        case Index(axis):
            return float(axis.extent)
        case Apply("tanh" | "logistic" | "sin" | "cos" | "sign"):
            return 1.0
        case Apply("mul", _):
            return largest[0] * largest[1]
        case Apply("div", (_, Const(value))) if value:
            return largest[0] / abs(value)
        case Apply("add" | "sub", _):
            return largest[0] + largest[1]
        case Apply("neg" | "abs" | "convert", _):
            return largest[0]
        case Apply("max" | "min", _):
            return max(largest)
        case Apply("exp" | "exp2" as op, _):
            return float((2.0 if op == "exp2" else math.e) ** min(largest[0], 200.0))
        case Apply("select", _):
            return max(largest[1:])
    return math.inf


def _largest_of(dtype: str) -> float:
    if dtype in ("float16", "bfloat16", "float32"):
        return min(_LARGEST, dtypes.limits(dtype)[0])
    return 1.0 if dtype == "bool" else 2.0**64


def _is_invariant(node: Expr) -> bool:
    """The same number in all units."""
    return isinstance(node, Const) and (node.value == 0 or not math.isfinite(node.value))


_SMALL = 2.0**12
"""Magnitudes up to which one rounding of a product more or less is nothing to an exponential."""


def _small_product(node: Expr) -> tuple[Expr, float] | None:
    """(x, c) of a product with a constant c > 0 that may be contracted into a difference: all its values are small."""
    match node:
        case Apply("mul", (x, Const(c))) if 0 < c < math.inf and _bound(node, {}) <= _SMALL:
            return x, float(c)
    return None


def _chosen(predicate: Expr, on_true: Expr, on_false: Expr) -> Expr:
    """A choice; the factor of a small product comes last, where a difference takes it up."""
    small = _small_product(on_true)
    if small is not None and isinstance(on_false, Const) and _is_invariant(on_false):
        return mul(select(predicate, small[0], on_false), const(small[1], "float32"))
    return select(predicate, on_true, on_false)


def _block(body: tuple[Statement, ...], scaler: _Scaler, program: TileProgram) -> tuple[Statement, ...]:
    """The statements in new units. A product that a difference or a maximum is taken of becomes a pinned value."""
    result: list[Statement] = []
    pinned: dict[Expr, Expr] = {}

    def pin(product: Expr) -> Expr:
        if product not in pinned:
            axes = tuple(a for a in program.order if a in product.axes)
            name = f"{min(product.tensors)}.base2" + ("" if not pinned else f".{len(pinned)}")
            result.append(Let(name, axes, product, pinned=True))
            pinned[product] = read(name, axes, "float32")
        return pinned[product]

    def settle(root: Expr) -> Expr:
        done: dict[Expr, Expr] = {}
        for node in postorder(root):
            args = tuple(done[a] for a in node.args)
            match node:
                case Apply("exp2", (Apply("sub" | "add" as op, pair),)):
                    done[node] = apply("exp2", apply(op, *(pin(done[a]) if _is_product(a) else done[a] for a in pair)))
                case _:
                    done[node] = with_args(node, args)
        return done[root]

    def renewed(name: str, value: Expr) -> Expr:
        scaled = scaler.scaled(value) if name in scaler.family else scaler.plain(value)
        assert scaled is not None
        return settle(scaled)

    for s in body:
        match s:
            case Let():
                value = renewed(s.name, s.value)
                result.append(
                    replace(s, value=value, pinned=s.pinned or (s.name in scaler.family and _is_product(value)))
                )
            case Reduce():
                value = renewed(s.name, s.value)
                small = _small_product(value) if s.name in scaler.family else None
                if small is not None:
                    raw = f"{s.name}.raw"
                    result.append(replace(s, name=raw, value=small[0]))
                    result.append(Let(s.name, s.axes, mul(read(raw, s.axes, "float32"), const(small[1], "float32"))))
                    continue
                product = s.name in scaler.family and _is_product(value)
                result.append(replace(s, value=pin(value) if product else value))
            case Contract():
                result.append(replace(s, lhs=renewed("", s.lhs), rhs=renewed("", s.rhs)))
            case Store():
                result.append(replace(s, value=renewed("", s.value)))
            case Loop():
                carries = tuple(replace(c, init=renewed(c.name, c.init)) for c in s.carries)
                segments = tuple(replace(g, body=_block(g.body, scaler, program)) for g in s.segments)
                result.append(replace(s, carries=carries, segments=segments))
            case Load():
                result.append(s)
    return tuple(result)


def _is_product(node: Expr) -> bool:
    return isinstance(node, Apply) and node.op == "mul" and bool(node.tensors) and _small_product(node) is None
