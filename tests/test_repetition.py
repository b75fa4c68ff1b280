"""Equal parts of a program are planned once, and their plans are those that each would get by itself."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import form_choice, repetition
from pallasfuse.form_choice import Placements, choose_groups
from pallasfuse.fusion.segments import MOST_REDUCTIONS
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import plan_converted
from pallasfuse.price.kernel import price_kernel
from pallasfuse.targets import find
from tests.programs_by_name import PROGRAMS as SMALL
from tests.users_programs import PROGRAMS

FEATURES, HEADS = 64, 2


def norm(x, gain):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def layer(weights, x, visible):
    h = norm(x, weights["gain"])
    q, k, v = (jnp.einsum("sd,dhe->hse", h, weights[n].reshape(FEATURES, HEADS, -1)) for n in "qkv")
    scores = jnp.where(visible, jnp.einsum("hqe,hke->hqk", q, k), -jnp.inf)
    mixed = jnp.einsum("hqk,hke->qhe", jax.nn.softmax(scores, -1), v).reshape(x.shape)
    x = x + mixed @ weights["o"]
    return x + jax.nn.gelu(norm(x, weights["gain2"]) @ weights["up"]) @ weights["down"]


def model(layers, x):
    visible = jnp.tril(jnp.ones((len(x), len(x)), bool))
    for weights in layers:
        x = layer(weights, x, visible)
    return norm(x, layers[0]["gain"])


def arguments(count, length=1024):
    shapes = {n: (FEATURES, FEATURES) for n in "qkvo"} | {"up": (FEATURES, 128), "down": (128, FEATURES)}
    weights = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    weights |= {n: jax.ShapeDtypeStruct((FEATURES,), jnp.float32) for n in ("gain", "gain2")}
    return [weights] * count, jax.ShapeDtypeStruct((length, FEATURES), jnp.float32)


@pytest.fixture
def calls(monkeypatch):
    """How often the steps that take long were made."""
    counted = Counter()

    def watch(name):
        original = getattr(repetition, name)

        def counting(*args, **kwargs):
            counted[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(repetition, name, counting)

    for name in ("group_segment", "placed_on", "price_kernel"):
        watch(name)
    return counted


def test_more_equal_layers_derive_and_price_nothing_more(calls):
    def made(count):
        calls.clear()
        plan = pf.fuse(model, target="xla").trace(*arguments(count)).fuse().tile().plan
        assert len(plan.kernels) >= count
        return dict(calls)

    assert made(4) == made(8) == made(20)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("target", ["xla", "triton", "mosaic_gpu"])
def test_equal_layers_get_equal_plans(target):
    count, length = 6, 4096
    plan = pf.fuse(model, target=target).trace(*arguments(count, length)).fuse().tile().plan

    def decided(kernel):
        schedule = kernel.schedule
        tiles = [(a.extent, t) for a, t in schedule.grid], (schedule.rolled.extent, schedule.rolled_tile)
        hints = schedule.warps, schedule.stages, schedule.parts
        return kernel.strategy, str(tiles), hints, kernel.target.name, kernel.price, kernel.replaced

    of_layer = [k for k in plan.kernels if len(k.group.folds) >= 3]
    assert of_layer and all(n == count for n in Counter(map(decided, of_layer)).values())
    assert len({k.name for k in of_layer}) == len(of_layer)
    lines = Counter((f.operation, f.source) for f in plan.fallbacks if f.operation == "dot_general")
    assert all(n % count == 0 for n in lines.values())


def test_names_and_lines_are_those_of_each_layer():
    def function(x, y):
        a = model_of_softmaxes(x)
        b = model_of_softmaxes(y)
        return a, b

    def model_of_softmaxes(x):
        for _ in range(MOST_REDUCTIONS):
            x = jnp.sin(x) + jax.nn.softmax(x, -1)
        return x

    x = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
    plan = pf.fuse(function, target="triton", options=FuseOptions(price=False)).trace(x, x).fuse().tile().plan
    nests = {n.name: n for n in plan.program.nests}
    folds = [f for k in plan.kernels for f in k.group.folds]
    assert len(folds) == len({f.name for f in folds}) == 4 * MOST_REDUCTIONS
    for fold in folds:
        assert fold.nest.source == nests[fold.name].source and fold.nest.axes == nests[fold.name].axes
    assert "«" not in str(plan) + plan.summary


@pytest.fixture
def same_plans(monkeypatch):
    """Compares a plan that is made in canonical names, and one that is renamed from it, with one in the program's own names."""

    def check(function, arguments, target):
        options = FuseOptions(price=False)  # more is fused
        converted = convert(jax.make_jaxpr(function)(*arguments))
        plain = plan_converted(converted, find(target), options)
        planned = repetition.Planned()

        def grouped(program, places, *, along, to_save_us):
            places.planned = planned
            return repetition._Part(program, places, along).grouping()

        monkeypatch.setattr(form_choice, "grouped", grouped)
        for _ in range(2):
            again = plan_converted(converted, find(target), options)
            assert len(planned.segments) == 1 or "planning failed" in str(plain)
            assert str(again) == str(plain) and again.summary == plain.summary
            assert again.conditions == plain.conditions and again.exceptions == plain.exceptions
            assert [(k.price, k.replaced) for k in again.kernels] == [(k.price, k.replaced) for k in plain.kernels]

    return check


