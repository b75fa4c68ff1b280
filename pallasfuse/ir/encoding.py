"""Nodes of the representations as JSON, and back: a list in which everything comes after what it is made of.

Only classes that the reader names are made, with the values that were written; nothing that is read is ever run. Equal parts are
written once, and are one object again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, apply, const, index, postorder, read
from pallasfuse.ir.reducers import REDUCERS, Reducer


class EncodingError(ValueError):
    """A value that cannot be written, or a text that is not of a value."""


def encode(value: Any, classes: Iterable[type], named: Mapping[str, Any]) -> list[Any]:
    """The JSON of a value; the last element of the list stands for the value itself.

    classes: dataclasses whose values it may have. named: objects that are written by their name.

    Raises:
      EncodingError: the value has a part of another class.
    """
    writer = _Writer(frozenset(classes), named)
    writer.nodes.append(["value", writer.write(value)])
    return writer.nodes


class _Writer:
    def __init__(self, classes: frozenset[type], named: Mapping[str, Any]) -> None:
        self.nodes: list[Any] = []
        self._classes, self._named = classes, named
        self._known: dict[int, tuple[Any, int]] = {}  # the values are held, so that no other one gets their identity

    def write(self, value: Any) -> Any:
        """A number or a text as it is; else a list with the number of a node."""
        if value is None or isinstance(value, str | bool):
            return value
        if isinstance(value, int | float):
            return float(value) if isinstance(value, float) else int(value)
        if isinstance(value, Const | Index | Read | Apply):
            for node in postorder(value):
                self._add(node, self._expression)
        else:
            self._add(value, self._compound)
        return [self._known[id(value)][1]]

    def _add(self, value: Any, write: Any) -> None:
        if id(value) not in self._known:
            node = write(value)
            self._known[id(value)] = value, len(self.nodes)
            self.nodes.append(node)

    def _expression(self, node: Expr) -> list[Any]:
        match node:
            case Const(value, dtype):
                return ["const", self.write(value), dtype]
            case Index(axis, dtype):
                return ["index", self.write(axis), dtype]
            case Read(tensor, indices, dtype):
                return ["read", tensor, dtype, *map(self.write, indices)]
            case Apply(op, args, dtype):
                return ["apply", op, dtype, *([self._known[id(a)][1]] for a in args)]

    def _compound(self, value: Any) -> list[Any]:
        if isinstance(value, tuple):
            return ["tuple", *map(self.write, value)]
        if isinstance(value, frozenset):
            return ["frozenset", *sorted(map(self.write, value), key=repr)]
        if isinstance(value, Mapping):
            return ["dict", *(self.write(x) for pair in value.items() for x in pair)]
        if isinstance(value, Reducer) and REDUCERS.get(value.name) == value:
            return ["reducer", value.name]
        for name, other in self._named.items():
            if type(other) is type(value) and other == value:
                return ["named", name]
        if type(value) in self._classes and is_dataclass(value):
            return [type(value).__name__, *(self.write(getattr(value, f.name)) for f in fields(value))]
        raise EncodingError(f"a {type(value).__name__} cannot be written")


def decode(nodes: Any, classes: Iterable[type], named: Mapping[str, Any]) -> Any:
    """The value that `encode` has written.

    Raises:
      EncodingError: the list is not what `encode` writes.
    """
    by_name = {c.__name__: c for c in classes}
    made: list[Any] = []

    def value(written: Any) -> Any:
        if not isinstance(written, list):
            return written
        (number,) = written
        if not 0 <= number < len(made):
            raise EncodingError(f"node {len(made)} reads node {number}")
        return made[number]

    try:
        for kind, *parts in nodes:
            match kind:
                case "const" | "index":
                    made.append((const if kind == "const" else index)(value(parts[0]), parts[1]))
                case "read":
                    made.append(read(parts[0], [value(p) for p in parts[2:]], parts[1]))
                case "apply":
                    made.append(apply(parts[0], *[value(p) for p in parts[2:]], dtype=parts[1]))
                case "tuple":
                    made.append(tuple([value(p) for p in parts]))
                case "frozenset":
                    made.append(frozenset(value(p) for p in parts))
                case "dict":
                    made.append({value(k): value(v) for k, v in zip(parts[::2], parts[1::2], strict=True)})
                case "reducer":
                    made.append(REDUCERS[parts[0]])
                case "named":
                    made.append(named[parts[0]])
                case "value":
                    made.append(value(parts[0]))
                case _:
                    cls = by_name[kind]
                    names = [f.name for f in fields(cls)]
                    made.append(cls(**dict(zip(names, [value(p) for p in parts], strict=True))))
        return made[-1]
    except EncodingError:
        raise
    except Exception as error:  # whatever a damaged file leads to
        raise EncodingError(f"node {len(made)}: {type(error).__name__}: {error}") from error
