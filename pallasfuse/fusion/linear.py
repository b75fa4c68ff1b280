"""Linear forms: an expression as a sum of constant multiples of atoms. Used to bound exponents."""

from collections.abc import Set as AbstractSet

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr


def linear_form(root: Expr, atoms: AbstractSet[Expr]) -> dict[Expr | None, float]:
    """Coefficients of `root` over atoms (None: the constant). Members of `atoms` are never taken apart."""
    total: dict[Expr | None, float] = {}
    stack: list[tuple[Expr, float]] = [(root, 1.0)]
    while stack:
        node, k = stack.pop()
        atom: Expr | None = node
        if node not in atoms:
            match node:
                case Const(value):
                    atom, k = None, k * float(value)
                case Apply("add", (a, b)):
                    stack += [(a, k), (b, k)]
                    continue
                case Apply("sub", (a, b)):
                    stack += [(a, k), (b, -k)]
                    continue
                case Apply("neg", (a,)):
                    stack.append((a, -k))
                    continue
                case Apply("mul", (a, Const(value))) | Apply("mul", (Const(value), a)):
                    stack.append((a, k * float(value)))
                    continue
                case Apply("div", (a, Const(value))) if value:
                    stack.append((a, k / float(value)))
                    continue
                case Apply("convert", (a,), dtype) if dtypes.is_float(dtype) and dtypes.is_float(a.dtype):
                    stack.append((a, k))
                    continue
        total[atom] = total.get(atom, 0.0) + k
    return {atom: k for atom, k in total.items() if k}