@pytest.mark.sampled(16, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "triton", "mosaic_gpu"])
@pytest.mark.parametrize("name", SMALL)
def test_a_plan_in_canonical_names_is_the_same(name, target, same_plans):
    case = SMALL[name]
    same_plans(case.function, [jax.ShapeDtypeStruct(s, jnp.dtype(case.dtype)) for s in case.shapes], target)


@pytest.mark.sampled(80, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "triton"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_users_plan_in_canonical_names_is_the_same(name, target, same_plans):
    program = PROGRAMS[name]
    same_plans(program.function, program.arrays(), target)


def test_tiles_that_are_asked_for_by_name_are_taken(calls):
    x = jax.ShapeDtypeStruct((64, 4096), jnp.float32)

    def function(x):
        for _ in range(MOST_REDUCTIONS):
            x = jnp.sin(x) + jax.nn.softmax(x, -1)
        return x

    options = FuseOptions(price=False, tiles=(("j", 128),))
    plan = pf.fuse(function, target="xla", options=options).trace(x).fuse().tile().plan
    assert plan.kernels and all(k.schedule.rolled_tile == 128 for k in plan.kernels)


def test_axes_whose_reductions_belong_in_kernels_are_part_of_what_is_equal():
    def rows(x):
        for _ in range(MOST_REDUCTIONS):
            x = jnp.sort(x - x.sum(1, keepdims=True))  # one kernel for each sum is no faster
        return x

    shape = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    converted = convert(jax.make_jaxpr(lambda x, y: (rows(x), rows(y)))(shape, shape))
    places = Placements(converted, find("xla"), FuseOptions(price=True))
    assert not choose_groups(places).groups
    axes = {a for n in converted.program.nests for a in getattr(n, "reduced", ())}
    (one, *_) = others = sorted(axes)
    assert len(others) > 1
    groups = choose_groups(places, along=frozenset({one})).groups
    assert groups and all(g.rolled == one for g in groups)


@pytest.mark.parametrize("target", ["xla", "triton"])
def test_a_kernel_of_equal_layers_does_not_depend_on_the_names_of_axes(target):
    """Masks over data bound its loop, row by row of each document; names of more than one letter sort otherwise than others."""

    def attended(x, w, visible):
        q, k, v = jnp.einsum("bnd,edgh->ebgnh", x, w)
        scores = jnp.where(visible[:, None], jnp.einsum("bgnh,bgmh->bgnm", q, k), -jnp.inf)
        return x + jnp.einsum("bgnm,bgmh->bngh", jax.nn.softmax(scores, -1), v).reshape(x.shape)

    def function(others, x, weights, lengths, seen):
        visible = seen[None] & (jnp.arange(x.shape[1]) < lengths[:, None, None])
        for w in weights:
            x = attended(x, w, visible)
        return [o.sum() for o in others], x

    others = [jax.ShapeDtypeStruct((100 + n, 200 + n), jnp.float32) for n in range(15)]
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 2048, 32), (3, 32, 4, 8)))
    lengths, seen = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((2048, 2048), bool)
    report = pf.verify(pf.fuse(function), others, x, [w] * 2, lengths, seen, target=target, delta=1e-3)
    assert report.equivalent, str(report)
    assert any(p.program.ranges for k in report.plan.kernels for p in k.phases)


def test_a_program_with_a_name_like_a_canonical_one_is_planned_plainly(monkeypatch):
    def refuse(program):
        raise repetition.UnknownNameError("«")

    shapes = arguments(4)
    expected = str(pf.fuse(model, target="xla").trace(*shapes).fuse().tile().plan)
    monkeypatch.setattr(repetition, "canonical", refuse)
    assert str(pf.fuse(model, target="xla").trace(*shapes).fuse().tile().plan) == expected


