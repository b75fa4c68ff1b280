"""Races with contenders whose times are made up: what is decided, how soon, and that ties are the first one's."""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import timing
from pallasfuse.timing import race


def noisy(mean_s, seed, *, spread=0.05, spikes=0.0):
    """A contender with relative noise, and now and then a sample that is three times as long."""
    random_ = random.Random(seed)

    def sample():
        slow = 3.0 if random_.random() < spikes else 1.0
        return mean_s * slow * (1 + abs(random_.gauss(0, spread))), 1

    return sample


@pytest.mark.parametrize("seed", range(20))
def test_a_clear_difference_is_decided_in_a_few_rounds(seed):
    found = race({"first": noisy(2e-3, seed), "second": noisy(1e-3, seed + 100)}, budget_s=1.0)
    assert found.winner == "second"
    assert found.rounds <= 6


@pytest.mark.parametrize("seed", range(20))
def test_the_slower_one_never_wins(seed):
    found = race(
        {"first": noisy(1e-3, seed, spikes=0.2), "second": noisy(1.1e-3, seed + 100, spikes=0.2)}, budget_s=0.2
    )
    assert found.winner == "first"


def test_ties_are_the_first_ones():
    won = [race({"first": noisy(1e-3, s), "second": noisy(1e-3, s + 500)}, budget_s=0.1).winner for s in range(100)]
    assert won.count("second") == 0


def test_a_gain_below_the_least_one_is_a_tie():
    won = [race({"a": noisy(1e-3, s), "b": noisy(0.995e-3, s + 500)}, budget_s=0.2).winner for s in range(50)]
    assert won.count("b") <= 1


def test_a_gain_of_a_tenth_is_found_through_noise_and_spikes():
    won = [
        race({"a": noisy(1e-3, s, spikes=0.15), "b": noisy(0.9e-3, s + 500, spikes=0.15)}, budget_s=0.25).winner
        for s in range(50)
    ]
    assert won.count("b") >= 48


LONG = dict(budget_s=0.25, more_s=1.0)
"""Long calls, of which there are few."""


def test_long_calls_get_more_time_while_one_seems_to_win():
    def won(**given):
        noise = {"spread": 0.2, "spikes": 0.1}
        return [
            race({"a": noisy(60e-3, s, **noise), "b": noisy(44e-3, s + 500, **noise)}, **given).winner
            for s in range(200)
        ].count("b")

    assert won(**LONG) >= 150 > won(budget_s=0.25) + 40


@pytest.mark.parametrize(("spikes", "most"), [(0.0, 4), (0.1, 4), (0.3, 16)])
def test_more_time_makes_fewer_winners_of_ties(spikes, most):
    def won(**given):
        noise = {"spread": 0.2, "spikes": spikes}
        return [
            race({"a": noisy(60e-3, s, **noise), "b": noisy(60e-3, s + 500, **noise)}, **given).winner
            for s in range(400)
        ].count("b")

    assert won(**LONG) <= most and won(**LONG) <= won(budget_s=0.25) + 1


@pytest.mark.parametrize("spikes", [0.0, 0.1])
def test_small_gains_of_calls_of_milliseconds_are_found_in_more_time(spikes):
    def won(gain, **given):
        noise = {"spread": 0.1, "spikes": spikes}
        return [
            race({"a": noisy(5e-3, s, **noise), "b": noisy(5e-3 / gain, s + 500, **noise)}, **given).winner
            for s in range(100)
        ].count("b")

    assert won(1.06, **LONG) >= 70 > won(1.06, budget_s=0.25) + 20
    assert won(1.0, **LONG) <= 1


def test_more_time_is_not_for_telling_winners_apart():
    """Two are twice as fast as the first, and as fast as each other."""
    ties = {"a": noisy(5e-3, 1), "b": noisy(2.5e-3, 2), "c": noisy(2.5e-3, 3)}
    found = race(ties, **LONG)

    assert found.winner in "bc" and 20 <= found.rounds <= 40


def test_very_long_calls_take_no_more_than_ten_times_the_time():
    found = race({"a": noisy(30.0, 1), "b": noisy(27.0, 2)}, **LONG)

    assert found.rounds == 1


def test_more_time_is_for_those_only_that_seem_to_win():
    spent = []

    def sample(seconds):
        return lambda: spent.append(seconds) or (seconds, 1)

    race({"a": sample(0.060), "b": sample(0.0597)}, **LONG)
    assert sum(spent) <= 0.5


