"""Programs that a check compares are compiled once, and before the first of them is timed."""

import jax
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import check, executables, whole_calls
from pallasfuse.executables import Executables
from pallasfuse.isolation import apart
from tests.check.clock import X, left_to_xla
from tests.programs_by_name import softmax, variance


@pytest.fixture
def events(monkeypatch):
    """Tells in their order when programs are compiled, and when they are compared."""
    seen = []
    original = executables._lowered

    class Counted:
        def __init__(self, lowered):
            self.as_text, self._compile = lowered.as_text, lowered.compile

        def compile(self):
            seen.append("compiled")
            return self._compile()

    monkeypatch.setattr(executables, "_lowered", lambda *args: Counted(original(*args)))
    for module, what in ((check, "kernel"), (whole_calls, "call")):
        compare = module.compare
        monkeypatch.setattr(module, "compare", lambda *a, _c=compare, _w=what, **k: seen.append(_w) or _c(*a, **k))
    return seen


def function(x):
    """Two equal kernels, another one, and what XLA keeps between them."""
    return softmax(left_to_xla(x)), softmax(left_to_xla(-x)), variance(left_to_xla(x * 2.0))


def test_kernels_are_compiled_before_the_first_one_is_timed(events):
    pf.fuse(function)(X)
    kernels = [n for n, event in enumerate(events) if event == "kernel"]
    assert len(kernels) == 2
    assert "compiled" not in events[kernels[0] : kernels[-1]]
    # each kernel and XLA's program of its part, and XLA's own call
    assert events[: kernels[0]].count("compiled") in (5, 6)  # with cores to spare, the call with all kernels as well


def test_nothing_is_left_of_a_check(monkeypatch):
    made = []
    original = Executables.__init__
    monkeypatch.setattr(Executables, "__init__", lambda self: made.append(self) or original(self))
    pf.fuse(function)(X)
    assert made and not any(one._of_functions or one._of_texts for one in made)


def test_what_several_had_no_memory_for_is_compiled_once_more(monkeypatch):
    tried = []
    original = executables._lowered

    class Short:
        def __init__(self, lowered):
            self.as_text, self._compile = lowered.as_text, lowered.compile

        def compile(self):
            tried.append(1)
            if len(tried) <= 2:
                raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes")
            return self._compile()

    monkeypatch.setattr(executables, "_lowered", lambda *args: Short(original(*args)))
    x = np.ones((8, 8), np.float32)
    requests = [executables.Request(f, [x]) for f in (lambda x: x + 1, lambda x: x + 2)]
    device = jax.devices()[0]
    programs = apart(lambda: Executables().of(requests, device), device)
    assert not any(isinstance(p, str) for p in programs) and len(tried) == 4
