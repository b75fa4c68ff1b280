"""What a clock says about loops and operations written out."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import device, primitive, unrolled_loops, written_out
from pallasfuse.device import assumed
from pallasfuse.executables import Executables
from pallasfuse.first_time import Once
from pallasfuse.measure import Measured
from pallasfuse.options import FuseOptions
from pallasfuse.primitive import FusedCall
from pallasfuse.targets import find
from pallasfuse.unrolled_loops import MOST_TRIPS
from pallasfuse.verdicts import WRITTEN_OUT
from tests.check.clock import Clock
from tests.test_unrolled_loops import X, decayed, trips


@pytest.fixture
def partly(monkeypatch):
    """Loops are unrolled in part, as on a GPU."""
    original = unrolled_loops.unrollings
    monkeypatch.setattr(
        "pallasfuse.written_out.unrollings", lambda jaxpr, exclude, partly: original(jaxpr, exclude, partly=True)
    )


@pytest.mark.usefixtures("partly")
@pytest.mark.parametrize("faster", [True, False])
def test_the_clock_decides(monkeypatch, faster):
    clock = Clock(2.0 if faster else 0.5)
    monkeypatch.setattr(written_out, "compare", clock)
    for _ in range(2):
        fused = pf.fuse(decayed)
        for got, want in zip(fused(X), decayed(X), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
        plan = fused.explain(X)
        (verdict,) = (v for v in plan.verdicts if v.subject == WRITTEN_OUT)
        assert verdict.kept == plan.written_out == plan.fuses == faster
        assert trips(plan.converted.original) == [MOST_TRIPS if faster else 1]
        assert ("they are used" if faster else "as it was") in fused.explain(X).summary
    assert len(clock.compared) == 1


@pytest.mark.usefixtures("partly")
def test_without_a_clock_nothing_is_unrolled(monkeypatch):
    clock = Clock(2.0)
    monkeypatch.setattr(written_out, "compare", clock)
    fused = pf.fuse(decayed, options=FuseOptions(check=False))
    fused(X)
    assert not fused.explain(X).written_out
    with pytest.raises(pf.FusionError, match="scan"):
        pf.fuse(decayed, strict=True)(X)
    assert not clock.compared


@pytest.mark.usefixtures("partly")
def test_a_loop_that_might_not_end_is_not_run_on_drawn_arguments(monkeypatch):
    """Then loops are unrolled that need no clock: on a GPU, and none here."""
    clock = Clock(2.0)
    monkeypatch.setattr(written_out, "compare", clock)

    def function(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, decayed(x)[1])

    fused = pf.fuse(function)
    np.testing.assert_allclose(fused(X), function(X), rtol=1e-6)
    assert not clock.compared and not fused.explain(X).written_out
    (verdict,) = fused.explain(X).verdicts
    assert not verdict.kept and "it has while" in verdict.reason

    monkeypatch.setattr(
        written_out,
        "unrolled_surely",
        lambda jaxpr, device, exclude: unrolled_loops.unrolled_surely(jaxpr, assumed("gpu"), exclude),
    )
    fused = pf.fuse(lambda x: function(x) + 1)
    np.testing.assert_allclose(fused(X), function(X) + 1, rtol=1e-6)
    plan = fused.explain(X)
    assert plan.written_out and sorted(trips(plan.converted.original)) == [4]
    assert plan.verdicts[0].kept and "faster by its price" in plan.verdicts[0].reason


def added_up(a, b):
    """A product of tiny matrices, in a loop that might not end: by itself it is faster as a sum."""

    def step(c):
        return c + jnp.einsum("eai,eaj->eij", a, b) + 1.0

    return jax.lax.while_loop(lambda c: c.sum() < 9, step, jnp.zeros((3600, 2, 2)))


@pytest.mark.parametrize("loses", [True, False])
def test_a_form_that_no_clock_has_seen_is_not_used_if_kernels_may_lose_by_it(clock, monkeypatch, loses):
    """The program's own plan is asked, as if it had kernels."""
    clock(2.0)
    monkeypatch.setattr(primitive, "may_lose_kernels", lambda *_: loses)
    monkeypatch.setattr(primitive, "is_faster_as_it_is", lambda own, other, verdict, *, loses: loses)

    a, b = np.ones((2, 3600, 3, 2), "float32")
    fused = pf.fuse(added_up)
    np.testing.assert_allclose(fused(a, b), added_up(a, b), rtol=1e-6)
    plan = fused.explain(a, b)
    assert plan.written_out != loses
    assert plan.verdicts[0].kept != loses and "faster by its price" in plan.verdicts[0].reason