def test_equal_kernels_are_calls_of_one_function():
    """It is traced and lowered once, and computes what the plain function does with the weights of each layer."""
    shapes = arguments(4, length=96)
    fused = pf.fuse(model, options=FuseOptions(target="xla", price=False))
    plan = fused.explain(*shapes)
    assert len(plan.kernels) >= 4 and plan.repeated
    several = [k for k in plan.kernels if k.original in plan.repeated]
    text = fused.lower(*shapes).as_text()
    assert text.count("call @kernel") == len(several)
    assert text.count("func.func private @kernel") == len(plan.repeated) < len(several)
    compiled = (
        fused.lower(*shapes).compile().as_text()
    )  # loops are optimised once, too: they are not copied into every layer
    assert compiled.count("to_apply=%kernel") == len(several)
    keys = iter(jax.random.split(jax.random.key(3), 1000))
    values = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype) / 8, shapes)
    expected = jax.jit(model)(*values)
    assert jnp.abs(fused(*values) - expected).max() <= 1e-4 * jnp.abs(expected).max()


def test_a_failure_among_rivals_leaves_the_kernel_and_says_so(monkeypatch):
    monkeypatch.setattr(repetition, "with_rivals", lambda *args: 1 / 0)
    length = jax.ShapeDtypeStruct((512, FEATURES), jnp.float32)
    with pytest.warns(UserWarning, match="other ways to run a kernel .*ZeroDivisionError"):
        plan = pf.fuse(lambda q, k: jax.nn.softmax(q @ k.T, -1) @ k).explain(length, length)
    assert len(plan.kernels) == 1


def test_forms_of_a_program_share_what_they_have_in_common(calls):
    """A group, or a segment, that is the same in another form is not planned again."""
    converted = convert(jax.make_jaxpr(model)(*arguments(4)))
    options = FuseOptions(price=True)
    first = Placements(converted, find("triton"), options)
    groups = choose_groups(first).groups
    before = dict(calls)
    second = Placements(converted, find("triton"), options, planned=first.planned)
    assert choose_groups(second).groups == groups
    assert before["group_segment"] and before["placed_on"]
    assert all(calls[name] == before[name] for name in ("group_segment", "placed_on"))


def test_equal_groups_have_one_price_which_is_that_of_each():
    """Groups of the two layers differ by names: the second one's kernel is renamed when it is asked for, and costs the same."""
    converted = convert(
        jax.make_jaxpr(lambda x, y: (jax.nn.softmax(x, -1), jax.nn.softmax(y, -1)))(*[arguments(1)[1]] * 2)
    )
    places = Placements(converted, find("triton"), FuseOptions())
    grouping = choose_groups(Placements(converted, find("triton"), FuseOptions(price=False)))
    first, second = grouping.groups
    found = {places.price(g) for g in (first, second)}
    assert len(found) == 1
    for group in (first, second):
        placed = places.placed(group)
        assert price_kernel([(p.program, p.target) for p in placed.phases]) in found
        assert {t.name for t in placed.phases[0].program.outputs} == {n.name for n in group.outputs}


# --- parts that are planned apart, judged together


@pytest.fixture
def parted(monkeypatch):
    """Two entropies, planned as two parts of one program; the price of the whole is that of its parts."""
    monkeypatch.setattr("pallasfuse.fusion.segments.MOST_REDUCTIONS", 5)

    def entropy(x):
        p = jax.nn.softmax(x, -1)
        return -(p * jax.nn.log_softmax(x, -1)).sum(-1)

    shapes = [jax.ShapeDtypeStruct((n, 32768), jnp.float32) for n in (4096, 2048)]
    converted = convert(jax.make_jaxpr(lambda x, y: (entropy(jnp.sin(x)), entropy(jnp.cos(y))))(*shapes))
    return Placements(converted, find("mosaic_gpu"), FuseOptions(check=False, price=True))


def promising(us, monkeypatch):
    """Every part says that each of its groups replaces kernels of XLA that take so long."""
    original = repetition.joined

    def joined(parts):
        found = original(parts)
        return replace(found, replaced=tuple(replace(r, us=us) for r in found.replaced))

    monkeypatch.setattr(repetition, "joined", joined)


def test_parts_that_save_what_they_promise_are_not_judged_again(parted, monkeypatch):
    monkeypatch.setattr(repetition, "losing_together", lambda *_: pytest.fail("it saves what it promises"))
    promising(1e-3, monkeypatch)
    assert len(choose_groups(parted).groups) >= 2


def test_a_group_that_costs_more_elsewhere_is_left_with_the_reason(parted, monkeypatch):
    promising(1e6, monkeypatch)
    kept = choose_groups(parted)
    assert len(kept.groups) == len(kept.replaced) >= 2  # judged again, and none loses
    assert all(0.0 < price.us < 1e6 for price in kept.replaced)  # as of the whole program

    monkeypatch.setattr(repetition, "losing_together", lambda _, groups, most: [(groups[0], "it costs more elsewhere")])
    grouping = choose_groups(Placements(parted.converted, parted.target, parted.options))
    assert [g.name for g in grouping.groups] == [g.name for g in kept.groups[1:]]
    assert len(grouping.replaced) == len(grouping.groups)
    left = {entry.name for entry in grouping.left if entry.reason == "it costs more elsewhere"}
    assert left == {n.name for n in kept.groups[0].nests if n.is_reduction} != set()


