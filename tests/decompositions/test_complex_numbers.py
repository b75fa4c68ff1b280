"""Complex numbers in parts, against XLA's own, and against complex128 where roundings differ."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import FuseOptions, _compat, device, fuse, leave
from pallasfuse.decompositions.complex_numbers import LONGEST_SUM, in_parts
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.targets import find
from pallasfuse.written_out import forms, surely_faster

CPU, GPU = device.find("cpu", "cpu"), device.find("NVIDIA H200", "gpu")


def drawn(*shape, seed=0):
    real, imag = np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)
    return jnp.asarray(real + 1j * imag)


def run(jaxpr, arrays):
    return jax.jit(partial(_compat.eval_jaxpr, jaxpr, jaxpr.consts))(*arrays)


def complex_operations(jaxpr):
    """Names the operations of a program that have complex operands and complex results."""
    found = set()
    for eqn in flatten(jaxpr).eqns:
        types = [all("complex" not in str(a.aval.dtype) for a in of) for of in (eqn.invars, eqn.outvars)]
        found |= set() if any(types) else {eqn.primitive.name}
        for body in (b for v in eqn.params.values() for b in (v if isinstance(v, tuple | list) else (v,))):
            found |= complex_operations(body) if isinstance(body, _compat.Jaxpr) else set()
    return found


X, Y, R = drawn(6, 5), drawn(6, 5, seed=1), jnp.abs(drawn(6, 5, seed=2))
PROGRAMS = {
    "sums": lambda x, y, r: (x * y + y, x - x * y, x * y + r, r - x * y, -(x * y), x * y + 2, 1j - x * y),
    "products": lambda x, y, r: (x * y, r * x, x * 3, 2j * y, x**2, jnp.square(y), x.conj() * y),
    "quotients": lambda x, y, r: (x / y, x / r, r / y, 1 / x, x / 3, x / (2 - 1j)),
    "reductions": lambda x, y, r: (jnp.sum(x * y, 0), jnp.sum(x / y[:, :1], (0, 1)), jnp.mean(x * x, 1)),
    "parts": lambda x, y, r: ((x * y).real, (x * y).imag, jnp.abs(x * y), jnp.conj(x * y), (x + r).real, (r * (1 + 0j)).imag),
    "shapes": lambda x, y, r: (
        (x * y).T, jnp.reshape(x * y, (10, 3)), jnp.concatenate([x * y, x * r]), jnp.flip(x * y, 0), jnp.pad(x * y, 1),
        jnp.pad(x * y, 1, constant_values=2j), jnp.stack([x * y, r * x]), (x * y)[1:4, ::2], jnp.where(r > 1, x * y, r),
        jnp.broadcast_to((x * y)[:1], (4, 5)), lax.dynamic_slice(x * y, (1, jnp.argmax(r[0])), (2, 2)),
    ),
    "literals": lambda x, y, r: (
        (x / y) * 1, (r + 1j).imag * 2, (1j - r).imag, (r + 1j).T, (r - 1j) * 2j, jnp.where(r > 1, r + 0j, x),
        jnp.sum((r + 1j).imag),
    ),
    "types": lambda x, y, r: (
        (x * y - x * y).astype(bool), ((x * y).real * 1j).astype(bool), r.astype(jnp.complex64) * x,
        lax.convert_element_type((x * y).real, jnp.int32),
    ),
    "no rule": lambda x, y, r: (jnp.exp(x * y) * x, jnp.fft.fft(x * y) / y, x == x * 1, jnp.cumsum(x * y, 0)),
}  # fmt: skip


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("numbers", [CPU, GPU], ids=["cpu", "gpu"])
def test_results_are_those_of_the_program(name, numbers):
    jaxpr = jax.make_jaxpr(PROGRAMS[name])(X, Y, R)
    found, _ = in_parts(jaxpr, numbers)
    assert found is not jaxpr
    with jax.enable_x64(True):
        exact = PROGRAMS[name](
            *(np.asarray(a, "complex128" if a.dtype == jnp.complex64 else "float64") for a in (X, Y, R))
        )
    for one, own, wanted in zip(run(found, (X, Y, R)), run(jaxpr, (X, Y, R)), jax.tree.leaves(exact), strict=True):
        assert (one.shape, one.dtype) == (own.shape, own.dtype)
        error, least = (np.max(np.abs(np.asarray(a, "complex128") - wanted)) for a in (one, own))
        assert error <= 4 * least + 1e-6 * np.max(np.abs(np.asarray(wanted)))


@pytest.mark.parametrize("name", ["sums", "products", "quotients", "reductions"])
def test_nothing_is_computed_of_complex_numbers_for_which_there_is_a_rule(name):
    found, _ = in_parts(jax.make_jaxpr(PROGRAMS[name])(X, Y, R), CPU)
    assert not complex_operations(found)


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1.0, 1e19, 1e30])
def test_quotients_neither_overflow_nor_lose_digits(scale):
    values = [3 + 4j, -1 + 1e-3j, 1e-3 - 2j, 5, 2j]
    x, y = jnp.asarray(values, "complex64"), jnp.asarray([scale * v for v in values[::-1]], "complex64")
    found, _ = in_parts(jax.make_jaxpr(jnp.divide)(x, y), CPU)
    wanted = np.asarray(x, "complex128") / np.asarray(y, "complex128")
    given = np.asarray(run(found, (x, y))[0])
    np.testing.assert_allclose(given, wanted.astype("complex64"), rtol=2e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_absolute_values_neither_overflow_nor_lose_digits(scale):
    x = jnp.asarray(
        [scale * v for v in (3 + 4j, -5, 2j, 1 + 1e-4j)] + [0, np.inf, complex(np.inf, np.inf), complex(1, -np.inf)]
    )
    x = x.astype("complex64")
    found, _ = in_parts(jax.make_jaxpr(lambda x: (jnp.abs(x), x * x))(x), CPU)
    assert not complex_operations(found)
    np.testing.assert_allclose(run(found, (x,))[0], np.abs(np.asarray(x)), rtol=1e-6)


def test_what_is_divided_by_zero_is_infinite_or_no_number_as_in_xla():
    x, zero = jnp.asarray([1, -1, 1j, 1 - 2j, 0], "complex64"), jnp.zeros(5, "complex64")
    jaxpr = jax.make_jaxpr(jnp.divide)(x, zero)
    found, _ = in_parts(jaxpr, CPU)
    for part in (jnp.real, jnp.imag):
        given, own = part(run(found, (x, zero))[0]), part(run(jaxpr, (x, zero))[0])
        np.testing.assert_array_equal(given, own)


def test_matrices_with_short_sums_are_in_parts_on_a_gpu_alone():
    def products(x, y, r):
        return (
            jnp.einsum("bij,bkj->bik", x, y),
            jnp.einsum("bij,bjk->ikb", x, jnp.swapaxes(r, 1, 2)),
            jnp.tensordot(x, y, 3),
        )

    arrays = drawn(7, 2, 3), drawn(7, 2, 3, seed=1), drawn(7, 2, 3, seed=2).real
    jaxpr = jax.make_jaxpr(products)(*arrays)
    assert in_parts(jaxpr, CPU)[0] is jaxpr
    found, _ = in_parts(jaxpr, GPU)
    assert complex_operations(found) == {"dot_general"}  # the sum over all
    for given, own in zip(run(found, arrays), run(jaxpr, arrays), strict=True):
        np.testing.assert_allclose(given, own, rtol=1e-4, atol=1e-5)


def test_matrices_with_long_sums_stay_complex():
    def product(x, y):
        return x @ y

    for length, stays in ((LONGEST_SUM, False), (LONGEST_SUM + 1, True)):
        jaxpr = jax.make_jaxpr(product)(drawn(3, length), drawn(length, 4))
        assert (in_parts(jaxpr, GPU)[0] is jaxpr) == stays


def test_bodies_of_loops_and_choices_are_in_parts():
    def loops(x, y):
        def trip(carry, each):
            return lax.cond(each.real[0] > 0, lambda c: c / each, lambda c: c * each, carry), jnp.abs(carry * each)

        last, lengths = lax.scan(trip, x[0], y)
        return last, lengths, lax.while_loop(lambda c: jnp.abs(c[0]) < 9, lambda c: c * 2j, x[0] / y[0])

    jaxpr = jax.make_jaxpr(loops)(X, Y)
    found, _ = in_parts(jaxpr, CPU)
    assert not complex_operations(found) - {"scan", "while", "cond", "slice", "squeeze"}
    for given, own in zip(run(found, (X, Y)), run(jaxpr, (X, Y)), strict=True):
        np.testing.assert_allclose(given, own, rtol=1e-5)


def test_quotients_count_as_often_as_they_are_computed_at_least():
    def once(x, y):
        return x / y

    programs = {
        7: lambda x, y: lax.scan(lambda c, _: (c / y, None), x, None, length=7)[0],
        2: lambda x, y: lax.cond(y[0, 0].real > 0, lambda x: x / y / x, lambda x: x / (y + 1) / (x + 1) / y, x),
        0: lambda x, y: lax.cond(y[0, 0].real > 0, lambda x: x / y, lambda x: x * y, x),
    }
    for numbers, instructions, cores in ((GPU, 75, 1), (CPU, 40, CPU.multiprocessors)):
        own_us = in_parts(jax.make_jaxpr(once)(X, Y), numbers)[1]
        assert own_us == pytest.approx(1e-3 * instructions * X.size / (numbers.vector_gop_s * cores))
        for times, program in programs.items():
            assert in_parts(jax.make_jaxpr(program)(X, Y), numbers)[1] == pytest.approx(times * own_us)
    for others in (
        lambda x, y: x / y.real, lambda x, y: x * y, lambda x, y: x / 3, lambda x, y: x / (2 - 1j),
        lambda x, y: lax.while_loop(lambda c: jnp.abs(c[0, 0]) > 9, lambda c: c / y, x),
    ):  # fmt: skip
        assert in_parts(jax.make_jaxpr(others)(X, Y), GPU)[1] == 0


def test_programs_without_arithmetic_of_complex_numbers_stay():
    for function in (lambda x: jnp.fft.ifft(jnp.fft.fft(x.real) + 1).real, lambda x: x.T, lambda x: jnp.exp(x.real)):
        jaxpr = jax.make_jaxpr(function)(X)
        assert in_parts(jaxpr, GPU)[0] is jaxpr


def test_what_the_user_leaves_to_xla_stays_complex():
    def program(x, y):
        with jax.named_scope("mine"):
            kept = x / y
        return kept, x * y

    jaxpr = jax.make_jaxpr(program)(X, Y)
    found, _ = in_parts(jaxpr, CPU, ("mine",))
    assert complex_operations(found) == {"div"}
    left = jax.make_jaxpr(lambda x, y: leave(jnp.divide)(x, y) * y)(X, Y)
    assert "div" in str(in_parts(left, CPU)[0])
    assert complex_operations(in_parts(left, CPU)[0])


def cauchy(x, y):
    """Sums of quotients, as of the filters of state-space models."""
    return jnp.sum(x[:, None] / (1.5 - y[:, None] * x[None, :, :1]), axis=-1)


def test_without_a_clock_many_quotients_decide():
    target = find("mosaic_gpu").on(GPU).judged(timed=False, one_device=True)
    many = drawn(512, 256), drawn(512, 256, seed=1)
    jaxpr = jax.make_jaxpr(cauchy)(*many)
    assert not complex_operations(surely_faster(jaxpr, target))
    for function in (
        lambda x, y: jnp.sum(x[:, None] * y[None] * x, axis=-1),
        lambda x, y: (x[:1] / y[:1], jnp.cumsum(jnp.sin(x.real) @ y.real.T, axis=0)),
    ):
        others = jax.make_jaxpr(function)(*many)
        assert complex_operations(surely_faster(others, target)) == complex_operations(others) != set()


def test_a_clock_is_asked_about_all_others():
    target = find("xla").on(CPU).judged(timed=True, one_device=True)
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.sum(x * y, axis=-1))(X, Y)
    found = forms(jaxpr, target, jax.devices()[0], measure=False)["complex numbers in parts"]
    assert not complex_operations(found)


def test_what_is_excluded_in_the_body_of_a_loop_stays_complex():
    def loop(x, y):
        def trip(carry, each):
            with jax.named_scope("inner"):
                return carry / each, None

        with jax.named_scope("outer"):
            return lax.scan(trip, x[0], y)[0] * x

    target = find("xla").on(CPU).judged(timed=True, one_device=True)
    found = forms(jax.make_jaxpr(loop)(X, Y), target, jax.devices()[0], ("outer/inner",), measure=False)
    assert "div" in complex_operations(found["complex numbers in parts"])
    assert "mul" not in complex_operations(found["complex numbers in parts"])


def test_forms_on_a_cpu_have_their_fourier_transforms_in_turn():
    def spectra(x, y):
        return jnp.fft.fft(x[:, None] / y[None]), jnp.fft.fft(y)

    many = drawn(64, 64), drawn(64, 64, seed=1)
    jaxpr = jax.make_jaxpr(spectra)(*many)
    timed, untimed = (find("xla").on(CPU).judged(timed=timed, one_device=True) for timed in (True, False))
    found = (
        forms(jaxpr, timed, jax.devices()[0], measure=False)["complex numbers in parts"],
        surely_faster(jaxpr, untimed),
    )
    for form in found:
        assert form is not jaxpr
        choices = [
            len([e for e in flatten(one).eqns if e.primitive.name == "select_n"])
            for one in (in_parts(jaxpr, CPU)[0], form)
        ]
        assert choices[1] == choices[0] + 1


@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("bfloat16", "complex64"), ("complex64", "float32")])
def test_matrices_of_other_types_are_summed_in_the_type_of_the_result(types):
    one, other = (
        (drawn(3, 4, seed=n) if t == "complex64" else drawn(3, 4, seed=n).real).astype(t) for n, t in enumerate(types)
    )

    def product(one, other):
        return lax.dot_general(one, other, (((1,), (1,)), ((), ())), preferred_element_type="complex64") * 1j

    jaxpr = jax.make_jaxpr(product)(one, other)
    np.testing.assert_allclose(run(in_parts(jaxpr, GPU)[0], (one, other))[0], product(one, other), rtol=1e-5, atol=1e-6)


def test_fused_programs_are_right():
    found = fuse(cauchy, options=FuseOptions(price=True, check=False))(X, Y)
    np.testing.assert_allclose(found, cauchy(X, Y), rtol=1e-4)
