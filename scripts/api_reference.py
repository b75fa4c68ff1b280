"""The page of the public interface, made from docstrings. It reads the source and imports nothing, so that JAX is not needed.

mkdocs runs it as a hook (mkdocs.yml); `python scripts/api_reference.py` prints the page.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = "api.md"
MODULES = ("pallasfuse", "pallasfuse.tuning", "pallasfuse.testing", "pallasfuse.repair")
"""Modules that users import; of the first and the last what `__all__` lists, of the others what they define."""
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):\s*$")
_ITEM = re.compile(r"^  (\*{0,2}[\w., *]+?): (.*)$")
_Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """Returns the page as Markdown."""
    parts = ["# API reference\n\nMade from the docstrings.\n"]
    for module in MODULES:
        path = _path(module)
        tree = ast.parse(path.read_text())
        parts.append(f"## {module}\n\n{_text(ast.get_docstring(tree) or '')}\n")
        for name, node in sorted(_public(module, tree), key=lambda found: isinstance(found[1], ast.ClassDef)):
            parts += _described(f"{module}.{name}", node)
    return "\n".join(parts)


def public_names(module: str) -> list[str]:
    """Lists the names of a module that the page describes."""
    return [name for name, _ in _public(module, ast.parse(_path(module).read_text()))]


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _public(module: str, tree: ast.Module) -> list[tuple[str, _Definition]]:
    """Lists the public names of a module with their definitions, wherever these are."""
    listed = _all(tree)
    if listed is None:
        found = [n for n in tree.body if isinstance(n, _Definition) and not n.name.startswith("_")]
        return [(n.name, n) for n in _last(found)]
    origins = _origins(tree, module)
    named = [(name, _definition(origins[name], name)) for name in listed if name in origins]
    return [(name, node) for name, node in named if node is not None]


def _all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def _origins(tree: ast.Module, module: str) -> dict[str, str]:
    """Returns the module of every name that is imported from the package, under `TYPE_CHECKING` too."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pallasfuse."):
            found |= {(alias.asname or alias.name): node.module for alias in node.names}
    return found


def _definition(module: str, name: str) -> _Definition | None:
    tree = ast.parse(_path(module).read_text())
    nodes = _last([n for n in tree.body if isinstance(n, _Definition) and n.name == name])
    return nodes[0] if nodes else None


def _last(nodes: list[_Definition]) -> list[_Definition]:
    """Of each name the last definition: those before are overloads."""
    return list({n.name: n for n in nodes}.values())


def _described(name: str, node: _Definition, level: int = 3) -> list[str]:
    short = name.removeprefix("pallasfuse.")
    parts = [f"{'#' * level} {short}\n", f"```python\n{_signature(node)}\n```\n"]
    parts.append(_text(ast.get_docstring(node) or "") + "\n")
    if isinstance(node, ast.ClassDef):
        parts += _fields(node)
        for method in _last([n for n in node.body if isinstance(n, ast.FunctionDef)]):
            if not method.name.startswith("_") and ast.get_docstring(method):
                parts += _described(f"{short}.{method.name}", method, level + 1)
    return parts


def _fields(node: ast.ClassDef) -> list[str]:
    """Lists the annotated attributes of a class, with the strings that follow them."""
    lines = []
    for n, field in enumerate(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_":
            after = node.body[n + 1] if n + 1 < len(node.body) else None
            lines.append(f"- `{field.target.id}: {ast.unparse(field.annotation)}`{_after(after)}")
    return ["\n".join(lines) + "\n"] if lines else []


def _after(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return ": " + " ".join(text.split())
    return ""


def _signature(node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(b) for b in node.bases]
        return f"class {node.name}" + (f"({', '.join(bases)})" if bases else "")
    is_property = any(ast.unparse(d) in ("property", "cached_property") for d in node.decorator_list)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = node.name + ("" if is_property else f"({ast.unparse(node.args)})") + result.replace("'", "")
    return "\n".join(textwrap.wrap(text, 110, subsequent_indent="    ", break_long_words=False))


def _text(docstring: str) -> str:
    """A docstring as Markdown: its sections become lists."""
    lines: list[str] = []
    in_section = False
    for line in docstring.splitlines():
        if section := _SECTION.match(line):
            lines += ["", f"**{section[1]}**", ""]
            in_section = True
        elif in_section and (item := _ITEM.match(line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif in_section and line.startswith(" "):
            lines.append(f"    {line.strip()}")
        else:
            in_section = in_section and not line.strip()
            lines.append(line)
    return "\n".join(lines).strip()


def on_files(files: Any, config: Any) -> Any:
    """Adds the page to those of mkdocs."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


if __name__ == "__main__":
    print(page())