def test_what_saves_nothing_all_together_is_left_to_xla(parted, monkeypatch):
    promising(1e6, monkeypatch)
    monkeypatch.setattr(repetition, "predicted_us", lambda *_: 1e9)
    grouping = choose_groups(parted)
    assert grouping.groups == () == grouping.replaced
    assert {entry.reason for entry in grouping.left} >= {"its kernel costs the whole program more than it saves"}
    assert len({entry.name for entry in grouping.left}) == len(grouping.left)


def one_by_one(gains, most_asked, monkeypatch):
    """The groups that are chosen where each saves so many microseconds, and how often a set of them was asked for."""
    asked = []

    def predicted_us(_, chosen):
        asked.append(chosen)
        return 100.0 - sum(gains[g] for g in chosen)

    monkeypatch.setattr(repetition, "predicted_us", predicted_us)
    places = SimpleNamespace(judge=SimpleNamespace(apart_us=lambda _: 100.0))
    return "".join(repetition._one_by_one(places, list(gains), most_asked)), len(asked)


def test_groups_that_pay_are_added_one_by_one(monkeypatch):
    gains = {"a": 2.0, "b": -1.0, "c": 3.0, "d": 0.0}
    assert one_by_one(gains, 100, monkeypatch) == ("ac", 4 + 3 + 2)
    assert one_by_one(gains, 4, monkeypatch) == ("ac", 4 + 3)  # a second round begins within the limit
    assert one_by_one(gains, 3, monkeypatch) == ("c", 4)
    assert one_by_one({"a": -1.0}, 100, monkeypatch) == ("", 1)
    assert one_by_one({"a": 1.0, "b": 1.0}, 100, monkeypatch)[0] == "ab"


def test_groups_that_pay_stay_where_all_that_are_left_do_not(parted, monkeypatch):
    promising(1e6, monkeypatch)
    names = [g.name for g in choose_groups(parted).groups]
    whole_us = parted.judge.apart_us([])
    gains = dict.fromkeys(names, -1.0) | {names[0]: 0.5}
    monkeypatch.setattr(repetition, "losing_together", lambda *_: [])
    monkeypatch.setattr(repetition, "predicted_us", lambda _, chosen: whole_us - sum(gains[g.name] for g in chosen))
    grouping = choose_groups(Placements(parted.converted, parted.target, parted.options))
    assert [g.name for g in grouping.groups] == names[:1] and len(grouping.replaced) == 1
    left = {e.name for e in grouping.left if e.reason == "its kernel costs the whole program more than it saves"}
    assert left


def test_pieces_of_which_each_needs_the_others_lose_together(parted, monkeypatch):
    """Two kernels for each entropy: XLA would compute all of it for what one of them leaves, and does so in less time than both."""
    monkeypatch.setattr("pallasfuse.fusion.segments.MOST_REDUCTIONS", 3)
    assert choose_groups(parted).groups == ()


def test_large_programs_are_not_judged_as_a_whole(parted, monkeypatch):
    monkeypatch.setattr(repetition, "_MOST_PRICED", 1)
    monkeypatch.setattr(repetition, "losing_together", lambda *_: pytest.fail("it takes too long"))
    promising(1e6, monkeypatch)
    assert len(choose_groups(parted).groups) >= 2


def test_a_tensor_that_one_part_reads_and_another_part_turns_costs_where_it_is_written(monkeypatch):
    """A small kernel reads sums of a product in another order than the product has: all of it is written once more for that."""

    def program(a, b, c):
        products = jnp.tanh(jnp.einsum("bmk,bkn->bmn", a, b))
        sums = products.reshape(64, 16, 16, 256).sum((1, 3)) + c  # [64, 16]: rows of which others lie between
        return jax.nn.softmax(sums.reshape(16, 64), -1), products.max()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 256, 64), (64, 64, 256), (64, 16))]
    converted = convert(jax.make_jaxpr(program)(*shapes))

    def planned(most):
        monkeypatch.setattr("pallasfuse.fusion.segments.MOST_REDUCTIONS", most)
        placements = Placements(converted, find("mosaic_gpu"), FuseOptions(check=False, price=True))
        return {g.name for g in choose_groups(placements).groups}

    whole, parted = planned(MOST_REDUCTIONS), planned(1)
    assert parted <= whole
    monkeypatch.setattr(repetition, "paying_together", lambda found, _: found)
    assert planned(1) - whole  # what the parts alone would take