def test_a_form_is_used_where_no_kernel_is_left_that_it_may_lose(clock, monkeypatch):
    clock(2.0)
    monkeypatch.setattr(primitive, "may_lose_kernels", lambda *_: True)

    fused = pf.fuse(added_up)
    a, b = np.ones((2, 3600, 3, 2), "float32")
    np.testing.assert_allclose(fused(a, b), added_up(a, b), rtol=1e-6)
    plan = fused.explain(a, b)
    assert not plan.kernels and plan.written_out and plan.verdicts[0].kept


@pytest.mark.usefixtures("partly")
def test_it_is_asked_once_for_loops_of_several_lengths(monkeypatch):
    """The form that has won is not compared again with the one that has just lost."""
    clock = Clock(2.0)
    monkeypatch.setattr(written_out, "compare", clock)
    fused = pf.fuse(lambda x: (decayed(x, 4), decayed(x, 10)))
    fused(X)
    assert len(clock.compared) == 1
    assert [v.subject for v in fused.explain(X).verdicts] == [WRITTEN_OUT]


@pytest.mark.usefixtures("partly")
def test_what_was_measured_is_of_the_loops_that_were_unrolled(monkeypatch):
    clock = Clock(2.0)
    monkeypatch.setattr(written_out, "compare", clock)

    def both(x):
        return jax.named_scope("a")(decayed)(x)[1] + jax.named_scope("b")(decayed)(x + 1)[1]

    for scope in ("a", "b"):
        fused = pf.fuse(both, options=FuseOptions(exclude=(scope,)))
        fused(X)
        assert sorted(trips(fused.explain(X).converted.original)) == [1, MOST_TRIPS]
    assert len(clock.compared) == 2


@pytest.mark.usefixtures("partly")
def test_bodies_do_not_ask_about_their_loops(monkeypatch):
    """The call around them has decided that."""
    clock = Clock(0.5)
    monkeypatch.setattr(written_out, "compare", clock)
    call = FusedCall(jax.make_jaxpr(decayed)(X), FuseOptions(check=True), "body", Once(), is_body=True)
    assert not call.settled(find("xla"), jax.devices()[0]).written_out and not clock.compared


@pytest.mark.usefixtures("partly")
@pytest.mark.parametrize("broken", [(written_out, "compare"), (written_out, "unrollings")], ids=["clock", "rewrite"])
def test_a_failure_of_the_check_leaves_loops_as_they_are(monkeypatch, broken):
    monkeypatch.setattr(*broken, lambda *args, **kwargs: 1 / 0)
    fused = pf.fuse(decayed)
    with pytest.warns(UserWarning, match="forms could not be checked .ZeroDivisionError"):
        np.testing.assert_allclose(fused(X)[1], decayed(X)[1], rtol=1e-6)


IMAGES, WEIGHTS = np.ones((2, 64, 256), "float32"), np.ones((15, 1, 256), "float32")


def smoothed(x, w):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=256)


def test_operations_are_compiled_at_the_same_time(monkeypatch):
    """Before the clock is asked about the first one; two that are equal are one."""
    made, original = [], Executables.of
    monkeypatch.setattr(
        Executables, "of", lambda self, requests, device: made.append(len(requests)) or original(self, requests, device)
    )
    clock = Clock(0.5)
    monkeypatch.setattr(written_out, "compare", clock)
    twice = IMAGES[:, :32]
    function = jax.jit(lambda x, y, w: smoothed(x, w).sum() + smoothed(y, w).sum() + smoothed(y + 1, w).sum())
    assert np.isfinite(pf.fuse(function)(IMAGES, twice, WEIGHTS))
    assert len(clock.compared) == 2  # one for each shape
    assert made[0] == 2 * 2  # each as it is written, and in parts


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("alone, whole", [(True, True), (True, False), (False, True)])
def test_an_operation_is_timed_alone_and_then_in_the_whole(monkeypatch, alone, whole):
    clock = Clock(2.0 if alone else 0.5, 2.0 if whole else 0.5)
    monkeypatch.setattr(written_out, "compare", clock)
    for _ in range(2):
        fused = pf.fuse(lambda x, w: jax.numpy.tanh(smoothed(x, w)))
        np.testing.assert_allclose(fused(IMAGES, WEIGHTS), np.tanh(smoothed(IMAGES, WEIGHTS)), rtol=1e-5)
        plan = fused.explain(IMAGES, WEIGHTS)
        assert plan.written_out == plan.fuses == (alone and whole)
        assert plan.conditions == (("reassociation only",) if alone and whole else ())
        kept = [e.primitive.name for e in plan.converted.original.eqns].count("conv_general_dilated")
        assert kept == (not (alone and whole))
    assert len(clock.compared) == 1 + alone


def test_without_a_clock_an_operation_is_in_parts_by_its_price():
    fused = pf.fuse(smoothed, options=FuseOptions(check=False, price=True))
    assert fused.explain(IMAGES, WEIGHTS).written_out
    assert not pf.fuse(smoothed, options=FuseOptions(check=False, price=False)).explain(IMAGES, WEIGHTS).written_out


