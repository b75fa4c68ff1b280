"""Canonical names: equal programs become the same program, and what is made from that one gets the names of each again.

A canonical name is a token, like `«t0007»`, that no other text has. So whatever is derived from a program in canonical names
(groups, schedules, tile programs, texts about them) is renamed by replacing the tokens in all of its strings. Tokens sort in the
order in which tensors and axes first appear: where a pass sorts by name, equal programs are sorted alike.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from operator import is_
from typing import Any

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, index, postorder, read, rebuild, with_args
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, Source
from pallasfuse.ir.tensors import Tensor

_OPEN, _CLOSE = "«", "»"
_TOKEN = re.compile(f"{_OPEN}[ats][0-9]+{_CLOSE}")
_NUMBERED = re.compile(f"{_OPEN}([ats])0*([0-9]+){_CLOSE}")


class UnknownNameError(ValueError):
    """A text has a piece of a canonical name, which cannot be renamed."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A program in canonical names, without source lines: two programs that differ in names and lines only share it."""

    program: LoopProgram
    names: Mapping[str, str]
    """The name, or the source line, that each token stands for."""
    axes: Mapping[Axis, Axis]
    """The canonical axis of each axis of the program."""


def canonical(program: LoopProgram) -> Canonical:
    """Gives a program canonical names, numbered in the order in which they appear.

    Raises:
      UnknownNameError: a text of the program could be taken for a canonical name.
    """
    naming = _Naming()
    inputs = tuple(Tensor(naming.tensor(t.name), naming.over(t.axes), t.dtype) for t in program.inputs)
    nests = tuple(naming.nest(n) for n in program.nests)
    outputs = tuple(naming.tensors[name] for name in program.outputs)
    return Canonical(LoopProgram(inputs, nests, outputs), naming.names, naming.axes)


def readable(text: str) -> str:
    """A text for people and compilers, in which canonical names are plain: `«t0007»` becomes `t7`."""
    return _NUMBERED.sub(r"\1\2", text)


