"""Chosen kernels are exchanged for others where everything takes less time together."""

import math
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.fusion import grouping
from pallasfuse.fusion.judging import Judge, part_of, worth_it
from pallasfuse.ir.loop_program import Nest, verify
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.price.terms import Price
from pallasfuse.price.xla import price_xla
from pallasfuse.targets import MOSAIC_GPU

Q, K, V = (jax.ShapeDtypeStruct(s, jnp.float16) for s in ((1, 8, 8, 8, 128), (1, 2048, 8, 128), (1, 2048, 8, 128)))


def decode(q, k, v):
    """Eight queries of groups of eight heads, each of which sees the keys up to its own position."""
    scores = jnp.einsum("bihgd,bjhd->bhgij", q, k, preferred_element_type=jnp.float32) / 128**0.5
    visible = jnp.arange(2048)[None] <= jnp.arange(8)[:, None] + 2040
    p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1).astype(v.dtype)
    return jnp.einsum("bhgij,bjhd->bihgd", p, v, preferred_element_type=jnp.float32).astype(v.dtype)


def kernels(**options):
    target = MOSAIC_GPU.judged(timed=True)
    return make_plan(jax.make_jaxpr(decode)(Q, K, V), target, FuseOptions(price=True, **options)).kernels


def test_kernels_that_save_the_same_are_exchanged_for_one(monkeypatch):
    """A softmax that reads its scores saves more by itself than attention as a whole: both save XLA's passes over the scores."""
    monkeypatch.setattr(Judge, "_alone_us", lambda *_: math.inf)
    (whole,) = kernels()
    assert len(whole.group.folds) == 3 and whole.group.inner
    monkeypatch.setattr(grouping, "_exchanged", lambda graph, chosen, *_: chosen)
    assert all(len(k.group.folds) < 3 for k in kernels())


class _Shared:
    """A candidate, which is its own group, and the arrays that XLA need not store for it."""

    def __init__(self, name, covers, ours, saves):
        self.name, self.covers, self.ours, self.saves = name, frozenset(covers), ours, frozenset(saves)
        self.group = self


def _judge(stores):
    """Judges as with a clock: a kernel whose price is up to 1.3 times what it saves is hoped for."""

    def total_us(chosen):
        gone = frozenset().union(*(c.saves for c in chosen))
        return sum(us for name, us in stores.items() if name not in gone) + sum(c.ours for c in chosen)

    def saving(candidate, others=()):
        saved = total_us(others) - total_us([*others, candidate])
        return saved if saved > 0 else 1e-3 * (0.3 * candidate.ours + saved)

    return SimpleNamespace(total_us=total_us, saving=saving, may_save=lambda *_: True)


@pytest.mark.parametrize("seed", range(40))
def test_exchanges_come_to_an_end_with_less_time_than_before(monkeypatch, seed):
    """What is hoped for makes the whole longer by its price, and is not to be exchanged for ever."""
    draw = random.Random(seed)
    monkeypatch.setattr(grouping, "_join", lambda graph, chosen, candidate, *_: [*chosen, candidate])
    more = grouping._with_more
    for _ in range(50):
        stores = {name: draw.uniform(0, 20) for name in "abcdef"}
        found = [_Shared(n, covers, draw.uniform(1, 20), draw.sample("abcdef", 3))
                 for n, covers in (("A", "p"), ("B", "qr"), ("H", "q"), ("K", "r"))]  # fmt: skip
        judge = _judge(stores)
        rounds = iter(range(30))
        monkeypatch.setattr(grouping, "_with_more", lambda *args, rounds=rounds: (next(rounds), more(*args))[1])
        for names in ("AHK", "AB", "HK", "B", "H"):
            start = [c for c in found if c.name in names]
            left = grouping._exchanged(None, start, found, (), None, judge)
            assert judge.total_us(left) <= judge.total_us(start)


def test_more_kernels_are_looked_for_beside_an_exchange(monkeypatch):
    """H saves nothing beside B; beside A, which saves more than B, it does."""
    monkeypatch.setattr(grouping, "_join", lambda graph, chosen, candidate, *_: [*chosen, candidate])
    found = [_Shared("A", "p", 1.0, "ab"), _Shared("B", "pq", 5.0, "abc"), _Shared("H", "q", 1.0, "c")]
    judge = _judge({"a": 10.0, "b": 10.0, "c": 3.0})
    left = grouping._exchanged(None, [found[1]], found, (), None, judge)
    assert [c.name for c in left] == ["A", "H"]


