"""Programs compared on a device: what fails, what does not fit, and how short ones are measured."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import measure, samples, timing
from pallasfuse.isolation import apart

DEVICE = jax.devices()[0]
SHAPE = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def compare(functions, avals=(SHAPE,), **more):
    return apart(lambda: measure.compare(functions, avals, DEVICE, budget_s=0.1, **more), DEVICE)


def once(x):
    return x @ x


def often(x):
    for _ in range(40):
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
    def drawn(*_):
        raise TypeError("values of this type are not drawn")

    monkeypatch.setattr(samples, "drawn", drawn)
    found = compare({"once": once, "often": often})
    assert found.skipped == "no arguments could be drawn (TypeError: values of this type are not drawn)"


def test_random_keys_are_drawn():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (2, 3)))
    found = compare(
        {"a": jax.random.bits, "b": lambda k: jax.random.bits(k) + 1}, [jax.ShapeDtypeStruct((), keys.dtype)]
    )
    assert set(found.microseconds) == {"a", "b"}
    assert samples.drawn([keys], DEVICE)[0].shape == (2, 3)


def test_errors_of_memory_may_pass():
    assert measure.is_shortage("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes")
    assert not measure.is_shortage("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 1048576")


@pytest.mark.parametrize("expected_us", [None, 5.0, 1e9])
def test_short_programs_of_an_accelerator_are_repeated(monkeypatch, expected_us):
    """As on a GPU, where a short program takes less than it takes to send it off."""
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    monkeypatch.setattr(measure, "_SHORT_S", 0.1)
    compiled, original = [], timing.repeated
    monkeypatch.setattr(timing, "repeated", lambda f, times: compiled.append(times) or original(f, times))
    small = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = compare({"often": often, "once": once}, [small], expected_us=expected_us)
    assert compiled == [32, 32]
    assert found.winner == "once"
    assert found.microseconds["once"] < 1e3


def test_long_programs_of_an_accelerator_are_not(monkeypatch):
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    monkeypatch.setattr(timing, "repeated", lambda f, times: pytest.fail("it is long"))
    monkeypatch.setattr(measure, "_SHORT_S", 1e-4)
    large = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    assert compare({"often": often, "once": once}, [large]).winner == "once"


def test_a_repeated_program_that_does_not_compile_is_measured_by_itself(monkeypatch):
    monkeypatch.setattr(measure, "_is_accelerator", lambda device: True)
    monkeypatch.setattr(timing, "repeated", lambda f, times: does_not_compile)
    small = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert set(compare({"often": often, "once": once}, [small]).microseconds) == {"often", "once"}


# --- drawn arguments


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64", "float8_e4m3fn"]
)
def test_values_are_plausible(dtype):
    shapes = [
        jax.ShapeDtypeStruct((300, 70), dtype),
        jax.ShapeDtypeStruct((), dtype),
        jax.ShapeDtypeStruct((0, 3), dtype),
    ]
    matrix, scalar, empty = samples.drawn(shapes, DEVICE)
    assert [x.shape for x in (matrix, scalar, empty)] == [(300, 70), (), (0, 3)]
    assert matrix.dtype == dtype
    if dtype == "bool":
        assert 0.4 < matrix.mean() < 0.6
    elif jnp.issubdtype(matrix.dtype, jnp.integer):
        assert int(matrix.min()) >= 0
        assert int(matrix.max()) <= min(300, jnp.iinfo(dtype).max)
        assert int(matrix.max()) > 100
    else:
        wide = jnp.abs(matrix.astype("complex64"))
        assert 0.5 < float(wide.mean()) < 1.5
        assert not bool((matrix[0] == matrix[1]).all())


def test_large_arrays_are_written_out_where_they_are(monkeypatch):
    from dataclasses import dataclass

    @dataclass
    class Gpu:
        platform: str = "gpu"

    monkeypatch.setattr(jax, "device_put", lambda x, device: jnp.asarray(x))
    monkeypatch.setattr(samples, "_ON_HOST_BYTES", 1 << 10)
    (x,) = samples.drawn([jax.ShapeDtypeStruct((700, 300), jnp.float32)], Gpu())
    assert x.shape == (700, 300)
    assert 0.9 < float(x.std()) < 1.1


def test_the_free_memory_of_the_host_is_known():
    assert samples.free_bytes(DEVICE) > 1 << 20
