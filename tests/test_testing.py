"""`pallasfuse.testing`: right programs pass in every variant, planted mistakes fail with a message that says where, and bad input
is told from a mistake."""

import importlib
import sys
import unittest
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import pallasfuse as pf
from pallasfuse import execution, testing
from pallasfuse.tolerance import PLUS_ULPS, TIMES_PLAIN, PlainFunction, PlainResults
from pallasfuse.variants import VariedCall
from tests.mutation.mutants import MUTANTS
from tests.mutation.planting import Planting
from tests.users_programs import PROGRAMS

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 48)).astype("float32")


def several(x, y):
    """Outputs in a tree: floats, half precision and integers."""
    return {"p": jax.nn.softmax(x, -1), "moments": (jnp.mean(y, -1), jnp.argmax(x, -1))}


def weights(x):
    return jax.nn.softmax(x, -1)


@pytest.fixture
def fresh():
    """Functions that no other test has compiled."""

    def make(function):
        def copy(*args, **kwargs):
            return function(*args, **kwargs)

        return copy

    return make


@pytest.fixture
def mistake(monkeypatch):
    """Plants a mistake in what the emitter of kernels for the CPU computes."""

    def plant(spoil):
        real = execution._EMITTERS["xla"]
        monkeypatch.setitem(
            execution._EMITTERS, "xla",
            lambda program, inputs: {name: spoil(x) for name, x in real(program, inputs).items()},
        )  # fmt: skip

    return plant


# --- what is right passes


def test_a_right_program_passes_in_every_variant():
    ran = []

    def counted(function):
        def run(*args):
            ran.append(function)
            return function(*args)

        return run

    testing.assert_equivalent(several, X, X.astype(jnp.bfloat16))
    testing.assert_equivalent(several, X, X, variants=[counted, "with_jit"], prove=False)
    assert len(ran) == 1


def test_shapes_keywords_and_static_arguments(fresh):
    def scaled(x, *, factor, axis, shift=0.0):
        return jax.nn.softmax(x * factor + shift, axis)

    fused = pf.fuse(fresh(scaled), static_argnames="axis")
    shape = jax.ShapeDtypeStruct((4, 32), jnp.float16)
    testing.assert_equivalent(fused, shape, factor=0.5, axis=-1, variants=("with_jit", "vmap", "scan"), prove=False)


def test_methods():
    class Layer:
        factor = 2.0

        @pf.fuse
        def __call__(self, x):
            return jax.nn.softmax(self.factor * x, -1)

        @pf.fuse
        def again(self, x):
            return jax.nn.softmax(x, -1)

    testing.assert_equivalent(Layer().again, X, variants="with_jit", prove=False)


def test_roundings_of_the_program_are_explained(fresh, mistake):
    """A product is rounded to bfloat16 in one program and not in the other: float32 results differ by that."""
    program = PROGRAMS["attention_within_blocks"]
    arrays = [x.astype(jnp.bfloat16) for x in program.arrays()]
    testing.assert_equivalent(fresh(program.function), *arrays, variants="with_jit", prove=False)
    mistake(lambda x: 1.1 * x)
    with pytest.raises(AssertionError, match="kernel fused_"):
        testing.assert_equivalent(fresh(program.function), *arrays, variants="with_jit", prove=False)


# --- mistakes fail, and are told


@pytest.mark.parametrize("variant", ["vmap", pytest.param("scan", marks=pytest.mark.deep)])
def test_a_wrong_kernel_is_named(mistake, fresh, variant):
    def two(x, y):
        return {"p": jax.nn.softmax(x, -1), "moments": (jnp.min(x, -1) > 9, jnp.var(y, -1))}

    mistake(lambda x: x + (0.001 if x.dtype == jnp.float32 else 0))
    with pytest.raises(AssertionError) as caught:
        testing.assert_equivalent(fresh(two), X, X[:, :40], variants=variant, prove=False)
    heading, *lines, _, _, _, _ = str(caught.value).splitlines()
    assert f"in variant '{variant}', differs from the plain function in 2 of 3 outputs." in heading
    assert [line.split(":")[0] for line in lines[::3]] == ["output['moments'][1]", "output['p']"]
    for what, allowed, kernel in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert "the largest error is 0.001 at [" in what
        assert "4 times the plain function's own largest error against float64" in allowed
        assert kernel.startswith("  computed by kernel fused_")
        assert kernel.count("kernel fused_") == 1  # not the other output's
        assert "test_testing.py" in kernel  # the line of the function
    assert lines[2] != lines[5]
    assert "pallasfuse.verify" in str(caught.value)


