"""Linear forms: an expression as a sum of constant multiples of atoms. Used to bound exponents."""

from collections.abc import Set as AbstractSet

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, postorder


def linear_form(root: Expr, atoms: AbstractSet[Expr]) -> dict[Expr | None, float]:
    """Coefficients of `root` over atoms (None: the constant). Members of `atoms` are never taken apart."""
    total: dict[Expr | None, float] = {}
    coefficient = {root: 1.0}
    for node in reversed(list(postorder(root))):  # users before their arguments: a shared part is taken apart once
        k = coefficient.pop(node, 0.0)
        if not k:
            continue
        atom: Expr | None = node
        parts: tuple[tuple[Expr, float], ...] = ()
        if node not in atoms:
            match node:
                case Const(value):
                    atom, k = None, k * float(value)
                case Apply("add", (a, b)):
                    parts = (a, k), (b, k)
                case Apply("sub", (a, b)):
                    parts = (a, k), (b, -k)
                case Apply("neg", (a,)):
                    parts = ((a, -k),)
                case Apply("mul", (a, Const(value))) | Apply("mul", (Const(value), a)):
                    parts = ((a, k * float(value)),)
                case Apply("div", (a, Const(value))) if value:
                    parts = ((a, k / float(value)),)
                case Apply("convert", (a,), dtype) if dtypes.is_float(dtype) and dtypes.is_float(a.dtype):
                    parts = ((a, k),)
        for part, times in parts:
            coefficient[part] = coefficient.get(part, 0.0) + times
        if not parts:
            total[atom] = total.get(atom, 0.0) + k
    return {atom: k for atom, k in total.items() if k}