def test_very_long_calls_get_the_fewest_rounds_of_the_test_while_one_seems_to_win():
    def rounds(other, **given):
        return race({"a": noisy(0.5, 1, spread=0.1), "b": noisy(other, 2, spread=0.1)}, **given).rounds

    assert rounds(0.46, **LONG) == 6 > rounds(0.46, budget_s=0.25)
    assert rounds(0.6, **LONG) <= 3


def test_drift_is_no_difference():
    """Both get slower all the time, as on a machine that heats up."""
    clock = itertools.count()
    drifting = {name: lambda: (1e-3 * (1 + 0.02 * next(clock)), 1) for name in "ab"}
    assert race(drifting, budget_s=0.5).winner == "a"


def test_the_time_given_is_kept():
    spent = []

    def sample(seconds):
        return lambda: spent.append(seconds) or (seconds, 1)

    found = race({"a": sample(0.1), "b": sample(0.0999)}, budget_s=0.25)
    assert found.winner == "a"
    assert sum(spent) <= 0.25 + 0.2


def test_one_round_of_long_calls_decides_only_what_is_far_apart():
    assert race({"a": lambda: (2.0, 1), "b": lambda: (1.0, 1)}, budget_s=0.25).winner == "b"
    assert race({"a": lambda: (2.0, 1), "b": lambda: (1.6, 1)}, budget_s=0.25).winner == "a"


def played(**samples):
    """A race with these samples in milliseconds, after which the last one is repeated."""
    left = {n: list(times) for n, times in samples.items()}
    return {n: lambda t=t: ((t.pop(0) if len(t) > 1 else t[0]) * 1e-3, 1) for n, t in left.items()}


def test_few_long_calls_with_a_disturbance_are_decided():
    """One of five samples is as slow as the others': ranks alone do not tell so few samples apart."""
    found = race(played(a=[41, 43, 41, 40, 42, 41, 44], b=[12.6, 44, 12.5, 13, 12.6, 12.7, 13]), budget_s=0.25)
    assert found.winner == "b"
    assert found.rounds >= 5


def test_few_long_calls_get_twice_the_time_and_no_more():
    undecided = played(a=[40, 41, 40, 42, 39], b=[39, 42, 40, 41, 40])
    spent = []
    for name, sample in undecided.items():
        undecided[name] = lambda sample=sample: spent.append(found := sample()) or found
    assert race(undecided, budget_s=0.25).winner == "a"
    assert 0.4 < sum(seconds for seconds, _ in spent) <= 0.5


def test_many_short_calls_get_the_time_given():
    spent = []
    undecided = {n: lambda t=t: spent.append(t) or (t, 1) for n, t in {"a": 1e-2, "b": 0.99e-2}.items()}
    race(undecided, budget_s=0.25)
    assert sum(spent) < 0.25 + 0.02


@pytest.mark.parametrize(
    ("ours", "wins"),
    [
        ([50, 50, 50], True),
        ([50, 50, 110], False),  # two of three are too few
        ([80, 80, 80, 80, 80], True),
        ([95, 95, 95, 95, 95], False),  # so small a gain needs more samples
        ([80, 80, 80, 110, 110], False),
        ([50, 50, 50, 110, 50], True),
        ([80, 80, 80, 110, 80], False),  # in one round slower, and not far faster in the others
        ([110, 50, 50, 50, 50, 50], True),
        ([130, 130, 130, 130, 130, 130], False),
    ],
)
def test_what_few_rounds_decide_at_the_end(ours, wins):
    """Times of the first contender drift, and no two samples are equal."""
    drift = [100 + n for n in range(len(ours))]
    assert timing.is_ahead([t * d for t, d in zip(ours, drift, strict=True)], [100 * d for d in drift]) is wins


@pytest.mark.parametrize("spread", [0.05, 0.2])
def test_ties_of_few_long_calls_are_the_first_ones(spread):
    won = [
        race(
            {"a": noisy(0.02, s, spread=spread, spikes=0.1), "b": noisy(0.02, s + 900, spread=spread, spikes=0.1)},
            budget_s=0.25,
        ).winner
        for s in range(300)
    ]
    assert won.count("b") <= 6


def test_the_slower_one_of_few_long_calls_hardly_ever_wins():
    won = [
        race({"a": noisy(0.02, s, spikes=0.2), "b": noisy(0.022, s + 900, spikes=0.2)}, budget_s=0.25).winner
        for s in range(300)
    ]
    assert won.count("b") <= 3