def test_integers_are_to_be_equal(mistake, fresh):
    def count(x):
        return jnp.sum(x > 0, -1), jnp.max(x, -1)

    testing.assert_equivalent(fresh(count), X, variants="with_jit", prove=False)
    mistake(lambda x: x + (x.dtype == jnp.int32))
    with pytest.raises(AssertionError, match=r"(?s)output\[0\].*fused \d+, plain \d+.*allowed is 0: integers"):
        testing.assert_equivalent(fresh(count), X, variants="with_jit", prove=False)


def test_what_is_not_a_number_points_to_the_exceptions(mistake, fresh):
    mistake(lambda x: x.at[0].set(jnp.nan))
    with pytest.raises(AssertionError, match=r"(?s)fused nan.*exceptions.*strict=True"):
        testing.assert_equivalent(fresh(lambda x: jnp.var(x, -1)), X, variants="with_jit", prove=False)


def test_fused_functions_inside_are_tested(mistake, fresh):
    """The plain version of a function that calls a fused one calls the plain one."""
    inner = pf.fuse(fresh(weights))

    @jax.jit
    def model(x):
        return inner(x) + 1.0

    assert inner(X).shape == X.shape  # what is compiled already is not taken for the plain one
    testing.assert_equivalent(model, X, variants="without_jit")
    mistake(lambda x: 1.01 * x)
    other = pf.fuse(fresh(weights))
    with pytest.raises(AssertionError, match="kernel fused_"):
        testing.assert_equivalent(lambda x: other(x) + 1.0, X, variants="scan", prove=False)


def test_the_proof_counts(fresh, monkeypatch):
    """A wrong update of a running maximum, which the values do not show, as the tolerance is too large."""
    options = pf.FuseOptions(target="xla", tiles=(("j", 16),), price=False)
    given = {"variants": "with_jit", "options": options, "atol": 1e9}
    (mutant,) = (m for m in MUTANTS if m.name == "exponent_has_the_wrong_sign")
    mutant.plant(Planting(monkeypatch))
    testing.assert_equivalent(fresh(weights), X, **given, prove=False)
    with pytest.raises(AssertionError, match=r"(?s)the proof finds a counterexample.*kernel fused_.*next: "):
        testing.assert_equivalent(fresh(weights), X, **given)


# --- tolerances


def test_the_tolerance_is_derived(fresh):
    def far(x):
        return jnp.sum(x + 1000.0, -1)

    x = RANDOM.normal(size=(4, 5000)).astype("float32")
    results = PlainResults(PlainFunction(far, [x]), [[x]])
    exact = (x.astype(np.float64) + 1000.0).sum(-1)
    error = np.abs(results.leaves[0] - exact).max()
    ulp = float(np.spacing(np.float32(exact.max())))
    assert results.tolerance(0).atol == pytest.approx(TIMES_PLAIN * error + PLUS_ULPS * ulp)


def test_given_tolerances_are_used(mistake, fresh):
    mistake(lambda x: 1.001 * x)
    testing.assert_equivalent(fresh(weights), X, variants="with_jit", rtol=0.01, prove=False)
    testing.assert_equivalent(fresh(weights), X, variants="with_jit", atol=0.01, prove=False)
    with pytest.raises(AssertionError, match=r"allowed is 0 \+ 0.0001 of the plain value: as given"):
        testing.assert_equivalent(fresh(weights), X, variants="with_jit", rtol=1e-4, prove=False)


# --- options


def test_kernels_run_unless_what_users_run_is_asked_for(fresh):
    fused = pf.fuse(fresh(weights), options=pf.FuseOptions(price=True, check=False))
    assert not VariedCall(fused, (X,), {}, "own").plans[0].kernels  # so small that XLA is faster
    assert VariedCall(fused, (X,), {}, None).plans[0].kernels
    plan = VariedCall(fused, (X,), {}, pf.FuseOptions(target="interpret", price=False)).plans[0]
    assert plan.target.name == "interpret"


