"""Things that a process does once, and steps in which Python looks for no garbage."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from pallasfuse.first_time import Once, Recent, one_task, shared, without_collection


def test_collection_goes_on_after_a_step_whatever_happens():
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="wrong"), without_collection():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_who_has_switched_collection_off_keeps_it_off():
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_thing_is_new_once():
    once = Once()
    assert [once.first("a"), once.first("a"), once.first("b")] == [True, False, True]


def test_recent_results_are_known_by_the_identity_of_arguments():
    calls = []

    def function(a, b):
        calls.append((a, b))
        return [a, b]

    recent = Recent(function, most=2)
    one, equal = [1], [1]
    assert recent(one, 2) is recent(one, 2)
    assert len(calls) == 1
    assert recent(equal, 2) is not recent(one, 2)  # equal, but another object
    assert len(calls) == 2
    recent([3], 2), recent(one, 2), recent(one, 2)
    assert len(calls) == 4  # the oldest of three was forgotten


def test_steps_of_a_task_share_values_until_it_ends():
    made = []

    def make():
        made.append(object())
        return made[-1]

    assert shared(["what"], make) is not shared(["what"], make)  # there is no task
    with one_task():
        first = shared(["what"], make)
        with one_task():
            assert shared(["what"], make) is first  # equal, and cannot be hashed
        assert shared(["what"], make) is first
        assert shared(["other"], make) is not first
    with pytest.raises(ValueError, match="wrong"), one_task():
        assert shared(["what"], make) is not first
        raise ValueError("wrong")
    assert shared(["what"], make) is not made[-2]


def test_threads_share_nothing():
    with one_task():
        first = shared("what", object)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(shared, "what", object).result() is not first
