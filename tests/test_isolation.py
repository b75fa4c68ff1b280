"""Measurements run in threads of their own, which may ask for more of them, and stop when nobody waits."""

import threading

import jax
import pytest

from pallasfuse import isolation
from pallasfuse.isolation import apart, together

DEVICE = jax.devices()[0]


def test_what_runs_together_may_run_others_apart_and_together():
    """As the lowering of a fused call inside of a program that is compiled for a comparison."""

    def inner():
        return apart(lambda: sum(together([lambda: 1, lambda: 2], DEVICE)), DEVICE)

    assert apart(lambda: together([inner, inner], DEVICE), DEVICE) == [3, 3]
    assert not isolation.is_inside()


def test_errors_are_the_callers():
    with pytest.raises(ZeroDivisionError):
        apart(lambda: together([lambda: 1 // 0, lambda: 1], DEVICE), DEVICE)
    assert apart(lambda: 1, DEVICE) == 1


def test_what_nobody_waits_for_is_not_begun(monkeypatch):
    """A user who interrupts a check does not wait for all that was to be compiled."""
    begun, interrupted, ended = [], threading.Event(), threading.Event()
    monkeypatch.setattr(isolation, "cores", lambda: 1)

    class Interrupted(isolation.Future):
        def result(self, timeout=None):
            while not begun:
                pass
            interrupted.set()
            raise KeyboardInterrupt

    def work():
        begun.append(1)
        assert interrupted.wait(60)
        given_up = isolation._here.given_up
        assert given_up.wait(60)

    def several():
        try:
            return together([work] * 5, DEVICE)
        finally:
            ended.set()

    monkeypatch.setattr(isolation, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        apart(several, DEVICE)
    assert ended.wait(60) and len(begun) == 1