def test_a_function_without_kernels_is_warned_of():
    with pytest.warns(UserWarning, match="no kernel was derived"):
        testing.assert_equivalent(jnp.sin, X, variants="with_jit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testing.assert_equivalent(jnp.sin, X, variants="with_jit", options="own")


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((weights, X), {"variants": "jit"}, ValueError, "there is no variant 'jit': a variant is one of 'without_jit'"),
        ((weights, X), {"variants": ()}, ValueError, "nothing would be tested"),
        ((3, X), {}, TypeError, "the first argument is the function to test, got int"),
        ((weights, "x"), {}, TypeError, "'x', which is no array: name it in static_argnums"),
        ((weights, X), {"options": {"strict": True}}, TypeError, "options is a FuseOptions, 'own' or None"),
        ((weights, X), {"options": pf.FuseOptions(target="gpu9")}, pf.TargetError, "gpu9"),
        ((lambda x: jnp.var(x, -1), X.astype(int)), {"variants": "grad"}, ValueError, "'grad': there is no array of floats"),
        ((lambda x, n: x.reshape(n, -1), X, 2), {}, pf.TraceError, "static_argnums"),
        ((weights, X, X), {}, pf.TraceError, "could not be traced"),
    ],
)  # fmt: skip
def test_bad_input(arguments, options, error, match):
    with pytest.raises(error, match=match):
        testing.assert_equivalent(*arguments, **options)


def test_a_variant_that_the_plain_function_does_not_allow(fresh):
    def looped(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) > 0.5, lambda c: c / 2, jax.nn.softmax(x, -1))

    testing.assert_equivalent(looped, X, variants="with_jit", prove=False)
    with pytest.raises(ValueError, match=r"no variant 'grad': the plain function itself fails \(ValueError: Reverse"):
        testing.assert_equivalent(looped, X, variants="grad", prove=False)


def test_no_float64(fresh):
    def called_back(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, np.float32), weights(x))

    with pytest.raises(ValueError, match=r"no tolerance can be derived: .*: give `rtol` or `atol`"):
        testing.assert_equivalent(called_back, X, variants="with_jit", prove=False)
    testing.assert_equivalent(called_back, X, variants="with_jit", prove=False, rtol=1e-5)


def test_one_device_has_no_shards():
    if len(jax.devices()) > 1:
        pytest.skip("there are several")
    with pytest.raises(unittest.SkipTest, match="only one device"):
        testing.assert_equivalent(weights, X, variants="sharded")


def test_chex_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "chex", None)
    monkeypatch.delitem(sys.modules, "pallasfuse.testing")
    with pytest.raises(ImportError, match=r"pip install 'pallasfuse\[test\]'"):
        importlib.import_module("pallasfuse.testing")


# --- classes of tests


@testing.equivalence(weights, variants=("with_jit", "vmap", "sharded"))
def TestWeights():
    """Each variant is a test of its own."""
    return (X,)


class TestWithChex(chex.TestCase):
    @chex.variants(with_jit=True, without_device=True)
    def test_variants_of_chex(self):
        testing.assert_equivalent(weights, X, variants=self.variant, prove=False)

    @parameterized.parameters("with_jit", "with_device")
    def test_parameters_of_absl(self, variant):
        testing.assert_equivalent(weights, X, variants=variant, prove=False)


def test_a_class_has_a_test_for_each_variant(mistake, fresh):
    assert issubclass(TestWeights, chex.TestCase)
    assert TestWeights.__doc__ == "Each variant is a test of its own."
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(TestWeights)
    assert sorted(t._testMethodName for t in suite) == ["test_proof", "test_sharded", "test_vmap", "test_with_jit"]
    mistake(lambda x: 1.01 * x)
    wrong = testing.equivalence(fresh(weights), variants=("with_jit", "sharded"))(lambda: X)
    result = unittest.defaultTestLoader.loadTestsFromTestCase(wrong).run(unittest.TestResult())
    assert [t._testMethodName for t, _ in result.failures] == ["test_with_jit"]
    assert [t._testMethodName for t, _ in result.skipped] == ["test_sharded"]
    assert not result.errors
