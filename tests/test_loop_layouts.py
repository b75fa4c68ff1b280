"""The layouts of loops that are kernels are compared when a user tunes, and the fastest is used from then on."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import loop_layouts, written_out
from pallasfuse.isolation import apart
from pallasfuse.loop_calls import loops_as_kernels
from pallasfuse.measure import Measured
from pallasfuse.recurrences import AsKernel, kernel_of, kernels_of
from pallasfuse.subjects import XLA
from pallasfuse.targets import TRITON

OPTIONS = pf.FuseOptions(target="triton", check=False, price=True)
X = np.random.default_rng(0).normal(size=(256, 512)).astype("float32")


def decayed(x):
    """Each column's sum, of which every step forgets a tenth."""
    return lax.scan(lambda s, row: (0.9 * s + row, 0.9 * s + row), jnp.zeros(x.shape[1:]), x)[1]


def loop_of(function, *args):
    (loop,) = (e for e in jax.make_jaxpr(function)(*args).eqns if e.primitive.name == "scan")
    return loop


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def times(monkeypatch):
    """Installs a clock: a layout takes what a function says of its name, or fails with a text; XLA's own loop takes 100 us."""

    def install(of):
        raced = []

        def compare(functions, avals, device, **_):
            raced.append(list(functions))
            found = {name: 100.0 if name == XLA else of(name) for name in functions}
            ran = {n: t for n, t in found.items() if not isinstance(t, str)}
            winner = min(ran, key=ran.__getitem__)
            errors = {n: t for n, t in found.items() if isinstance(t, str)}
            return Measured(ran, winner if ran[winner] < 100.0 else XLA, frozenset(), errors)

        monkeypatch.setattr(loop_layouts, "compare", compare)
        return raced

    return install


def test_layouts_are_listed_by_their_price():
    loop = loop_of(decayed, X)
    found = kernels_of(loop, TRITON.device)
    assert len({k.layout_name for k in found}) == len(found) > 1
    cheapest = kernel_of(loop, TRITON.device)
    assert cheapest.layout_name == found[0].layout_name and cheapest.price.us == min(k.price.us for k in found)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_loop_has_the_layout_that_was_fastest(place):
    loop = loop_of(decayed, X)
    wanted = kernels_of(loop, TRITON.device)[place].layout_name
    run = AsKernel(TRITON.device, fastest=lambda _: wanted)(loop)
    (found,) = loops_as_kernels(jax.make_jaxpr(run)(*(v.aval for v in loop.invars)).jaxpr)
    assert found.layout_name == wanted


def test_a_layout_that_nobody_has_any_more_is_not_asked_for():
    loop = loop_of(decayed, X)
    run = AsKernel(TRITON.device, fastest=lambda _: "of an older version")(loop)
    (found,) = loops_as_kernels(jax.make_jaxpr(run)(*(v.aval for v in loop.invars)).jaxpr)
    assert found.layout_name == kernel_of(loop, TRITON.device).layout_name


def test_a_loop_that_xla_runs_as_fast_is_left_to_it():
    assert AsKernel(TRITON.device, fastest=lambda _: "")(loop_of(decayed, X)) is None


def test_tuning_finds_the_fastest_layout_and_other_functions_have_it_too(times):
    loop = loop_of(decayed, X)
    planned, *_, wanted = [k.layout_name for k in kernels_of(loop, TRITON.device)[:5]]
    raced = times(lambda way: 20.0 if way == wanted else 50.0)
    fused = pf.fuse(decayed, options=OPTIONS)
    (before,) = fused.explain(X).loops
    assert before.layout_name == planned
    tuned = pf.tune(fused, X, progress=False)
    assert [x.layout_name for x in tuned.plan.loops] == [wanted]
    (best,) = (c for c in tuned.candidates if c.won)
    assert (best.schedule, best.measured_us, best.xla_us) == (wanted, 20.0, 100.0)
    assert "XLA's own 100 us" in str(tuned)
    first, *more = raced
    assert first[:2] == [XLA, planned] and all(
        names[0] == XLA and len(names) == len(set(names)) <= 5 for names in raced
    )
    assert sum(len(names) - 1 for names in raced) == len(tuned.candidates) + len(more)  # the best races again
    assert [x.layout_name for x in fused.explain(X).loops] == [wanted]
    again = pf.fuse(lambda x: 2.0 * decayed(x), options=OPTIONS)
    assert [x.layout_name for x in again.explain(X).loops] == [wanted]
    races = len(raced)
    pf.tune(again, X, progress=False)
    assert len(raced) == races  # it is known


def test_without_a_faster_layout_the_loop_is_xla_s_own(times):
    times(lambda _: 120.0)
    fused = pf.fuse(decayed, options=OPTIONS)
    assert fused.explain(X).loops
    assert not pf.tune(fused, X, progress=False).plan.loops
    assert not fused.explain(X).loops


def test_layouts_that_fail_are_named(times):
    failing = kernel_of(loop_of(decayed, X), TRITON.device).layout_name
    times(lambda way: "out of registers" if way == failing else 50.0)
    tuned = pf.tune(pf.fuse(decayed, options=OPTIONS), X, progress=False)
    assert {c.schedule: c.error for c in tuned.candidates if c.error} == {failing: "out of registers"}
    (loop,) = tuned.plan.loops
    assert loop.layout_name != failing


