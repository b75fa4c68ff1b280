"""Arithmetic of bfloat16 between the loads and the stores of a kernel, carried out in float32.

A program in bfloat16 rounds after every operation. XLA drops the roundings between the operations of one kernel (its flag
`xla_allow_excess_precision`, on by default), and so do we: a conversion to bfloat16 and back costs as much as the arithmetic
between two of them. float32 has the range of bfloat16, so that nothing becomes infinite or zero which was not.

Some roundings stay:
- those that the program asks for, by a conversion from another type;
- those of operands of matrix products, of what the kernel stores, and of what it reads;
- those of values that a comparison (but for `is_finite`: the range is the same), a rounding to integers or the like depends on:
  `x == max(x)` needs equal values on both sides.
  A maximum of values that are rounded is the rounded maximum, so values may be rounded on one way and not on the other.
"""

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from pallasfuse.fusion.cost import product_operands
from pallasfuse.ir.expr import Apply, Const, Expr, Read, apply, const, convert, mul, postorder, read, with_args
from pallasfuse.ir.loop_program import Nest

NARROW, WIDE = "bfloat16", "float32"
CONDITION = "bfloat16 arithmetic between the loads and the stores of a kernel is float32 arithmetic"

_JUMPS = frozenset({"rem", "nextafter", "sign", "floor", "ceil", "round_even", "round_away"})
"""Functions whose results do not follow their arguments continuously."""


def is_allowed() -> bool:
    """Returns whether XLA drops roundings, too: users who tell it not to want those of their program."""
    flags = os.environ.get("XLA_FLAGS", "").lower()
    return not re.search(r"xla_allow_excess_precision=(false|0)\b", flags)


def widened(nests: Iterable[Nest], stored: Collection[str]) -> tuple[Nest, ...]:
    """Returns the nests of one kernel with their arithmetic of bfloat16 in float32; the same nests where there is none.

    nests: with maps inlined. stored: names of those whose values leave the kernel.
    """
    nests = tuple(nests)
    if not any(e.dtype == NARROW for n in nests for e in postorder(n.body)):
        return nests
    kept = frozenset(stored) | _looked_at(nests)
    wide = frozenset(n.name for n in nests if n.is_reduction and n.dtype == NARROW) - kept
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


def _is_exact(node: Expr) -> bool:
    """Do the arguments of an operation need the program's own rounding?"""
    if not isinstance(node, Apply) or not any(a.dtype == NARROW for a in node.args):
        return False
    if node.op == "convert":
        return node.dtype != WIDE
    return node.op in _JUMPS or (node.dtype != NARROW and node.op != "is_finite")


def _looked_at(nests: Iterable[Nest]) -> frozenset[str]:
    """The tensors on whose exact values something depends."""
    roots = [a for n in nests for node in postorder(n.body) if _is_exact(node) for a in node.args]
    return frozenset().union(*(r.tensors for r in roots)) if roots else frozenset()


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
            case Apply(op, args, dtype) if dtype == NARROW:
                return apply(op, *(self.done[a] for a in args), dtype=WIDE)
            case Apply(args=args):
                return with_args(node, tuple(self.done[a] for a in args))
        return node