def test_a_large_gain_of_few_long_calls_is_found_through_spikes():
    won = [
        race({"a": noisy(0.04, s, spikes=0.15), "b": noisy(0.0126, s + 900, spikes=0.15)}, budget_s=0.25).winner
        for s in range(200)
    ]
    assert won.count("b") >= 195


def test_of_several_the_fastest_wins_and_the_slow_ones_leave_early():
    counts = dict.fromkeys("abcd", 0)

    def counted(name, sample):
        def run():
            counts[name] += 1
            return sample()

        return run

    times = {"a": 2e-3, "b": 1.5e-3, "c": 1.0e-3, "d": 9e-3}
    found = race({n: counted(n, noisy(t, ord(n))) for n, t in times.items()}, budget_s=2.0)
    assert found.winner == "c"
    assert counts["d"] < 10
    assert list(found.seconds) == list("abcd")


def test_one_contender_alone_is_the_winner():
    assert race({"a": lambda: (1.0, 1)}, budget_s=1.0).winner == "a"


# --- what a sample is


def fake(call_s, send_s=0.0):
    """A clock, and a call that moves it."""
    now = [0.0]

    def call():
        now[0] += call_s + send_s
        return jnp.zeros(())

    return call, lambda: now[0]


def test_short_calls_are_measured_in_batches():
    call, clock = fake(1e-5)
    calls = []
    sample = timing.Sampled(lambda: calls.append(1) or call(), in_flight=True, clock=clock)
    before = len(calls)
    seconds, count = sample()
    assert seconds / count == pytest.approx(1e-5)
    assert count == 100
    assert len(calls) - before >= 99


@pytest.mark.parametrize("seconds, calls", [(0.5, 2), (2.0, 1)])
def test_the_call_that_warms_up_a_long_program_counts(seconds, calls):
    call, clock = fake(seconds)
    sample = timing.Sampled(call, in_flight=False, clock=clock)
    assert sample() == (seconds, 1)
    assert clock() == calls * seconds
    assert sample() == (seconds, 1)
    assert clock() == (calls + 1) * seconds


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("loading_s", [0.0, 0.01, 0.5])
def test_what_the_first_call_loads_changes_nothing(loading_s, in_flight):
    """A program that was measured before has loaded it already, and may be compared with one that was not."""
    now, calls = [0.0], []

    def call():
        calls.append(1)
        now[0] += 1e-3 + (loading_s if len(calls) == 1 else 0.0)
        return jnp.zeros(())

    seconds, count = timing.Sampled(call, in_flight=in_flight, clock=lambda: now[0])()
    assert count >= (4 if in_flight else 1)
    assert seconds / count == pytest.approx(1e-3)


def test_programs_that_are_compared_have_batches_of_as_many_calls():
    """A batch has one start and one end: the fewer calls, the more of them for each."""
    samplers = [timing.Sampled(*as_long(seconds)) for seconds in (3.9e-3, 4.1e-3)]
    assert samplers[0].calls > samplers[1].calls == 1
    timing.alike(samplers)
    assert [s.calls for s in samplers] == [1, 1]
    assert samplers[0]() == (pytest.approx(3.9e-3), 1)


def as_long(seconds):
    call, clock = fake(seconds)
    return call, True, 1, clock


def test_what_a_call_repeats_is_taken_into_account():
    call, clock = fake(3.2e-3)
    seconds, count = timing.Sampled(call, in_flight=True, times=32, clock=clock)()
    assert seconds / count == pytest.approx(1e-4)


def test_repeated_computes_the_same():
    found = timing.repeated(lambda x, y: (x @ y, x.sum()), 5)(jnp.ones((3, 3)), jnp.eye(3))
    assert jnp.array_equal(found[0], jnp.ones((3, 3)))
    assert found[1] == 9


def test_repeated_repeats():
    seen = []

    def function(x):
        jax.debug.callback(lambda: seen.append(1))
        return x + 1

    jax.block_until_ready(jax.jit(timing.repeated(function, 7))(jnp.zeros(())))
    jax.effects_barrier()
    assert len(seen) == 7


def test_ties_are_neither_faster_nor_slower():
    def sampler(seconds):
        return lambda: (seconds, 1)

    found = timing.race({"a": sampler(1e-3), "b": sampler(1.01e-3), "c": sampler(2e-3)}, budget_s=0.1)
    assert "c" not in found.tied
    found = timing.race({"a": sampler(1e-3), "b": sampler(1e-3)}, budget_s=0.1)
    assert (found.winner, found.tied) == ("a", {"b"})
