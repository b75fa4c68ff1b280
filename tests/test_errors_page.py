"""docs/errors.md has every error and warning that pallasfuse raises for its users."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pallasfuse"
RAISED = {
    "AssertionError", "FusionError", "ImportError", "TargetError", "TraceError", "TypeError", "ValueError", "VerificationError",
}  # fmt: skip
"""What users meet. `InvalidProgramError` and the exceptions inside a room are a bug or caught there."""
NOT_MET = {
    "not an object", "an entry is no record", "no output is a float",  # caught where they are raised
    "a hash is no number", "no quadratic non-residue", "an index is opaque",  # cannot happen
    "neither an input nor computed yet", "shapes {} and {}",
}  # fmt: skip

pytestmark = pytest.mark.any_jax


def plain(text):
    """The words of a text, without Markdown's own signs."""
    return " ".join(text.replace("`", "").replace("\\|", "|").split())


def template(node):
    """A message with `{}` for what is filled in; empty where it is made elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(v) if isinstance(v, ast.Constant) else "{}" for v in values)
        case ast.BinOp(left=left, right=right):
            return template(left) + template(right)
    return ""


def warns(node):
    """Is it a call of a function or method whose name is `warn`: of `warnings`, of a store, of the object itself?"""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].strip("_") == "warn"


@cache
def messages():
    """Lists (file and line, message) of everything that is raised or warned of."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not (
                warns(node) or (call is not node and ast.unparse(call.func) in RAISED)
            ):
                continue
            texts = [template(a) for a in call.args]
            message = max(texts, key=len, default="")
            if longest(message) and not any(n in message for n in NOT_MET):
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", message))
    return found


def longest(message):
    """The longest piece of a message in which nothing is filled in."""
    pieces = [plain(piece) for line in message.split("\n") for piece in line.split("{}")]
    piece = max(pieces, key=len)
    return piece if len(piece.split()) > 2 else ""


def test_messages_are_found():
    found = [m for _, m in messages()]
    assert len(found) >= 70
    assert any("differentiating a fused function" in m for m in found)
    assert any("a plan that was kept does not fit" in m for m in found)
    assert any("cannot be written" in m for m in found)


def test_page_has_every_message():
    page = plain((ROOT / "docs" / "errors.md").read_text())
    missing = [f"{place}: {message}" for place, message in messages() if longest(message) not in page]
    assert not missing, "docs/errors.md has no line for:\n" + "\n".join(missing)


def test_page_has_every_class():
    page = (ROOT / "docs" / "errors.md").read_text()
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    names = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name != "Refusal"]
    assert len(names) >= 6
    assert [n for n in names if f"`{n}`" not in page] == []
