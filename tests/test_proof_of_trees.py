"""Proofs of schedule trees: kernels compute the nests, over finite fields; the walk's mistakes are found."""

import random
from dataclasses import replace

import pytest

from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.expr import apply, const, index, read, sub
from pallasfuse.ir.fold import OLD
from pallasfuse.ir.tree import parse, show
from pallasfuse.proof.trees import prove_tree
from pallasfuse.tiling import trees
from pallasfuse.tiling.masks import integer
from pallasfuse.tiling.tree_values import Bounded, Tiles
from pallasfuse.tiling.trees import TreeLowering, lower_tree
from tests.tiling.random_programs import SUBJECTS, short
from tests.tiling.random_trees import Walker

TILES = {"exact": Tiles("exact"), "masked": Tiles("masked", 4)}
NAMES = sorted(SUBJECTS)


def proved(part, tree, tiles):
    bounded: list[Bounded] = []
    programs = lower_tree(part, tree, FoldsOnDemand(part), tiles, bounded=bounded)
    assert not isinstance(programs, Refusal), programs
    return prove_tree(part, programs, bounded, tiles.tails)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", NAMES)
def test_random_trees(name, tiles):
    part = short(SUBJECTS[name]).part
    tree = Walker(part, TILES[tiles], random.Random(NAMES.index(name))).walk(9)
    found = proved(part, tree, TILES[tiles])
    assert found.holds, f"{found}\n{show(tree)}"
    assert found.bound <= 1e-9


def test_long_axes_are_not_proved():
    found = proved(SUBJECTS["group_norm"].part, parse("k { t0 t11 t20 }"), Tiles("masked", 1, 64))
    assert not found.holds
    assert "shorter axes" in found.uncovered[0]


def without_repair(self, update, fold, scope):
    a = fold.accumulators[0]
    return read(a.name, self._sorted(frozenset(a.axes)), a.dtype)


def without_a_step(of):
    def planned(*args, **options):
        plan = of(*args, **options)
        trips = tuple(replace(t, stop=sub(t.stop, integer(1))) for t in plan.trips)
        return replace(plan, trips=trips, to_visit=sub(plan.to_visit, integer(plan.tile)))

    return planned


def not_initialised(of):
    def buffers(self, fold, scope):
        accumulators = tuple(replace(a, reducer=_Ones(a.reducer)) for a in fold.accumulators)
        of(self, replace(fold, accumulators=accumulators), scope)

    return buffers


class _Ones:
    def __init__(self, reducer):
        self.reducer = reducer

    def identity(self, dtype):
        return 1.0


def without_move(self, frame, values, loaded):
    shared = self._carried_frames[frame.name]
    own = loaded[shared.name + OLD]
    self._real_last_frame(frame, values, loaded)
    return {
        read(frame.name, frame.axes, frame.value.dtype): own,
        read(frame.name + OLD, frame.axes, frame.value.dtype): own,
    }


def at_the_origin(of):
    return lambda *args: replace(of(*args), origin=integer(0))


def moved_every_trip(of):
    return lambda *args: replace(of(*args), moved=frozenset())


def one_part(of):
    def join(self, fold, opened, scope):
        of(self, fold, opened, scope)
        at, last = next((n, s) for n, s in reversed(list(enumerate(scope.statements))) if getattr(s, "joins", False))
        scope.statements[at] = replace(last, value=_first(last.value, self.parts))

    return join


def _first(value, parts):
    return apply("select", apply("eq", index(parts), integer(0)), value, const(0, value.dtype))


def all_that_adds(self, own, nests):
    active = [f for p in self.active.values() for f in p.folds]
    return [f for f in (*own.folds, *active) if any(n.name == f.name for n in nests)]


def stored_when_begun(self, fold, folds, scope):
    """The value of the first accumulator, not what the fold makes of it."""
    nest, a = fold.nest, fold.accumulators[0]
    value = read(a.name, self._sorted(frozenset(a.axes)), a.dtype)
    scope.known[read(nest.name, nest.axes, nest.dtype)] = value
    self._store(nest, value, scope)


MUTANTS = {
    "no repair": ("attention", "k { l:2 ( t0 t2 t8 t11 ) }", lambda _: without_repair, "_bind"),
    "a bound off by one": ("causal", "k { i:2@grid l:1 ( t6 t11 t17 t20 ) }", without_a_step, "plan_loop"),
    "a buffer that begins at one": ("chain", "k { k:2 ( t0 l:2 ( t1 ) ) }", not_initialised, "_make_buffers"),
    "states that are not moved": ("attention", "p { l/2@grid l:2 ( t0 t2 t8 t11 ) } q { +t2 +t8 +t11 }", None, "_last_frame"),
    "one part only": ("chain", "p { k/2@grid k:1 ( t0 t1 ) } q { +t1 }", one_part, "_join"),
    "a window that begins at zero": ("variance", "k { j:2 ( j:1 ( t0 t7 ) ) t12 }", at_the_origin, "_inner_loop"),
    "moved in every trip": ("variance", "k { j:2 ( t0 j:1 ( t7 ) ) t12 }", moved_every_trip, "_pass"),
    "bounds of what is moved": ("masked columns", "k { l:1 ( t1 t6 t12 m:1 ( t19 ) ) }", lambda _: all_that_adds, "_adding"),
    "nothing is finished": ("attention", "k { l:2 ( t0 t2 t8 t11 ) }", lambda _: stored_when_begun, "_finished"),
    "tails that count": ("log_sum_exp", "k { j:4 ( t0 t9 ) t12 }", lambda _: lambda *_: False, "_is_padded"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, monkeypatch):
    program, text, spoil, place = MUTANTS[name]
    part, tree, tiles = short(SUBJECTS[program]).part, parse(text), TILES["masked"]
    if name == "tails that count":
        tiles = Tiles("masked", 1, 4)
    assert proved(part, tree, tiles).holds
    if spoil is None:
        monkeypatch.setattr(TreeLowering, "_real_last_frame", TreeLowering._last_frame, raising=False)
        monkeypatch.setattr(TreeLowering, place, without_move)
    else:
        where = trees if place == "plan_loop" else TreeLowering
        monkeypatch.setattr(where, place, spoil(getattr(where, place)))
    try:
        found = proved(part, tree, tiles)
    except InvalidProgramError:
        return
    assert found.counterexample is not None, found