class _Naming:
    """The canonical names given so far."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.tensors: dict[str, str] = {}
        self.axes: dict[Axis, Axis] = {}
        self._renamed: dict[Expr, Expr] = {}

    def _token(self, kind: str, number: int, text: str) -> str:
        if _OPEN in text or _CLOSE in text:
            raise UnknownNameError(text)
        token = f"{_OPEN}{kind}{number:06}{_CLOSE}"
        self.names[token] = text
        return token

    def tensor(self, name: str) -> str:
        self.tensors[name] = self._token("t", len(self.tensors), name)
        return self.tensors[name]

    def _axis(self, axis: Axis) -> Axis:
        if axis not in self.axes:
            self.axes[axis] = Axis(self._token("a", len(self.axes), axis.name), axis.extent)
        return self.axes[axis]

    def over(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        return tuple(self._axis(a) for a in axes)

    def nest(self, nest: Nest | External) -> Nest | External:
        source = Source(self._token("s", len(self.tensors), nest.source.summary)) if nest.source.summary else Source()
        if isinstance(nest, External):
            if _OPEN in nest.reason or _CLOSE in nest.reason:
                raise UnknownNameError(nest.reason)
            operands = tuple(self.tensors[t] for t in nest.operands)
            name, axes = self.tensor(nest.name), self.over(nest.axes)
            lookup = None if nest.lookup is None else self._lookup(nest.lookup)
            return replace(nest, name=name, axes=axes, operands=operands, source=source, lookup=lookup)
        axes, reduced = self.over(nest.axes), self.over(nest.reduced)
        body = rebuild(nest.body, self._expression, self._renamed)
        return replace(nest, name=self.tensor(nest.name), axes=axes, body=body, reduced=reduced, source=source)

    def _lookup(self, lookup: Lookup) -> Lookup | None:
        """A lookup; None where what it reads is unknown in this part of a program."""
        parts = lookup.result, lookup.source, lookup.table
        if not all(t.name in self.tensors for t in parts):
            return None
        result, source, table = (Tensor(self.tensors[t.name], self.over(t.axes), t.dtype) for t in parts)
        along, blocks = (None if a is None else self._axis(a) for a in (lookup.along, lookup.blocks))
        return Lookup(result, source, table, self._axis(lookup.rows), lookup.block, along, blocks, lookup.fill)

    def _expression(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        match node:
            case Read(tensor, indices, dtype):
                return read(self.tensors[tensor], self.over(indices), dtype)
            case Index(axis, dtype):
                return index(self._axis(axis), dtype)
            case _:
                return with_args(node, args)


def restored[T](value: T, names: Mapping[str, str]) -> T:
    """Anything made from a program in canonical names, in the names of an instance; parts without names stay the same objects.

    Example: a group, a schedule, phases of a kernel, or a text with `«t0007»` in it.

    Raises:
      UnknownNameError: a text has a piece of a canonical name, because it was cut.
    """
    found: T = _Restoring(names).value(value)
    return found


def ranked[T](value: T) -> tuple[T, tuple[str, ...]]:
    """A part of what is in canonical names, with these numbered anew, and the tokens that it had, in order.

    Tokens keep their order: parts that are equal up to names, and sort alike by them, become equal, and the n-th token of one
    stands for the n-th token of the other.

    Raises:
      UnknownNameError: as `restored`.
    """
    tokens = tuple(sorted(_Tokens().within(value)))
    numbers: dict[str, int] = {}
    names = {}
    for token in tokens:
        kind = token[1]
        names[token] = f"{_OPEN}{kind}{numbers.setdefault(kind, 0):06}{_CLOSE}"
        numbers[kind] += 1
    return restored(value, names), tokens


@lru_cache(1 << 8)
def _fields_of(kind: type[Any]) -> tuple[str, ...]:
    """The names of the fields of a dataclass, of which there are few."""
    return tuple(f.name for f in fields(kind))


class _Tokens:
    """Finds the tokens in what `restored` would rename."""

    def __init__(self) -> None:
        self._found: set[str] = set()
        self._expressions: dict[Expr, None] = {}
        self._nodes: dict[int, Any] = {}

    def within(self, value: Any) -> set[str]:
        """All tokens of a value.

        Raises:
          UnknownNameError: as `restored`.
        """
        self._value(value)
        for node in postorder(*self._expressions):
            if isinstance(node, Read):
                self._text(node.tensor)
            for axis in node.axes if isinstance(node, Read | Index) else ():
                self._text(axis.name)
        return self._found

    def _text(self, text: str) -> None:
        if _OPEN in text or _CLOSE in text:
            self._found.update(_tokens(text))

    def _value(self, value: Any) -> None:
        if type(value) is tuple:  # most values are
            for part in value:
                self._value(part)
            return
        match value:
            case str():
                self._text(value)
            case None | bool() | int() | float():
                pass
            case Axis():
                self._text(value.name)
            case Const() | Index() | Read() | Apply():
                self._expressions[value] = None
            case tuple() | frozenset():  # and tuples with names
                for part in value:
                    self._value(part)
            case dict():
                for key, part in value.items():
                    self._value(key)
                    self._value(part)
            case _ if not isinstance(value, type) and is_dataclass(value) and id(value) not in self._nodes:
                self._nodes[id(value)] = value
                for name in _fields_of(value.__class__):
                    self._value(getattr(value, name))


def _tokens(text: str) -> list[str]:
    """The tokens of a text.

    Raises:
      UnknownNameError: it has a piece of one.
    """
    if any(_OPEN in piece or _CLOSE in piece for piece in _TOKEN.split(text)):
        raise UnknownNameError(text)
    return _TOKEN.findall(text)


class _Restoring:
    """What was renamed so far: shared parts are renamed once, and stay shared."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._axes: dict[Axis, Axis] = {}
        self._renamed: dict[Expr, Expr] = {}
        self._nodes: dict[int, tuple[Any, Any]] = {}

    def text(self, text: str) -> str:
        if _OPEN not in text and _CLOSE not in text:
            return text
        _tokens(text)
        return _TOKEN.sub(lambda token: self._names[token[0]], text)

    def _axis(self, axis: Axis) -> Axis:
        found = self._axes.get(axis)
        if found is None:
            name = self.text(axis.name)
            found = self._axes[axis] = axis if name is axis.name else Axis(name, axis.extent)
        return found

    def _expression(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        match node:
            case Read(tensor, indices, dtype):
                return read(self.text(tensor), [self._axis(a) for a in indices], dtype)
            case Index(axis, dtype):
                return index(self._axis(axis), dtype)
            case _:
                return with_args(node, args)

    def value(self, value: Any) -> Any:
        if type(value) is tuple:  # most values are
            parts = [self.value(v) for v in value]
            return value if all(map(is_, parts, value)) else tuple(parts)
        match value:
            case str():
                return self.text(value)
            case None | bool() | int() | float():
                return value
            case Axis():
                return self._axis(value)
            case Const() | Index() | Read() | Apply():
                return rebuild(value, self._expression, self._renamed)
            case tuple() | frozenset():
                parts = [self.value(v) for v in value]
                return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
            case dict():
                pairs = {self.value(k): self.value(v) for k, v in value.items()}
                same = all(a is b for a, b in zip((*pairs, *pairs.values()), (*value, *value.values()), strict=True))
                return value if same else pairs
        if isinstance(value, type) or not is_dataclass(value):
            return value
        if id(value) not in self._nodes:
            old = {name: getattr(value, name) for name in _fields_of(value.__class__)}
            new = {name: self.value(part) for name, part in old.items()}
            same = all(new[name] is part for name, part in old.items())
            make: Any = type(value)
            self._nodes[id(value)] = value, value if same else make(**new)
        return self._nodes[id(value)][1]