def test_an_operation_in_parts_that_does_not_compile_stays_as_it_is(monkeypatch):
    """Whatever its price says; and that is known from then on."""
    clock = Clock(2.0, uncompiled=[0])
    monkeypatch.setattr(written_out, "compare", clock)
    fused = pf.fuse(lambda x, w: jax.numpy.tanh(smoothed(x, w)))
    text = "conv_general_dilated in parts does not run on cpu: XlaError: shared memory; XLA's own is used"
    with pytest.warns(UserWarning, match=text) as caught:
        np.testing.assert_allclose(fused(IMAGES, WEIGHTS), np.tanh(smoothed(IMAGES, WEIGHTS)), rtol=1e-5)
    assert len(caught) == 1 and len(clock.compared) == 1
    assert not fused.explain(IMAGES, WEIGHTS).written_out
    pf.fuse(lambda x, w: jax.numpy.tanh(smoothed(x, w)))(IMAGES, WEIGHTS)
    assert len(clock.compared) == 1


@pytest.mark.usefixtures("partly")
def test_a_choice_is_timed_where_its_branches_stay_as_they_are(monkeypatch):
    clock = Clock(2.0)
    monkeypatch.setattr(written_out, "compare", clock)

    def beside(x):
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, decayed(x)[1])

    def inside(x):
        return jax.lax.cond(x.sum() > 0, lambda x: decayed(x)[1], jnp.cos, x)

    for function, written in ((beside, True), (inside, False)):
        before, fused = len(clock.compared), pf.fuse(function)
        np.testing.assert_allclose(fused(X), function(X), rtol=1e-6)
        (verdict,) = (v for v in fused.explain(X).verdicts if v.subject == WRITTEN_OUT)
        assert verdict.kept == written and ("it has cond" in verdict.reason) != written
        assert len(clock.compared) - before == written


@pytest.mark.usefixtures("partly")
def test_what_takes_too_much_memory_is_no_failure_and_is_remembered(monkeypatch, recwarn):
    """It is not run, as what is slower is not used; neither a warning nor the price says otherwise."""
    compared = []

    def compare(functions, *_, **__):
        compared.append(functions)
        _, *others = functions
        return Measured(too_large=dict.fromkeys(others, "it takes 134 MiB of memory, more than 102"), seconds=0.1)

    monkeypatch.setattr(written_out, "compare", compare)
    for _ in range(2):
        fused = pf.fuse(decayed)
        fused(X)
        (verdict,) = (v for v in fused.explain(X).verdicts if v.subject == WRITTEN_OUT)
        assert not verdict.kept and "too much memory: it takes 134 MiB" in verdict.reason
    assert len(compared) == 1 and not [w for w in recwarn if "pallasfuse" in str(w.message)]


def cubes(x, i):
    """A power and places of largest numbers, which are written in other ways on a CPU."""
    return x**1.5, jnp.argmax(i, -1)


@pytest.mark.parametrize(
    ("larger", "counts"), [((), [(0, 0)]), (("pow",), [(0, 0), (1, 0)]), (("pow", "argmax"), [(0, 0)])]
)
def test_what_takes_more_memory_alone_may_take_none_in_the_program(monkeypatch, larger, counts):
    """Both forms are for the clock that sees the whole program; where all operations take more, the other one is the program."""

    def compare(functions, *_, **options):
        written, other = functions
        names = {e.primitive.name for e in jax.make_jaxpr(functions[written])(*options["avals"]).eqns}
        takes_more = frozenset({other}) if names & set(larger) else frozenset()
        return Measured({written: 50.0, other: 25.0}, other, frozenset({other}), seconds=0.1, larger=takes_more)

    def with_avals(functions, avals, *rest, **options):
        assert options["runs_up_to"] == 4.0
        return compare(functions, avals, *rest, avals=avals, **options)

    monkeypatch.setattr(written_out, "compare", with_avals)
    shapes = jax.ShapeDtypeStruct((512, 4096), jnp.float32), jax.ShapeDtypeStruct((512, 4096), jnp.float32)
    jaxpr = jax.make_jaxpr(cubes)(*shapes)
    for _ in range(2):  # what is known says it again
        found = written_out.forms(jaxpr, find("xla").on(assumed("cpu")), jax.devices()[0])
        names = [[e.primitive.name for e in form.eqns] for form in found.values()]
        assert [(n.count("pow"), n.count("argmax")) for n in names] == counts
    assert ("take more memory" in " ".join(found)) == (len(counts) > 1)


