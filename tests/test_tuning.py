"""Tuning, with times that are made up, and once with the clock."""

import io
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import check, executables, primitive, store, tuning, written_out
from pallasfuse.measure import Measured
from pallasfuse.options import FuseOptions
from pallasfuse.subjects import XLA
from pallasfuse.verdicts import WRITTEN_OUT
from tests.check.clock import timed_by
from tests.programs_by_name import attention, softmax, variance

Q = np.random.default_rng(0).normal(size=(512, 32)).astype("float32")


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PALLASFUSE_CHECK", "1")


class Clock:
    """Times by the text of a way: `times` maps a part of the text to microseconds, a string is an error."""

    def __init__(self, times, default=200.0, xla=100.0):
        self.times, self.default, self.xla = times, default, xla
        self.raced = []

    def __call__(self, functions, avals, device, *, budget_s, expected_us=None, **_):
        names = [n for n in functions if n != XLA]
        self.raced.append(names)
        found = {n: next((t for part, t in self.times.items() if part in n), self.default) for n in names}
        timed = {XLA: self.xla} | {n: t for n, t in found.items() if not isinstance(t, str)}
        faster = frozenset(n for n, t in timed.items() if t < self.xla)
        winner = min(timed, key=timed.__getitem__)
        return Measured(timed, winner, faster, {n: t for n, t in found.items() if isinstance(t, str)}, seconds=0.1)


@pytest.fixture
def clock(monkeypatch):
    def install(times, **more):
        made = Clock(times, **more)
        monkeypatch.setattr(tuning, "compare", made)
        monkeypatch.setattr(written_out, "compare", Clock({}))  # no other form of a program is faster
        timed_by(monkeypatch, made)
        return made

    return install


