"""How the times of programs that take turns become ratios and rows."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.program_timing import Contender, Samples, ratio, take_turns


def test_the_ratio_is_that_of_the_median_round():
    slow_machine = [[100.0, 110.0], [100.0, 500.0], [1000.0, 1100.0]]
    ours = [[50.0, 400.0], [50.0, 50.0], [500.0, 510.0]]
    assert ratio(Samples(slow_machine), Samples(ours)) == 2.0, "a burst that slows a whole round slows both"


def test_of_kernel_times_a_round_is_its_median():
    launches = [[("kernel", 3.0)]]
    samples = Samples([[1.0, 3.0, 9.0]], [20.0], launches)
    assert samples.by_round() == [3.0]
    assert Samples([[1.0, 3.0, 9.0]]).by_round() == [1.0]
    found = samples.row(names=True)
    assert (found["us"], found["least_us"], found["own_us"], found["launches"]) == (3.0, 1.0, 3.0, 1)
    assert found["kernels"] == [["kernel", 3.0]]
    assert "kernels" not in samples.row(names=False)


def test_wall_times_are_compared_where_a_kernel_has_no_time():
    whole, partly = [[("kernel", 3.0), ("branch", 6.0)]], [[("kernel", 3.0), ("branch", 0.0)]]
    timed, untimed = Samples([[9.0]], [20.0], whole), Samples([[3.0]], [10.0], partly)
    assert ratio(untimed, timed) == 0.5
    assert ratio(timed, untimed) == 2.0
    assert ratio(timed, timed) == 1.0
    assert (untimed.row(names=False)["untimed"], "untimed" in timed.row(names=False)) == (1, False)


def test_no_samples_have_no_ratio():
    assert ratio(Samples(), Samples([[1.0]])) is None
    assert Samples().row(names=True) == {}


def test_wall_times_are_compared_with_predictions_without_the_time_of_a_call():
    found = Samples([[1e6, 2e6]]).row(names=False)
    assert 0 < found["own_us"] < found["least_us"] == 1e6


def test_contenders_take_turns_and_failures_keep_their_reason():
    def fails(x):
        raise ValueError("out of order")

    contenders = [
        Contender(jax.jit(lambda x: x + 1).lower(1.0).compile()),
        Contender(fails),
        Contender(None, "did not compile"),
        Contender(jax.jit(lambda x: x * 2).lower(1.0).compile()),
    ]
    take_turns(contenders, [jnp.float32(3.0)], rounds=2, patient=False)
    assert [len(c.samples.rounds) for c in contenders] == [2, 0, 0, 2]
    assert [c.reason for c in contenders] == ["", "ValueError: out of order", "did not compile", ""]
    assert contenders[0].result == 4.0
    assert contenders[3].result == 6.0
    assert ratio(contenders[0].samples, contenders[3].samples) == pytest.approx(1.0, rel=50)
