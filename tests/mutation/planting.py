"""Mutants: mistakes that are planted by replacing one attribute of the package, never by editing its files."""

import importlib
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pallasfuse.ir.expr import Apply, Expr, apply, rebuild, with_args
from pallasfuse.ir.fold import Accumulator, Fold, Group
from pallasfuse.ir.tile_program import Loop, Statement, TileProgram, verify

type Plant = Callable[["Planting"], None]


@dataclass(frozen=True)
class Mutant:
    """A mistake, the program on which it must be noticed, and the check that must notice it (`checks.CHECKS`).

    It is the proof where that sees the mistake. Others exist only in floating point, for infinite inputs or in emitters, or are
    seen by the tile interpreter at the extents of the program itself.
    """

    name: str
    room: str
    plant: Plant
    subject: str
    check: str = "proof"


class Planting:
    """Plants mistakes for the duration of a test. A place is written `module:attribute`, `module:Class.method` or
    `module:TABLE[key]`; a function is replaced in every module of the package that has imported it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.wrapped = False
        self.calls = 0
        self.set("pallasfuse.repair.derive:_memo", OrderedDict())  # what was derived without the mutant

    def set(self, place: str, value: Any) -> None:
        """Replace what is at `place`, and there only."""
        owner, key, is_item = _find(place)
        if is_item:
            self._patch.setitem(owner, key, value)
        else:
            self._patch.setattr(owner, key, value)

    def around(self, place: str, instead: Callable[..., Any], *, here_only: bool = False) -> None:
        """Call `instead(real, *args, **kwargs)` in place of the real function."""
        owner, key, is_item = _find(place)
        found = owner[key] if is_item else vars(owner)[key]
        real = (
            found.__func__ if isinstance(found, staticmethod) else found.fget if isinstance(found, property) else found
        )
        self.wrapped = True

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return instead(real, *args, **kwargs)

        value: Any = call
        if isinstance(found, staticmethod):
            value = staticmethod(call)
        elif isinstance(found, property):
            value = property(call)
        if is_item or isinstance(owner, type) or here_only:
            self.set(place, value)
            return
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "pallasfuse" and vars(module).get(key) is real:
                self._patch.setattr(module, key, value)

    def result(self, place: str, spoil: Callable[..., Any], *, here_only: bool = False) -> None:
        """Pass the real function's result through `spoil(result, *args, **kwargs)`."""

        def instead(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return spoil(real(*args, **kwargs), *args, **kwargs)

        self.around(place, instead, here_only=here_only)


def _find(place: str) -> tuple[Any, Any, bool]:
    """(owner, key, is the key an item of a mapping)"""
    module, path = place.split(":")
    owner: Any = importlib.import_module(module)
    match = re.fullmatch(r"(\w+)\[(\w+)\]", path)
    if match:
        return getattr(owner, match[1]), match[2], True
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, False


# --- shorthands for the usual mistakes


def result_of(place: str, spoil: Callable[..., Any], *, here_only: bool = False) -> Plant:
    return lambda planting: planting.result(place, spoil, here_only=here_only)


def instead_of(place: str, instead: Callable[..., Any], *, here_only: bool = False) -> Plant:
    return lambda planting: planting.around(place, instead, here_only=here_only)


def value_at(place: str, value: Any) -> Plant:
    return lambda planting: planting.set(place, value)


def all_of(*plants: Plant) -> Plant:
    def plant(planting: Planting) -> None:
        for one in plants:
            one(planting)

    return plant


def in_groups(change: Callable[[Group], Group]) -> Plant:
    """Every group that is chosen is changed."""

    def spoil(grouping: Any, *_: Any, **__: Any) -> Any:
        return replace(grouping, groups=tuple(change(g) for g in grouping.groups))

    return result_of("pallasfuse.fusion.grouping:group_segment", spoil)


def in_folds(change: Callable[[Fold], Fold]) -> Plant:
    return in_groups(lambda g: replace(g, folds=tuple(change(f) for f in g.folds)))


def in_accumulators(change: Callable[[Accumulator], Accumulator]) -> Plant:
    return in_folds(lambda f: replace(f, accumulators=tuple(change(a) for a in f.accumulators)))


def in_updates(change: Callable[[Expr], Expr]) -> Plant:
    return in_accumulators(lambda a: a if a.update is None else replace(a, update=change(a.update)))


def in_bodies(change: Callable[[Expr], Expr]) -> Plant:
    """Every expression of a group is changed."""

    def fold(f: Fold) -> Fold:
        accumulators = tuple(replace(a, term=change(a.term)) for a in f.accumulators)
        frames = tuple(replace(x, value=change(x.value)) for x in f.frames)
        return replace(f, accumulators=accumulators, frames=frames, nest=replace(f.nest, body=change(f.nest.body)))

    def group(g: Group) -> Group:
        outputs = tuple(replace(n, body=change(n.body)) for n in g.outputs)
        return replace(g, folds=tuple(fold(f) for f in g.folds), outputs=outputs)

    return in_groups(group)


def in_tiles(change: Callable[[Statement], Statement | None]) -> Plant:
    """Every statement of every tile program is changed; None drops it."""

    def block(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        result = []
        for s in body:
            inner = s
            if isinstance(s, Loop):
                inner = replace(s, segments=tuple(replace(g, body=block(g.body)) for g in s.segments))
            changed = change(inner)
            if changed is not None:
                result.append(changed)
        return tuple(result)

    return in_programs(lambda p: replace(p, body=block(p.body)))


def in_programs(change: Callable[[TileProgram], TileProgram]) -> Plant:
    """Every tile program is changed after it is lowered, and verified as lowering does."""
    return result_of(
        "pallasfuse.tiling.lower:lower", lambda programs, *_, **__: tuple(verify(change(p)) for p in programs)
    )


def rewrite(root: Expr, step: Callable[[Apply], Expr | None]) -> Expr:
    """`root` with every operation replaced by what `step` makes of it; None keeps it."""

    def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr:
        new = with_args(node, args)
        changed = step(new) if isinstance(new, Apply) else None
        return new if changed is None else changed

    return rebuild(root, replaced)


def swapped(op: str) -> Callable[[Expr], Expr]:
    """The operands of every `op` change places."""

    def step(node: Apply) -> Expr | None:
        return apply(op, *node.args[::-1], dtype=node.dtype) if node.op == op else None

    return lambda root: rewrite(root, step)


def renamed(old: str, new: str) -> Callable[[Expr], Expr]:
    """Every operation `old` becomes `new`."""

    def step(node: Apply) -> Expr | None:
        return apply(new, *node.args, dtype=node.dtype) if node.op == old else None

    return lambda root: rewrite(root, step)