def same(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_the_fastest_way_is_used_from_then_on(clock):
    made = clock({"rolled_tile=256": 50.0})
    fused = pf.fuse(attention)
    found = pf.tune(fused, Q, Q, Q)
    (kernel,) = found.plan.kernels
    assert kernel.schedule.rolled_tile == 256
    assert len([c for c in found.candidates if c.won]) == 1
    assert {c.measured_us for c in found.candidates} == {50.0, 200.0}
    races = len(made.raced)
    same(fused(Q, Q, Q), attention(Q, Q, Q))
    later = pf.fuse(attention)
    assert later.explain(Q, Q, Q).kernels[0].schedule == kernel.schedule
    assert "tuned" in str(later.explain(Q, Q, Q))
    same(later(Q, Q, Q), attention(Q, Q, Q))
    assert len(made.raced) == races  # nothing is left to be checked


def test_what_was_compiled_before_is_compiled_again(clock, monkeypatch):
    clock({"rolled_tile=512": 90.0, "rolled_tile=256": 50.0})
    fused = pf.fuse(attention)
    fused(Q, Q, Q)
    lowered = []
    original = check.check
    monkeypatch.setattr(
        check, "check", lambda plan, device, **how: lowered.append(original(plan, device, **how)) or lowered[-1]
    )
    pf.tune(fused, Q, Q, Q)
    fused(Q, Q, Q)
    assert lowered[-1].kernels[0].schedule.rolled_tile == 256


def test_xla_wins_where_nothing_is_faster(clock):
    clock({})
    found = pf.tune(pf.fuse(attention), Q, Q, Q)
    assert found.plan.kernels == ()
    assert "XLA's own 100 us (used)" in str(found)


def test_failures_are_kept_and_not_tried_again(clock):
    made = clock({"rolled_tile=256": "XlaError: shared memory"}, default=50.0)
    fused = pf.fuse(attention)
    first = pf.tune(fused, Q, Q, Q)
    assert [c.error for c in first.candidates if c.error] == ["XlaError: shared memory"]
    assert first.candidates[-1].error  # the slowest comes last, and what fails behind it
    assert "fails: XlaError: shared memory" in str(first)
    made.raced.clear()
    pf.tune(fused, Q, Q, Q)
    assert not any("rolled_tile=256" in n for names in made.raced for n in names)


def test_equal_kernels_are_tuned_once(clock):
    made = clock({}, default=50.0)

    def function(x):
        return softmax(jnp.sort(x, axis=-1)), softmax(jnp.sort(-x, axis=-1))

    found = pf.tune(pf.fuse(function), np.ones((64, 256), np.float32))
    assert len({c.kernel for c in found.candidates}) == 1
    assert len(found.plan.kernels) == 2
    assert made.raced


def test_kernels_of_a_form_that_a_clock_has_chosen_are_tuned(clock, monkeypatch):
    clock({}, default=50.0)
    forms = Clock({}, default=50.0)
    monkeypatch.setattr(written_out, "compare", forms)
    function = lambda x: softmax(jnp.sort(x, axis=-1)) + softmax(jnp.cumsum(x, axis=-1))  # noqa: E731
    found = pf.tune(pf.fuse(function), np.ones((64, 256), np.float32))
    assert forms.raced and found.plan.written_out and found.plan.kernels
    names = {k.name for k in found.plan.kernels}
    assert {c.kernel for c in found.candidates} == names
    as_written = (
        pf.fuse(function, options=FuseOptions(check=False))
        .trace(np.ones((64, 256), np.float32))
        .fuse(timed=True)
        .tile()
    )
    assert names.isdisjoint(k.name for k in as_written.plan.kernels)
    (verdict,) = (v for v in found.plan.verdicts if v.subject == WRITTEN_OUT)
    assert not verdict.remembered and "known from before" not in str(verdict)


def test_a_form_may_win_and_kernels_gain_more_without_it(clock, monkeypatch):
    clock({}, default=50.0)
    monkeypatch.setattr(written_out, "compare", Clock({}, default=50.0))
    monkeypatch.setattr(primitive, "cannot_win_as_it_is", lambda *_: False)
    monkeypatch.setattr(primitive, "is_faster_as_it_is", lambda *_, **__: True)
    monkeypatch.setattr(primitive.FusedCall, "_may_lose_kernels", lambda *_: True)
    found = pf.tune(pf.fuse(lambda x: softmax(jnp.sort(x, axis=-1))), np.ones((64, 256), np.float32))
    (verdict,) = (v for v in found.plan.verdicts if v.subject == WRITTEN_OUT)
    assert not found.plan.written_out and not verdict.kept and "gain more as it is" in verdict.reason
    assert not verdict.remembered and verdict.seconds > 0


def test_forms_that_fail_leave_the_program_as_it_is(clock, monkeypatch):
    clock({"rolled_tile=256": 50.0})

    def fails(*_, **__):
        raise RuntimeError("a rule fails")

    monkeypatch.setattr(written_out, "forms", fails)
    with pytest.warns(UserWarning, match="a rule fails"):
        found = pf.tune(pf.fuse(attention), Q, Q, Q)
    assert found.plan.kernels[0].schedule.rolled_tile == 256


def test_a_strict_function_is_tuned_as_it_is_written(clock, monkeypatch):
    clock({}, default=50.0)
    forms = Clock({}, default=50.0)
    monkeypatch.setattr(written_out, "compare", forms)
    found = pf.tune(pf.fuse(softmax, options=FuseOptions(strict=True)), np.ones((64, 256), np.float32))
    assert found.candidates and not forms.raced and not found.plan.written_out


def test_what_forms_compile_ahead_is_compiled_once(monkeypatch):
    """By the clock: operations that are compiled together are compared one after the other."""
    compiled = []
    monkeypatch.setattr(
        executables, "_executable", lambda lowered: compiled.append(lowered.as_text()) or lowered.compile()
    )
    pf.tune(pf.fuse(lambda x: jnp.sort(x, axis=-1) + jnp.cumsum(x, axis=-1)), np.ones((64, 256), np.float32))
    assert compiled and len(compiled) == len(set(compiled))


def test_the_time_given_is_kept(clock, monkeypatch):
    made = clock({}, default=50.0)
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow(*args, **kwargs):
        now[0] += 10.0
        return made(*args, **kwargs)

    monkeypatch.setattr(tuning, "compare", slow)

    def function(x, y):
        return softmax(x), variance(y)

    arguments = np.ones((64, 256), np.float32), np.ones((9, 31), np.float32)
    found = pf.tune(pf.fuse(function), *arguments, seconds=5.0)
    assert len(made.raced) == 1
    assert len(found.unfinished) == 1
    assert "no time was left" in str(found)
    assert found.seconds == 10.0


def test_named_targets_are_tuned_too(clock):
    clock({"rolled_tile=256": 150.0})  # slower than XLA's, and the fastest of those that were asked for
    fused = pf.fuse(attention, target="xla")
    pf.tune(fused, Q, Q, Q)
    settled = check.settled(fused.planned(Q, Q, Q)[0], jax.devices()[0])
    assert settled.kernels[0].schedule.rolled_tile == 256
    off = pf.fuse(attention, options=FuseOptions(target="xla", check=False))
    assert check.settled(off.planned(Q, Q, Q)[0], jax.devices()[0]).kernels[0].schedule.rolled_tile == 512


def test_tiles_that_are_asked_for_stay(clock):
    clock({"rolled_tile=256": 50.0})
    pf.tune(pf.fuse(attention), Q, Q, Q)
    plan, device = pf.fuse(attention, options=FuseOptions(tiles=(("l", 128),))).planned(Q, Q, Q)
    assert check.settled(plan, device).kernels[0].schedule.rolled_tile == 128


def test_shapes_alone_will_do(clock):
    clock({"rolled_tile=256": 50.0})
    shape = jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    assert pf.tune(pf.fuse(attention), shape, shape, shape).plan.kernels


def test_only_fused_functions_are_tuned():
    with pytest.raises(TypeError, match=r"pallasfuse\.tune takes a function from pallasfuse\.fuse"):
        pf.tune(attention, Q, Q, Q)


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_progress_is_shown_on_terminals(clock, monkeypatch, terminal, progress, shown):
    clock({}, default=50.0)

    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    pf.tune(pf.fuse(attention), Q, Q, Q, progress=progress)
    assert ("tuning" in screen.getvalue()) is shown


# --- from one machine to another


def test_measurements_travel(clock, tmp_path, monkeypatch):
    made = clock({"rolled_tile=256": 50.0})
    pf.tune(pf.fuse(attention), Q, Q, Q)
    count = pf.tuning.export(tmp_path / "file.json")
    assert count == 1
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert list(store.current().entries()) == []
    assert pf.tuning.load(tmp_path / "file.json") == count
    made.raced.clear()
    fused = pf.fuse(attention)
    fused(Q, Q, Q)
    assert fused.explain(Q, Q, Q).kernels[0].schedule.rolled_tile == 256
    assert made.raced == []


def test_what_is_known_here_counts_more(clock, tmp_path):
    clock({"rolled_tile=256": 50.0})
    pf.tune(pf.fuse(attention), Q, Q, Q)
    pf.tuning.export(tmp_path / "file.json")
    ((identity, record),) = store.current().entries()
    ours = {**record, "winner": XLA, "ways": {}}
    store.current().update(identity, lambda _: ours)
    pf.tuning.load(tmp_path / "file.json")
    merged = store.current().get(identity)
    assert merged["winner"] == XLA
    assert merged["ways"] == record["ways"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"holds": "something else", "format": 1, "entries": []}',
        '{"holds": "pallasfuse measurements", "format": 99, "entries": []}',
        '{"holds": "pallasfuse measurements", "format": 1, "entries": [{"identity": {"a": 1}, "record": {}}]}',
    ],
)
def test_another_file_is_an_error(tmp_path, content):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ValueError, match=r"does not hold what .*export writes"):
        pf.tuning.load(tmp_path / "file.json")


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        pf.tuning.load(tmp_path / "none.json")


def test_by_the_clock(tmp_path):
    """Really measured: the winner is the fastest of the candidates or XLA's own, and results stay right."""
    fused = pf.fuse(attention)
    start = time.perf_counter()
    found = pf.tune(fused, Q, Q, Q, seconds=4.0)
    assert time.perf_counter() - start < 60
    timed = [c for c in found.candidates if c.measured_us is not None]
    assert timed
    won = [c for c in found.candidates if c.won]
    assert all(c.measured_us < c.xla_us for c in won)
    same(fused(Q, Q, Q), attention(Q, Q, Q))
    pf.tuning.export(tmp_path / "file.json")
    assert json.loads((tmp_path / "file.json").read_text())["entries"]
