"""Axes are interned: equal ones are one object, whichever way they are made."""

import copy
import gc
import pickle
from dataclasses import FrozenInstanceError, replace
from threading import Thread

import pytest

from pallasfuse.ir.axes import Axis


def test_equal_axes_are_one_object():
    i = Axis("i", 8)
    assert Axis("i", 8) is i is Axis(name="i", extent=8) is replace(Axis("j", 8), name="i")
    assert i != Axis("i", 9) and i != Axis("j", 8) and i != ("i", 8)
    assert pickle.loads(pickle.dumps(i)) is i is copy.copy(i) is copy.deepcopy([i])[0]
    assert sorted({Axis("j", 2), i, Axis("i", 3)}) == [Axis("i", 3), i, Axis("j", 2)]
    with pytest.raises(FrozenInstanceError):
        i.extent = 9  # type: ignore[misc]


def test_threads_get_the_same_axes():
    found: list[list[Axis]] = []
    threads = [Thread(target=lambda: found.append([Axis(f"t{n}", n) for n in range(2000)])) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(a is b for other in found for a, b in zip(found[0], other, strict=True))


def test_axes_that_nobody_has_are_forgotten():
    from pallasfuse.ir import axes

    gc.freeze()  # what other tests have left is not looked through
    Axis("nobody has it", 1 << 20)
    gc.collect()
    assert ("nobody has it", 1 << 20) not in axes._interned
