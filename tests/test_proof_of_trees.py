"""Proofs of schedule trees: kernels compute the nests, over finite fields; the walk's mistakes are found."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.expr import apply, const, index, read, sub
from pallasfuse.ir.fold import OLD
from pallasfuse.ir.tree import parse, show
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.proof import PlannedKernel, prove
from pallasfuse.scheduled import scheduled
from pallasfuse.targets import INTERPRET, XLA_CPU
from pallasfuse.tiling import tree_loops
from pallasfuse.tiling.masks import integer
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import TreeLowering
from tests.tiling.random_programs import SUBJECTS
from tests.tiling.random_trees import Walker
from tests.tiling.tree_programs import Subject

TARGETS = {"exact": XLA_CPU, "masked": INTERPRET}
NAMES = sorted(SUBJECTS)


def proved(subject, tree, target=INTERPRET):
    """The proof of a plan by this schedule, as `verify` makes it."""
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in subject.shapes]
    converted = convert(jax.make_jaxpr(subject.function)(*arguments))
    grouping, placed = scheduled(converted, show(tree), target)
    (group,) = grouping.groups
    return prove(converted, [PlannedKernel(group, placed.schedule, placed.phases)])


@pytest.mark.sampled(24, cover=("target",))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_random_trees(name, target):
    own = TARGETS[target]
    tiles = Tiles(own.tails, own.smallest_dot, own.tile_multiple)
    tree = Walker(SUBJECTS[name].region, tiles, random.Random(NAMES.index(name))).walk(9)
    found = proved(SUBJECTS[name], tree, own)
    assert found.counterexample is None, f"{found}\n{show(tree)}"
    undecided = next((reason for reason in found.uncovered if "was determined in" in reason), None)
    if undecided is not None:
        pytest.skip(undecided)
    # of some masks the short axes are too short for tiles that are skipped, which the proof says
    assert all("visits all of it on short axes" in reason for reason in found.uncovered), f"{found}\n{show(tree)}"
    assert found.bound <= 1e-9


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


def one_more_in_the_first(of):
    """An output that a later kernel does not touch is off by one."""

    def store(self, nest, value, scope):
        of(self, nest, apply("add", value, const(1, value.dtype)) if nest.name == "t0" else value, scope)

    return store


def beside_masked_columns(q, k, v):
    o = jnp.sin(jax.nn.softmax(q @ k.T, -1) @ v)
    j, d = jnp.arange(k.shape[0])[:, None], jnp.arange(v.shape[1])[None]
    return o + jnp.where(d + 100 >= j, v, 0).sum(0)


PROGRAMS = SUBJECTS | {
    "sums both ways": Subject(lambda x: (jnp.sum(x, 0), jnp.sum(x * x, 1)), ((8, 12),), ""),
    "wide mask": Subject(beside_masked_columns, ((64, 32), (256, 32), (256, 192)), ""),
}

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
    "an output of the first kernel": ("sums both ways", "p { t0 } q { t2 }", one_more_in_the_first, "_store"),
}  # fmt: skip


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, monkeypatch):
    program, text, spoil, place = MUTANTS[name]
    subject, tree = PROGRAMS[program], parse(text)
    assert proved(subject, tree).holds
    if spoil is None:
        monkeypatch.setattr(TreeLowering, "_real_last_frame", TreeLowering._last_frame, raising=False)
        monkeypatch.setattr(TreeLowering, place, without_move)
    else:
        where = tree_loops if place == "plan_loop" else TreeLowering
        monkeypatch.setattr(where, place, spoil(getattr(where, place)))
    try:
        found = proved(subject, tree)
    except InvalidProgramError:
        return
    assert found.counterexample is not None, found


def test_a_loop_that_skips_nothing_on_short_axes_is_not_covered(monkeypatch):
    tree = parse("k { i:16@grid ( l:16 ( t1 t2 t8 m:16 ( t11 t22 ) ) t24 ) }")
    assert proved(PROGRAMS["wide mask"], tree).holds
    monkeypatch.setattr(TreeLowering, "_lasting", lambda self, own: self.stores)
    found = proved(PROGRAMS["wide mask"], tree)
    assert not found.holds
    (reason,) = found.uncovered
    assert "the loop over m, which masks bound, visits all of it on short axes" in reason


def test_terms_under_masks_are_tested():
    found = proved(SUBJECTS["causal"], parse("k { i:2@grid l:4 ( t6 t11 t17 t20 ) }"))
    assert found.holds
    assert "masks of k" in found.stages


def test_clusters_have_short_instances():
    """Over short axes the two loops have other numbers of trips."""
    subject = Subject(lambda a, b, d: (a @ b) @ d, ((16, 32), (32, 64), (64, 24)), "")
    tree = parse("fast { i:8@grid ( k:16@cluster ( k:64 j:32 ( t0 ) l:8 ( t1 ) ) l:6@cluster ( +t1 ) ) }")
    found = proved(subject, parse(show(tree).replace("k:64 ", "")))
    assert found.holds, found