def test_what_could_not_be_measured_changes_nothing(monkeypatch):
    monkeypatch.setattr(loop_layouts, "compare", lambda *_, **__: Measured(skipped="no memory is free"))
    fused = pf.fuse(decayed, options=OPTIONS)
    (before,) = fused.explain(X).loops
    tuned = pf.tune(fused, X, progress=False)
    assert [x.layout_name for x in tuned.plan.loops] == [before.layout_name] and not tuned.candidates


def test_with_the_clock_all_ways_are_timed():
    """On a CPU every layout is XLA's own loop."""
    loop, device = kernel_of(loop_of(decayed, X), TRITON.device), jax.devices()[0]
    ways = apart(lambda: loop_layouts.measure(loop, TRITON.device, device, most=2, at_once=2), device)
    assert len(ways) == 2 and loop.layout_name in ways
    record = loop_layouts.known(loop, TRITON.device)
    assert all(entry["us"] > 0 < entry["xla_us"] for entry in record["ways"].values())
    assert record["winner"] in ("", *ways)


def test_no_time_is_left(times):
    raced = times(lambda _: 50.0)
    tuned = pf.tune(pf.fuse(decayed, options=OPTIONS), X, seconds=0.0, progress=False)
    (unfinished,) = tuned.unfinished
    assert not raced and unfinished.startswith("loop_") and "test_loop_layouts.py" in unfinished


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: out of memory", "an operand is too large"])
def test_where_no_layout_runs_nothing_is_settled(times, error):
    times(lambda _: error)
    fused = pf.fuse(decayed, options=OPTIONS)
    assert pf.tune(fused, X, progress=False).plan.loops
    assert not loop_layouts.known(kernel_of(loop_of(decayed, X), TRITON.device), TRITON.device)


def test_a_shortage_of_memory_is_forgotten(times):
    short = kernel_of(loop_of(decayed, X), TRITON.device).layout_name
    times(lambda name: "RESOURCE_EXHAUSTED: out of memory" if name == short else 50.0)
    tuned = pf.tune(pf.fuse(decayed, options=OPTIONS), X, progress=False)
    assert tuned.candidates and short not in {c.schedule for c in tuned.candidates}


def test_loops_are_told_apart_and_equal_ones_measured_once(times):
    def function(x):
        return decayed(x), decayed(x + 1.0), decayed(x[:, :256])

    raced = times(lambda _: 50.0)
    tuned = pf.tune(pf.fuse(function, options=OPTIONS), X, progress=False)
    assert len(tuned.plan.loops) == 3
    assert len(raced) == 2 * 3  # of eight layouts three at a time
    assert len({c.kernel for c in tuned.candidates}) == sum(c.won for c in tuned.candidates) == 2
    assert tuned.predicted_xla_us.keys() == {c.kernel for c in tuned.candidates}


@pytest.fixture
def forms_win(monkeypatch):
    """A clock of whole programs says that XLA runs any other form of them in half the time. Returns the races."""
    raced = []

    def compare(functions, avals, device, **_):
        raced.append(list(functions))
        found = {name: 200.0 if name == XLA else 100.0 for name in functions}
        ways = [name for name in functions if name != XLA]
        return Measured(found, ways[0], frozenset(ways))

    monkeypatch.setenv("PALLASFUSE_CHECK", "1")
    monkeypatch.setattr(written_out, "compare", compare)
    return raced


def test_loops_of_forms_that_a_clock_chooses_are_tuned_before_it_chooses(times, forms_win):
    wanted = kernels_of(loop_of(decayed, X), TRITON.device)[4].layout_name
    times(lambda way: 20.0 if way == wanted else 50.0)
    fused = pf.fuse(decayed, options=replace(OPTIONS, check=True))
    assert not fused.explain(X).loops  # no clock has been asked
    tuned = pf.tune(fused, X, progress=False)
    assert [x.layout_name for x in tuned.plan.loops] == [wanted]
    assert [c.schedule for c in tuned.candidates if c.won] == [wanted]
    assert forms_win
    races = len(forms_win)
    assert [x.layout_name for x in fused.explain(X).loops] == [wanted]
    again = pf.tune(fused, X, progress=False)
    assert [x.layout_name for x in again.plan.loops] == [wanted] and len(forms_win) == races


def test_a_loop_whose_forms_lose_is_xla_s_own_after_it_is_tuned(times, monkeypatch):
    times(lambda _: 50.0)
    monkeypatch.setenv("PALLASFUSE_CHECK", "1")
    monkeypatch.setattr(
        written_out, "compare", lambda functions, *_, **__: Measured(dict.fromkeys(functions, 100.0), XLA)
    )
    tuned = pf.tune(pf.fuse(decayed, options=replace(OPTIONS, check=True)), X, progress=False)
    assert tuned.candidates and not tuned.plan.loops


def test_no_form_is_timed_when_the_time_is_over(times, forms_win):
    times(lambda _: 50.0)
    tuned = pf.tune(pf.fuse(decayed, options=replace(OPTIONS, check=True)), X, seconds=0.0, progress=False)
    assert tuned.unfinished and not forms_win and not tuned.plan.loops


def test_a_loop_of_which_the_user_leaves_something_to_xla_is_not_tuned(times, forms_win):
    def function(x):
        with jax.named_scope("mine"):
            return decayed(x)

    raced = times(lambda _: 50.0)
    tuned = pf.tune(pf.fuse(function, options=replace(OPTIONS, check=True, exclude=("mine",))), X, progress=False)
    assert not tuned.plan.loops and not raced
    assert pf.tune(pf.fuse(function, options=replace(OPTIONS, check=True)), X, progress=False).plan.loops