@pytest.mark.parametrize("larger", [True, False])
def test_an_operation_that_takes_too_much_memory_is_not_run_alone_and_stays(monkeypatch, larger):
    def compare(functions, *_, **__):
        _, other = functions
        return Measured(too_large={other: "it takes much"} if larger else {}, skipped="nothing else compiles")

    monkeypatch.setattr(written_out, "compare", compare)
    jaxpr = jax.make_jaxpr(cubes)(*[jax.ShapeDtypeStruct((512, 4096), jnp.float32)] * 2)
    found = written_out.forms(jaxpr, find("xla").on(assumed("cpu")), jax.devices()[0])
    assert bool(found) != larger  # where nobody knows, the price decides


@pytest.mark.parametrize(
    ("clock", "found"),
    [
        (Clock(0.5), ["operations in parts, by their prices where data decides"]),
        (Clock(2.0), ["operations in parts"]),
        (Clock(1.0, uncompiled=range(9)), []),
    ],
    ids=["slower", "faster", "fails"],
)
def test_the_whole_program_is_asked_where_data_decides_what_an_operation_takes(monkeypatch, clock, found):
    """Counts in few places on an H200: those that are drawn may meet less often than those that a program computes."""
    monkeypatch.setattr(written_out, "compare", clock)
    monkeypatch.setattr(Executables, "of", lambda self, requests, device: [None] * len(requests))

    def counts(x):
        return jnp.zeros(300).at[jnp.clip(jnp.abs(x * 100).astype(int), 0, 299)].add(x)

    jaxpr = jax.make_jaxpr(counts)(jax.ShapeDtypeStruct((1 << 20,), jnp.float32))
    target = find("xla_gpu").on(device.find("NVIDIA H200", "gpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one says that a way does not run
        ways = written_out.forms(jaxpr, target, jax.devices()[0])
    assert list(ways) == found
    for form in ways.values():
        (update,) = [e for e in form.eqns if e.primitive.name == "scatter-add"]
        assert update.outvars[0].aval.shape == (512, 300)


@pytest.mark.parametrize("cannot_win", [True, False])
def test_kernels_of_the_program_as_it_is_are_timed_if_they_may_win_over_a_form(monkeypatch, cannot_win):
    monkeypatch.setattr(written_out, "compare", Clock(2.0))
    monkeypatch.setattr(primitive, "may_lose_kernels", lambda *_: True)
    monkeypatch.setattr(primitive, "cannot_win_as_it_is", lambda *_: cannot_win)
    settled = []
    monkeypatch.setattr(primitive, "settled", lambda plan, *_, **__: settled.append(plan) or plan)

    def function(x):
        return jax.nn.softmax(x**1.5, -1)

    fused, x = pf.fuse(function), np.full((64, 4096), 2.0, "float32")
    np.testing.assert_allclose(fused(x), function(x), rtol=1e-5)
    powers = [sum(e.primitive.name == "pow" for e in p.converted.original.eqns) for p in settled]
    assert powers == ([0] if cannot_win else [0, 1])
    assert fused.explain(x).written_out


@pytest.mark.usefixtures("partly")
def test_loops_are_unrolled_also_without_operations_that_take_more_memory(monkeypatch):
    """Where the program is too large with the operation, the clock still has what the loop alone gains."""

    def compare(functions, *_, **__):
        written, other = functions
        return Measured({written: 50.0, other: 25.0}, other, frozenset({other}), seconds=0.1, larger=frozenset({other}))

    monkeypatch.setattr(written_out, "compare", compare)
    jaxpr = jax.make_jaxpr(lambda x, y: (decayed(x), y**1.5))(X, jax.ShapeDtypeStruct((512, 4096), jnp.float32))
    found = written_out.forms(jaxpr, find("xla").on(assumed("cpu")), jax.devices()[0])
    as_it_is = [form for form in found.values() if any(e.primitive.name == "pow" for e in form.eqns)]
    assert len(as_it_is) < len(found)
    assert [MOST_TRIPS] in map(trips, as_it_is)


@pytest.mark.parametrize("how", ["skipped", "failed"])
def test_what_was_not_timed_for_another_reason_than_memory_is_no_answer_on_disk(monkeypatch, how):
    """The device had no room, or something failed as it ran: it may run another time."""
    kept = []

    def compare(functions, *_, **__):
        _, other = functions
        failed = {other: "INTERNAL: flaky"} if how == "failed" else {}
        return Measured(failed=failed, larger=frozenset({other}), skipped="it was not timed")

    def update(self, identity, change, *, on_disk=True):
        kept.append(on_disk)
        return change({})

    monkeypatch.setattr(written_out, "compare", compare)
    monkeypatch.setattr("pallasfuse.store.Store.update", update)
    jaxpr = jax.make_jaxpr(cubes)(*[jax.ShapeDtypeStruct((512, 4096), jnp.float32)] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written_out.forms(jaxpr, find("xla").on(assumed("cpu")), jax.devices()[0])
    assert kept and not any(kept)