@pytest.mark.parametrize(("tree_us", "stays"), [(8.0, True), (9.0, True), (9.5, False)])
def test_a_kernel_stays_where_a_tree_that_a_clock_compares_with_it_does_as_well(monkeypatch, tree_us, stays):
    """By itself, the whole takes longer than a part of it, and what XLA stores beside that."""
    monkeypatch.setattr(grouping, "_join", lambda graph, chosen, candidate, *_: [*chosen, candidate])
    whole, part = _Shared("whole", "pq", 12.0, "ab"), _Shared("part", "q", 3.0, "b")
    tree = _Shared("tree", "pq", tree_us, "ab")
    judge = _judge({"a": 6.0, "b": 10.0})
    slower = _Shared("slower tree", "pq", 20.0, "ab")
    (left,) = grouping._exchanged(None, [whole], [whole, part], (slower, tree), None, judge)
    assert left is (whole if stays else part)
    (left,) = grouping._exchanged(None, [whole], [whole, part], (), None, judge)
    assert left is part


@pytest.mark.parametrize(
    ("of_tree", "of_listed", "left"), [(1.0, 1.0, "tree"), (1.3, 1.0, "listed"), (1.0, 0.87, "tree")]
)
def test_of_kernels_that_lose_beside_each_other_the_one_goes_that_loses_most_after_its_margin(of_tree, of_listed, left):
    """Both save the same. What is predicted of the tree is more often too low; what is only hoped for counts as nothing."""
    tree, listed = _Shared("tree", "p", 3.0, "a"), _Shared("listed", "q", 3.2, "a")
    judge = _judge({"a": 10.0})
    judge.kernel, judge.is_asked = lambda c: Price(c.ours, ()), lambda _: False
    judge.margin_of = lambda c: of_tree if c is tree else of_listed
    judge.replaced_us = lambda group, others: judge.total_us(others) - judge.total_us([*others, group]) + group.ours
    tree.heads, listed.heads = ("1",), ("2",)
    reasons = {}
    (kept,) = worth_it(judge, [tree, listed], reasons)
    assert kept.name == left and len(reasons) == 1


def test_a_kernel_replaces_no_more_than_xla_takes_for_its_work(monkeypatch):
    """However much shorter the rest of the program is said to get."""
    monkeypatch.setattr(Judge, "_shorter_us", lambda *_: 1e9)
    for kernel in kernels():
        program = part_of(whole_program(), frozenset(kernel.stores), frozenset(kernel.reads))
        assert kernel.replaced.us == pytest.approx(price_xla(program, MOSAIC_GPU.device).us)


def whole_program():
    return convert(flatten(jax.make_jaxpr(decode)(Q, K, V))).program


def test_a_part_of_a_program_computes_its_outputs_from_its_inputs():
    program = whole_program()
    first, *_, last = (n.name for n in program.nests if isinstance(n, Nest) and n.is_reduction)
    part = verify(part_of(program, frozenset({last}), frozenset({first})))
    assert part.outputs == (last,) and first in {t.name for t in part.inputs}
    assert {n.name for n in part.nests} < {n.name for n in program.nests} - {first}


@pytest.mark.parametrize(
    ("timed", "options", "compared"), [(True, {}, True), (False, {}, False), (True, {"warps": 4}, False)]
)
def test_trees_are_compared_only_by_a_clock_and_unless_the_user_says_how(monkeypatch, timed, options, compared):
    seen = []
    original = grouping._exchanged
    monkeypatch.setattr(grouping, "_exchanged", lambda *args: seen.append(args[3]) or original(*args))
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 4096), (4096, 4096)))
    target = MOSAIC_GPU.judged(timed=timed, one_device=True)
    jaxpr = jax.make_jaxpr(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v))(x, w, w)
    make_plan(jaxpr, target, FuseOptions(price=True, **options))
    assert any(seen) == compared


def test_what_was_asked_for_stays(monkeypatch):
    """A strict user gets a kernel for reductions that depend on each other, whatever is exchanged."""
    seen = []
    original = grouping._exchanged

    def exchanged(graph, chosen, *others):
        found = original(graph, chosen, *others)
        seen.append((chosen, found))
        return found

    monkeypatch.setattr(grouping, "_exchanged", exchanged)

    def normalised(x):
        return jax.nn.softmax(x, -1)

    x = jax.ShapeDtypeStruct((64, 300), jnp.float32)
    plan = make_plan(jax.make_jaxpr(normalised)(x), MOSAIC_GPU, FuseOptions(price=True, strict=True))
    covers = [frozenset().union(*(c.covers for c in side)) for pair in seen for side in pair]
    assert seen and covers[-1] >= covers[-2]
    assert len(plan.kernels) == 1
