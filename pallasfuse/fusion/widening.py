"""Arithmetic of bfloat16 between the loads and the stores of a kernel, carried out in float32.

A program in bfloat16 rounds after every operation. XLA drops the roundings between the operations of one kernel (its flag
`xla_allow_excess_precision`, on by default), and so do we: a conversion to bfloat16 and back costs as much as the arithmetic
between two of them. float32 has the range of bfloat16, so that nothing becomes infinite or zero which was not.

Some roundings stay: those that the program asks for, by a conversion from another type; those of operands of matrix products, of
what the kernel stores, and of what it reads.

A kernel stays as it is where a comparison, a rounding to integers or the like depends on a value that it computes: `x == max(x)`
needs equal values on both sides, wherever they are computed. `is_finite` is none of these: the range is the same.
"""

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from pallasfuse.fusion.cost import product_operands
from pallasfuse.ir.expr import Apply, Const, Expr, Read, apply, const, convert, mul, postorder, read, with_args
from pallasfuse.ir.loop_program import Nest

NARROW, WIDE = "bfloat16", "float32"
CONDITION = "bfloat16 arithmetic between the loads and the stores of a kernel is float32 arithmetic"

EXCEPTION = (
    "differences of bfloat16 values under a quotient, root or logarithm: their rounding decides whether they vanish"
)

_JUMPS = frozenset({"rem", "nextafter", "sign", "floor", "ceil", "round_even", "round_away"})
"""Functions whose results do not follow their arguments continuously."""
_EDGED = frozenset(
    {"log", "log1p", "sqrt", "rsqrt", "pow", "integer_pow", "atanh", "acosh", "asin", "acos", "erf_inv", "div"}
)
"""Functions that are infinite or NaN beside numbers where they are not, by their last argument; powers by their first."""


def is_allowed() -> bool:
    """Returns whether XLA drops roundings, too: users who tell it not to want those of their program."""
    flags = re.findall(r"xla_allow_excess_precision(?:=(\w+))?", os.environ.get("XLA_FLAGS", "").lower())
    return not flags or flags[-1] not in ("false", "0")


def compared(bodies: Iterable[Expr]) -> frozenset[str]:
    """Returns the tensors on whose exact values something in a program depends. bodies: of its nests, with maps inlined."""
    roots = [a for node in postorder(*bodies) if _is_exact(node) for a in node.args if a.dtype == NARROW]
    return frozenset().union(*(r.tensors for r in roots)) if roots else frozenset()


def widened(nests: Iterable[Nest], stored: Collection[str], compared: Collection[str]) -> tuple[Nest, ...]:
    """Returns the nests of one kernel with their arithmetic of bfloat16 in float32; the same nests where nothing is to be done.

    nests: with maps inlined. stored: names of those whose values leave the kernel. compared: as found in the whole program.
    """
    nests = tuple(nests)
    own = frozenset(n.name for n in nests if n.is_reduction)
    narrow = any(_is_narrow(n.body) for n in nests)
    if not narrow or own & frozenset(compared) or any(_compares(n.body) for n in nests):
        return nests
    wide = frozenset(n.name for n in nests if n.is_reduction and n.dtype == NARROW) - frozenset(stored)
    rewrite = _Rewrite(wide)
    result = []
    for nest in nests:
        if (operands := product_operands(nest)) is not None:
            body = mul(*map(rewrite.rounded, operands))
        elif nest.is_reduction:
            body = rewrite.made(nest.body)
        else:
            body = rewrite.rounded(nest.body)
        result.append(replace(nest, body=body, dtype=WIDE if nest.name in wide else nest.dtype))
    return tuple(result)


@lru_cache(1 << 12)
def _is_narrow(body: Expr) -> bool:
    """Is something in an expression a bfloat16?"""
    return any(e.dtype == NARROW for e in postorder(body))


def may_cancel(nests: Iterable[Nest]) -> bool:
    """Returns whether roundings decide if something is finite: a function with an edge is taken of a difference of bfloat16."""
    for node in (e for n in nests for e in postorder(n.body)):
        if isinstance(node, Apply) and node.op in _EDGED:
            looked_at = node.args[0 if "pow" in node.op else -1]
            if any(isinstance(e, Apply) and e.op in ("add", "sub") and e.dtype == NARROW for e in postorder(looked_at)):
                return True
    return False


def _is_exact(node: Expr) -> bool:
    """Do the arguments of an operation need the program's own rounding?"""
    if not isinstance(node, Apply) or not any(a.dtype == NARROW for a in node.args):
        return False
    if node.op == "convert":
        return node.dtype != WIDE
    return node.op in _JUMPS or (node.dtype != NARROW and node.op != "is_finite")


@lru_cache(1 << 12)
def _compares(body: Expr) -> bool:
    """Does something need the exact value of what is computed in an expression? What is only read has one value for all."""
    return any(
        isinstance(a, Apply) and a.dtype == NARROW for node in postorder(body) if _is_exact(node) for a in node.args
    )


@dataclass(slots=True)
class _Rewrite:
    """Rewrites expressions. reductions: names of those whose values are float32 now."""

    reductions: frozenset[str]
    done: dict[Expr, Expr] = field(default_factory=dict)

    def made(self, root: Expr) -> Expr:
        """Returns a value of bfloat16 in float32, not rounded; one of another type over widened arguments."""
        for node in postorder(root):
            if node not in self.done:
                self.done[node] = self._step(node)
        return self.done[root]

    def rounded(self, root: Expr) -> Expr:
        """Returns a value that is rounded once, as an operand of a matrix product or what is stored."""
        match root:
            case Apply("convert", (x,), dtype) if x.dtype == NARROW and dtype == WIDE:
                return convert(self.rounded(x), WIDE)
        value = self.made(root)
        if root.dtype != NARROW:
            return value
        match value:
            case Apply("convert", (x,)) if x.dtype == NARROW:
                return x
        return convert(value, NARROW)

    def _step(self, node: Expr) -> Expr:
        if _is_exact(node):
            return convert(node, WIDE) if node.dtype == NARROW else node
        match node:
            case Const(value, dtype) if dtype == NARROW:
                return const(value, WIDE)
            case Read(tensor, indices, dtype) if dtype == NARROW:
                return read(tensor, indices, WIDE) if tensor in self.reductions else convert(node, WIDE)
            case Apply("convert", (x,), dtype) if dtype == NARROW:
                return convert(convert(self.done[x], NARROW), WIDE)  # asked for
            case Apply("convert", (x,), dtype) if dtype == WIDE and x.dtype == NARROW:
                return self.done[x]
            case Apply("bitcast", (x,), dtype) if dtype == NARROW:
                return convert(apply("bitcast", self.done[x], dtype=NARROW), WIDE)
            case Apply(op, args, dtype) if dtype == NARROW:
                return apply(op, *(self.done[a] for a in args), dtype=WIDE)
            case Apply(args=args):
                return with_args(node, tuple(self.done[a] for a in args))
        return node
