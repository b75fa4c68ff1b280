"""A body with its opaque parts and frames renamed by order of appearance, so that equal shapes are derived once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Const, Expr, Index, Read, postorder, read, substitute
from pallasfuse.ir.fold import OLD
from pallasfuse.repair.laurent import Role, Var
from pallasfuse.repair.signs import Sign, infer_sign


@dataclass(frozen=True, slots=True)
class Canonical:
    """`body` over placeholders: c0, c1 ... opaque, r0, r1 ... frames, s0, s1 ... invariants."""

    body: Expr
    roles: Mapping[Expr, Role]
    signs: Mapping[Expr, Sign]
    originals: Mapping[Expr, Expr]
    """The expression that each placeholder, and each frame's old value, stands for."""

    @property
    def key(self) -> tuple[object, ...]:
        """Two bodies with the same key have the same repair, up to the originals."""
        return (self.body, tuple((p, self.roles[p], self.signs[p]) for p in self.roles))

    def instantiate(self, expr: Expr) -> Expr:
        """Replaces placeholders by the expressions that they stand for."""
        return substitute(expr, self.originals)


def old(frame: Expr) -> Expr:
    """The read of a frame's previous value."""
    assert isinstance(frame, Read)
    return read(frame.tensor + OLD, frame.indices, frame.dtype)


def canonicalize(
    body: Expr,
    frames: Mapping[str, Sign],
    signs: Mapping[Expr, Sign],
    over: Collection[Axis],
    invariant: Collection[str],
) -> Canonical:
    """Name the maximal subexpressions of `body` that read no frame, and the frames that it reads."""
    names = frozenset(frames)
    placeholders: dict[Expr, Expr] = {}
    roles: dict[Expr, Role] = {}
    placeholder_signs: dict[Expr, Sign] = {}
    originals: dict[Expr, Expr] = {}
    counts = {"c": 0, "r": 0, "s": 0}

    def place(node: Expr, letter: str, role: Role, sign: Sign) -> None:
        placeholder = read(f"{letter}{counts[letter]}", (), node.dtype)
        counts[letter] += 1
        placeholders[node], roles[placeholder], placeholder_signs[placeholder] = placeholder, role, sign
        originals[placeholder] = node
        if role == "frame":
            originals[old(placeholder)] = old(node)

    stack = [body]
    seen: set[Expr] = set()
    while stack:
        node = stack.pop()
        if node in seen or isinstance(node, Const):
            continue
        seen.add(node)
        if isinstance(node, Read) and node.tensor in names:
            place(node, "r", "frame", frames[node.tensor])
        elif node.tensors & names:
            stack.extend(reversed(node.args))
        elif node.dtype == "bool":
            place(node, "c", "predicate", "nonnegative")
        elif _is_invariant(node, over, invariant):
            place(node, "s", "invariant", infer_sign(node, signs))
        else:
            place(node, "c", "opaque", infer_sign(node, signs))
    return Canonical(substitute(body, placeholders), roles, placeholder_signs, originals)


def _is_invariant(node: Expr, over: Collection[Axis], invariant: Collection[str]) -> bool:
    """Says whether an opaque part has one value along the reduced axes."""
    if node.tensors <= frozenset(invariant) and not any(isinstance(n, Index) for n in postorder(node)):
        return True  # this includes expressions of constants alone
    return bool(over) and not node.axes & frozenset(over)


def aged(variable: Var) -> Var:
    """A frame variable, or one derived from frames, at the old values."""
    if variable.role != "frame":
        return variable
    frames: dict[Expr, Expr] = {
        n: old(n) for n in postorder(variable.expr) if isinstance(n, Read) and n.tensor.startswith("r")
    }
    return Var(substitute(variable.expr, frames), "frame")
