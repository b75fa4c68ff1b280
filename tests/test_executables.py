"""Programs that are compiled to be timed: each once, several at the same time, errors beside them."""

import threading

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import executables, isolation
from pallasfuse.executables import Executables, Request
from pallasfuse.isolation import apart

DEVICE = jax.devices()[0]
SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


@pytest.fixture
def compilations(monkeypatch):
    """Counts what is lowered and what is compiled."""
    counts = {"lowered": 0, "compiled": 0}
    original = executables._lowered

    class Counted:
        def __init__(self, lowered):
            counts["lowered"] += 1
            self.as_text, self._compile = lowered.as_text, lowered.compile

        def compile(self):
            counts["compiled"] += 1
            return self._compile()

    monkeypatch.setattr(executables, "_lowered", lambda *args: Counted(original(*args)))
    return counts


def programs(made, *functions, times=1):
    return apart(lambda: made.of([Request(f, [SHAPE], times) for f in functions], DEVICE), DEVICE)


def square(x):
    return x @ x


def test_a_function_is_compiled_once(compilations):
    made = Executables()
    first, again = programs(made, square, square)
    (later,) = programs(made, square)
    assert first is again is later
    assert compilations == {"lowered": 1, "compiled": 1}
    x = jnp.arange(64.0).reshape(8, 8)
    assert jnp.allclose(first(x), x @ x)


def test_programs_of_one_text_are_one_whatever_they_are_called(compilations):
    first, other, different = programs(Executables(), square, lambda y: y @ y, lambda y: y @ y + 1)
    assert first is other and first is not different
    assert compilations == {"lowered": 3, "compiled": 2}


def test_a_function_that_runs_more_often_is_another_program():
    made = Executables()
    assert programs(made, square)[0] is not programs(made, square, times=2)[0]


def test_functions_of_the_user_are_never_taken_for_each_other():
    """The text of a program says that it calls one, but not which."""

    def with_callback(number):
        return lambda x: jax.pure_callback(lambda y: y + number, SHAPE, x)

    first, other = programs(Executables(), with_callback(1), with_callback(2))
    x = jnp.zeros((8, 8), jnp.float32)
    assert float(first(x)[0, 0]) == 1 and float(other(x)[0, 0]) == 2


def test_errors_take_the_place_of_programs():
    def does_not_trace(x):
        raise ZeroDivisionError("mine")

    def does_not_compile(x):
        return jax.ffi.ffi_call("pallasfuse_no_such_function", SHAPE)(x)

    made = Executables()
    found, traced, missing = programs(made, square, does_not_trace, does_not_compile)
    assert not isinstance(found, str)
    assert traced == "ZeroDivisionError: mine"
    assert isinstance(missing, str) and "pallasfuse_no_such_function" in missing
    assert programs(made, does_not_trace) == [traced]


@pytest.mark.skipif(isolation.cores() < 2, reason="one core compiles one program at a time")
def test_several_are_compiled_at_the_same_time():
    both = threading.Barrier(2, timeout=60)  # nobody passes alone

    def waits(x):
        both.wait()
        return x + 1

    def waits_too(x):
        both.wait()
        return x + 2

    assert not any(isinstance(p, str) for p in programs(Executables(), waits, waits_too))
