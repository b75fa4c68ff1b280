"""Programs compared on a device: what fails, what does not fit, and how short ones are measured."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import profiler as cupti

from pallasfuse import _compat, measure, samples, timing
from pallasfuse.executables import is_shortage
from pallasfuse.isolation import apart
from pallasfuse.price.scattered import SKEW

DEVICE = jax.devices()[0]
SHAPE = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def compare(functions, avals=(SHAPE,), **more):
    return apart(lambda: measure.compare(functions, avals, DEVICE, budget_s=0.1, **more), DEVICE)


def once(x):
    return x @ x


def often(x):
    for _ in range(24):
        x = jnp.tanh(x @ x)
    return x


def does_not_trace(x):
    raise ZeroDivisionError("mine")


def does_not_compile(x):
    return jax.ffi.ffi_call("pallasfuse_no_such_function", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def does_not_run(x):
    def fail(_):
        raise ZeroDivisionError("mine")

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_the_faster_one_wins():
    found = compare({"often": often, "once": once})
    assert found.winner == "once"
    assert found.faster == {"once"}
    assert found.microseconds["often"] > 2 * found.microseconds["once"]
    assert compare({"once": once, "often": often}).winner == "once"
    assert found.seconds > 0


@pytest.mark.parametrize("function", [does_not_trace, does_not_compile])
def test_what_does_not_compile_is_told(function):
    found = compare({"once": once, "other": function})
    assert set(found.uncompiled) == {"other"}
    assert found.skipped == "nothing else compiles"
    found = compare({"other": function, "once": once})
    assert found.skipped == "other does not compile"
    found = compare({"once": once, "other": function, "often": often})
    assert set(found.microseconds) == {"once", "often"}


def test_what_fails_when_it_runs_is_told():
    found = compare({"once": once, "other": does_not_run})
    assert set(found.failed) == {"other"}
    assert not found.microseconds


def test_what_does_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr(samples, "free_bytes", lambda device: 100_000)
    found = compare({"once": once, "often": often})
    assert "MiB are free" in found.skipped
    assert not found.microseconds


def test_what_cannot_be_drawn_is_not_run(monkeypatch):
    def drawn(*_, **__):
        raise TypeError("values of this type are not drawn")

    monkeypatch.setattr(samples, "drawn", drawn)
    found = compare({"once": once, "often": often})
    assert found.skipped == "no arguments could be drawn (TypeError: values of this type are not drawn)"


def test_programs_are_compared_on_skewed_integers(monkeypatch):
    seen, original = [], samples.drawn
    monkeypatch.setattr(samples, "drawn", lambda *args, **how: seen.append(how) or original(*args, **how))
    compare({"once": once, "often": often})
    assert seen == [{"skew": SKEW}]


def test_random_keys_are_drawn():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (2, 3)))
    found = compare(
        {"a": jax.random.bits, "b": lambda k: jax.random.bits(k) + 1}, [jax.ShapeDtypeStruct((), keys.dtype)]
    )
    assert set(found.microseconds) == {"a", "b"}
    assert samples.drawn([keys], DEVICE)[0].shape == (2, 3)


def test_errors_of_memory_may_pass():
    assert is_shortage("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes")
    assert not is_shortage("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 1048576")


@pytest.mark.parametrize("expected_us", [None, 5.0, 1e9])
def test_short_programs_of_an_accelerator_are_repeated(monkeypatch, expected_us):
    """As on a GPU, where a short program takes less than it takes to send it off."""
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    monkeypatch.setattr(measure, "_SHORT_S", 0.1)
    compiled, original = [], timing.repeated
    monkeypatch.setattr(timing, "repeated", lambda f, times: compiled.append(times) or original(f, times))
    small = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    found = compare({"often": often, "once": once}, [small], expected_us=expected_us)
    assert compiled == [32, 32]
    assert found.winner == "once"
    assert found.microseconds["once"] < 1e3


def test_long_programs_of_an_accelerator_are_not(monkeypatch):
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    monkeypatch.setattr(timing, "repeated", lambda f, times: pytest.fail("it is long"))
    monkeypatch.setattr(measure, "_SHORT_S", 1e-4)
    large = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    assert compare({"often": often, "once": once}, [large]).winner == "once"


def test_a_repeated_program_that_does_not_compile_is_measured_by_itself(monkeypatch):
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    monkeypatch.setattr(timing, "repeated", lambda f, times: does_not_compile)
    small = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert set(compare({"often": often, "once": once}, [small]).microseconds) == {"often", "once"}


# --- kernels alone


@pytest.fixture
def kernels(monkeypatch):
    """As on a GPU with CUPTI: what kernels take is told in turns of the first program and the others."""
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    monkeypatch.setattr(measure, "_SHORT_S", 0.1)
    monkeypatch.setattr(measure, "_SURELY_S", 10.0)  # other work on the machine explains much
    asked = []

    def install(*seconds):
        turns = 2 * [*seconds, *reversed(seconds)]

        def kernel_seconds(program, arguments, calls):
            asked.append(program)
            time = turns[len(asked) - 1]
            return [] if time is None else [time] * calls

        monkeypatch.setattr(_compat, "kernel_seconds", kernel_seconds)
        return asked

    return install


SMALL = jax.ShapeDtypeStruct((32, 32), jnp.float32)


@pytest.mark.sampled(2, cover=("seconds", "expected_us"))
@pytest.mark.parametrize("expected_us", [None, 5.0])
@pytest.mark.parametrize(("seconds", "wins"), [((2e-6, 1e-6), True), ((6.5e-6, 8.45e-6), False), ((2e-6, 2e-6), False)])
def test_short_programs_must_win_by_their_kernels_too(kernels, expected_us, seconds, wins):
    asked = kernels(*seconds)
    found = compare({"often": often, "once": once}, [SMALL], expected_us=expected_us)
    assert len(asked) == 8
    assert len({id(p) for p in asked}) == 2
    assert found.winner == ("once" if wins else "often")
    assert found.faster == ({"once"} if wins else set())
    assert found.microseconds["often"] > found.microseconds["once"]
    assert found.kernels == pytest.approx({"often": 1e6 * seconds[0], "once": 1e6 * seconds[1]})


def test_kernels_are_not_measured_of_what_has_lost(kernels, monkeypatch):
    asked = kernels(1e-6, 2e-6)
    lost = timing.Outcome({"once": 5e-6, "often": 11e-6}, "once", frozenset(), 200)
    monkeypatch.setattr(timing, "race", lambda samplers, **_: lost)
    assert compare({"once": once, "often": often}, [SMALL]).winner == "once"
    assert asked == []


@pytest.mark.parametrize(("seconds", "wins"), [((2e-6, 1e-6), True), ((2e-6, 2e-6), False)])
def test_a_tie_of_short_programs_is_decided_by_their_kernels(kernels, monkeypatch, seconds, wins):
    kernels(*seconds)
    tie = timing.Outcome({"often": 9e-6, "once": 9e-6}, "often", frozenset(), 200, tied=frozenset({"once"}))
    monkeypatch.setattr(timing, "race", lambda samplers, **_: tie)
    found = compare({"often": often, "once": once}, [SMALL])
    assert (found.winner, found.faster) == (("once", {"once"}) if wins else ("often", set()))


@pytest.mark.parametrize(
    ("us", "seconds", "wins"), [(12.0, (2e-6, 1e-6), True), (12.0, (1e-6, 2e-6), False), (15.0, (2e-6, 1e-6), False)]
)
def test_the_kernels_of_short_programs_decide_where_starts_explain_the_clock(kernels, monkeypatch, us, seconds, wins):
    kernels(*seconds)
    lost = timing.Outcome({"often": 9e-6, "once": 1e-6 * us}, "often", frozenset(), 200)
    monkeypatch.setattr(timing, "race", lambda samplers, **_: lost)
    found = compare({"often": often, "once": once}, [SMALL])
    assert (found.winner, found.faster) == (("once", {"once"}) if wins else ("often", set()))


@pytest.fixture
def no_race(monkeypatch):
    """Fails where programs are raced, or repeated in a loop for that; calls take what is told by the clock."""
    monkeypatch.setattr(timing, "race", lambda samplers, **_: pytest.fail("kernels decide"))
    monkeypatch.setattr(timing, "repeated", lambda f, times: pytest.fail("kernels decide"))

    def install(**us):
        monkeypatch.setattr(measure, "_samplers", lambda programs, *_: {n: lambda n=n: (2e-6 * us[n], 2) for n in us})

    return install


@pytest.mark.parametrize("expected_us", [None, 5.0])
@pytest.mark.parametrize(
    ("us", "seconds", "wins"), [(12.0, (2e-6, 1e-6), True), (12.0, (1e-6, 2e-6), False), (140.0, (2e-6, 1e-6), False)]
)
def test_short_parts_are_timed_by_their_kernels_alone(kernels, no_race, expected_us, us, seconds, wins):
    asked = kernels(*seconds)
    no_race(often=9.0, once=us)
    found = compare({"often": often, "once": once}, [SMALL], parts=True, expected_us=expected_us)
    assert (found.winner, found.faster) == (("once", {"once"}) if wins else ("often", set()))
    by_clock = us == 140.0  # it cannot win, whatever its kernels take
    assert bool(asked) != by_clock
    assert found.kernels == ({} if by_clock else pytest.approx({"often": 1e6 * seconds[0], "once": 1e6 * seconds[1]}))
    assert found.microseconds == pytest.approx({"often": 9.0, "once": us} if by_clock else found.kernels)


def test_a_part_that_lost_by_the_clock_keeps_no_other_from_winning(kernels, no_race):
    kernels(2e-6, 1e-6)
    no_race(often=9.0, once=12.0, twice=140.0)
    found = compare({"often": often, "twice": once, "once": once}, [SMALL], parts=True)
    assert (found.winner, found.kernels.keys()) == ("once", {"often", "once"})
    # of one kind: all by the clock, as one has no other time
    assert found.microseconds == pytest.approx({"often": 9.0, "once": 12.0, "twice": 140.0})


def test_of_short_parts_the_one_with_the_fastest_kernels_wins(kernels, no_race):
    """The clock sees no difference between them: it tells how long it takes to send them off."""
    kernels(2e-6, 1.0e-6, 1.049e-6)
    no_race(often=10.0, once=9.05, twice=9.0)
    found = compare({"often": often, "once": once, "twice": lambda x: jnp.tanh(x @ x)}, [SMALL], parts=True)
    assert (found.winner, found.faster) == ("once", {"once", "twice"})


def test_one_slow_look_does_not_lose(kernels, no_race, monkeypatch):
    kernels(2e-6, 1e-6)
    slow = iter([1e-3, 12e-6, 1e-3, 1e-3])  # one more decides that they are short
    monkeypatch.setattr(measure, "_samplers", lambda *_: {"often": lambda: (9e-6, 1), "once": lambda: (next(slow), 1)})
    assert compare({"often": often, "once": once}, [SMALL], parts=True).winner == "once"


@pytest.mark.parametrize(("parts", "times"), [(True, [1, 1]), (False, [1, 1, 32, 32])])
def test_short_parts_are_compiled_once_ahead(monkeypatch, parts, times):
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    functions = {"often": often, "once": once}
    found = measure.requests(functions, [SMALL], DEVICE, expected_us=5.0, parts=parts)
    assert sorted(request.times for request in found) == times


def test_short_parts_whose_kernels_nobody_can_time_are_raced(kernels, monkeypatch):
    kernels(None)
    repeats, original = [], timing.repeated
    monkeypatch.setattr(timing, "repeated", lambda f, times: repeats.append(times) or original(f, times))
    found = compare({"often": often, "once": once}, [SMALL], parts=True)
    assert (found.winner, found.kernels, repeats) == ("once", {}, [32, 32])


@pytest.mark.parametrize(("taken_us", "wins"), [(334.0, True), (314.0, False)])
def test_where_a_turn_counts_one_call_there_are_more_turns(kernels, monkeypatch, taken_us, wins):
    """Three samples tell only what is far apart: a call whose kernels are counted one call at a time would never win."""
    kernels(0.0, 0.0)
    noise, asked = (0.0, 1.5, -1.0, 0.5, 2.0, -2.0, 1.0, -0.5) * 3, []

    def kernel_seconds(program, arguments, calls):
        asked.append(program)
        first = program is asked[0]
        return [1e-6 * ((taken_us if first else 308.0) + noise[asked.count(program) - 1])]

    monkeypatch.setattr(_compat, "kernel_seconds", kernel_seconds)
    won = timing.Outcome({"often": 540e-6, "once": 501e-6}, "often", frozenset(), 10, tied=frozenset({"once"}))
    monkeypatch.setattr(timing, "race", lambda samplers, **_: won)
    found = compare({"often": often, "once": once}, [SMALL])
    assert len(asked) == 2 * (1 + measure._KERNEL_SAMPLES)
    assert found.winner == ("once" if wins else "often")


def test_the_first_turn_does_not_count(kernels, monkeypatch):
    """After a pause the device is faster for a moment, and the first program is always the same."""
    asked = []

    def kernel_seconds(program, arguments, calls):
        asked.append(program)
        return [301e-6 if len(asked) == 1 else 325e-6 if program is asked[0] else 310e-6] * calls

    kernels(0.0, 0.0)
    monkeypatch.setattr(_compat, "kernel_seconds", kernel_seconds)
    won = timing.Outcome({"often": 610e-6, "once": 576e-6}, "once", frozenset({"once"}), 18)
    monkeypatch.setattr(timing, "race", lambda samplers, **_: won)
    found = compare({"often": often, "once": once}, [SMALL])
    assert (found.winner, found.kernels["often"]) == ("once", pytest.approx(325.0))


def test_a_tie_of_longer_programs_stays_one(kernels, monkeypatch):
    asked = kernels(2e-6, 1e-6)
    tie = timing.Outcome({"often": 9e-3, "once": 9e-3}, "often", frozenset(), 200, tied=frozenset({"once"}))
    monkeypatch.setattr(timing, "race", lambda samplers, **_: tie)
    assert compare({"often": often, "once": once}, [SMALL]).winner == "often"
    assert asked == []


@pytest.mark.parametrize(
    ("gained_s", "parts", "sure"), [(2e-3, False, True), (2e-3, True, False), (2e-4, False, False)]
)
def test_no_kernels_are_asked_where_no_start_explains_the_gain(kernels, monkeypatch, gained_s, parts, sure):
    """Of thousands of kernels some are lost where they are counted."""
    asked = kernels(1e-6, 2e-6)
    monkeypatch.setattr(measure, "_SURELY_S", 1e-3)
    won = timing.Outcome({"often": 1e-3 + gained_s, "once": 1e-3}, "once", frozenset({"once"}), 200)
    monkeypatch.setattr(timing, "race", lambda samplers, **_: won)
    found = compare({"often": often, "once": once}, [SMALL], parts=parts)
    assert (found.winner, bool(asked)) == (("once", False) if sure else ("often", True))


def test_without_cupti_the_clock_decides(kernels):
    asked = kernels(None, None)
    found = compare({"often": often, "once": once}, [SMALL])
    assert (found.winner, found.kernels) == ("once", {})
    assert len(asked) == 1


def test_of_several_winners_those_whose_kernels_are_faster_stay(kernels, monkeypatch):
    kernels(3e-6, 4e-6, 2e-6)
    won = timing.Outcome({"often": 9e-6, "once": 1e-6, "twice": 2e-6}, "once", frozenset({"once", "twice"}), 10)
    monkeypatch.setattr(timing, "race", lambda samplers, **_: won)
    found = compare({"often": often, "once": once, "twice": lambda x: jnp.tanh(x @ x) @ x}, [SMALL])
    assert (found.winner, found.faster) == ("twice", {"twice"})


def test_of_several_winners_the_one_with_the_fastest_kernels_is_first(kernels, monkeypatch):
    """Also where the clock sees no difference to the first program: the start of a call hides it."""
    kernels(5e-6, 4e-6, 2e-6)
    won = timing.Outcome(
        {"often": 9e-6, "once": 1e-6, "twice": 9e-6}, "once", frozenset({"once"}), 10, tied=frozenset({"twice"})
    )
    monkeypatch.setattr(timing, "race", lambda samplers, **_: won)
    found = compare({"often": often, "once": once, "twice": lambda x: jnp.tanh(x @ x) @ x}, [SMALL])
    assert (found.winner, found.faster) == ("twice", {"once", "twice"})


def test_what_a_profiler_tells_is_passed_on(monkeypatch):
    def told(program, *, aggregate, iterations):
        return lambda *arguments: (program(*arguments), [[("kernel", 1.0)], [("kernel", 1.5), ("other", 0.5)]])

    monkeypatch.setattr(cupti, "measure", told)
    assert _compat.kernel_seconds(lambda x: x, [1], 2) == [1e-3, 2e-3]


def test_calls_that_start_different_kernels_are_told_one_by_one(monkeypatch):
    def told(program, *, aggregate, iterations):
        if iterations > 1:
            raise RuntimeError("The number of kernel launches is not divisible by the number of iterations")
        return lambda *arguments: (program(*arguments), [("kernel", 3.0)])

    monkeypatch.setattr(cupti, "measure", told)
    assert _compat.kernel_seconds(lambda x: x, [1], 10) == [3e-3]


def test_kernels_without_a_time_are_not_taken_for_quick_ones(monkeypatch):
    def told(program, *, aggregate, iterations):
        return lambda *arguments: (program(*arguments), [[("kernel", 1.0), ("in a branch", 0.0)]] * iterations)

    monkeypatch.setattr(cupti, "measure", told)
    assert _compat.kernel_seconds(lambda x: x, [1], 2) == []


def raises(program, **_):
    def call(*arguments):
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    return call


@pytest.mark.parametrize("profiler", [raises, lambda program, **_: lambda *arguments: (program(*arguments), None)])
def test_a_profiler_that_does_not_tell_is_no_error(monkeypatch, profiler):
    monkeypatch.setattr(cupti, "measure", profiler)
    assert _compat.kernel_seconds(lambda x: x, [1], 2) == []


def test_a_profiler_of_the_users_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(cupti, "measure", lambda *_, **__: pytest.fail("it is in use"))
    with jax.profiler.trace(str(tmp_path)):
        assert _compat.kernel_seconds(lambda x: x, [1], 2) == []


# --- drawn arguments


def test_a_little_less_in_kernels_does_not_outweigh_much_more_by_the_clock(monkeypatch):
    """Of programs that are all faster than the first one."""
    kernels_us = {"first": 45.0, "one": 40.0, "other": 39.0}  # 39 may be luck
    monkeypatch.setattr(measure._compat, "kernel_seconds", lambda of, *_: [1e-6 * kernels_us[of[0]]] * 10)

    def winner(**clock_us):
        taken = {n: 1e-6 * us for n, us in clock_us.items()}
        outcome = timing.Outcome(taken, "one", frozenset({"one"}), 5, frozenset({"other"}))
        return measure._confirmed(outcome, {n: (n,) for n in kernels_us}, [])[0].winner

    assert winner(first=100, one=50, other=100) == "one"
    kernels_us["other"] = 35.0
    assert winner(first=100, one=50, other=100) == "other"


def test_what_takes_much_more_memory_is_not_run(monkeypatch):
    class Program:
        def __init__(self, megabytes):
            self.bytes = megabytes << 20

        def memory_analysis(self):
            class Sizes:
                argument_size_in_bytes = 0
                output_size_in_bytes = 0
                temp_size_in_bytes = self.bytes

            return Sizes

    programs = {"first": Program(1000), "second": Program(1090), "third": Program(1101), "fourth": "XlaError"}
    assert measure._too_large(programs, 1.1, measure._LITTLE_BYTES) == {
        "third": "it takes 1101 MiB of memory, more than 1100"
    }
    little = {"first": Program(1), "second": Program(64), "third": Program(66)}
    assert measure._too_large(little, 1.1, measure._LITTLE_BYTES) == {
        "third": "it takes 66 MiB of memory, more than 65"
    }
    assert measure._too_large(little, math.inf, 0) == {}


@pytest.mark.parametrize(("free", "little"), [(None, 64 << 20), (8 << 30, 64 << 20), (128 << 30, 512 << 20)])
def test_little_memory_is_a_part_of_what_is_free(free, little, monkeypatch):
    asked = []
    monkeypatch.setattr(measure.samples, "free_bytes", lambda _: free)
    monkeypatch.setattr(measure, "_too_large", lambda programs, most, more: asked.append(more) or {})
    compare({"often": often, "once": once}, [SMALL])
    assert asked == [little, little]


@pytest.mark.parametrize(("runs_up_to", "is_run"), [(None, False), (2.0, False), (4.0, True)])
def test_what_takes_more_memory_is_run_where_that_is_asked_for(monkeypatch, runs_up_to, is_run):
    """It takes three times as much here."""
    monkeypatch.setattr(
        measure, "_too_large", lambda programs, most, _: {"once": "it takes more"} if most < 3.0 else {}
    )
    found = compare({"often": often, "once": once}, [SMALL], most_memory=1.1, runs_up_to=runs_up_to)
    assert found.too_large == ({} if is_run else {"once": "it takes more"})
    assert found.larger == ({"once"} if is_run else set())
    assert ("once" in found.microseconds) == is_run
    assert not compare({"often": often, "once": once}, [SMALL]).too_large
