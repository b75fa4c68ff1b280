"""`pallasfuse.verify` and what it prints; `FuseOptions(verify='stages')`."""

import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import execution, pipeline, report
from pallasfuse.errors import Refusal, TargetError, TraceError, VerificationError
from pallasfuse.fusion import candidates, folding
from pallasfuse.ir.expr import apply
from pallasfuse.options import FuseOptions
from tests.programs_by_name import attention, layer_norm, masked_attention, softmax, variance

RANDOM = np.random.default_rng(0)
QKV = tuple(RANDOM.normal(size=s).astype("float32") for s in [(40, 8), (300, 8), (300, 5)])
X = RANDOM.normal(size=(6, 4000)).astype("float32")
FORCED = FuseOptions(target="xla", tiles=(("i", 8), ("j", 64), ("l", 64)))


def causal(q, k, v):
    return masked_attention(lambda i, j: j <= i + 20)(q, k, v)


# --- what is right


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(("function", "arrays"), [(attention, QKV), (causal, QKV), (variance, (X,)), (softmax, (X,))],
                         ids=["attention", "causal", "variance", "softmax"])  # fmt: skip
def test_examples_are_equivalent(function, arrays):
    found = pf.verify(pf.fuse(function), *arrays, delta=1e-6)
    assert found.equivalent is True
    assert found.counterexample is None
    assert found.bound <= 1e-6
    assert found.bound == found.proof.bound
    (error,) = found.errors
    assert error.dtype == "float32"
    for value in (error.fused_max_ulp, error.fused_rms_ulp, error.plain_max_ulp, error.plain_rms_ulp):
        assert 0 <= value < 100
    assert error.fused_rms_ulp <= error.fused_max_ulp


def test_the_report_is_meant_to_be_read():
    found = pf.verify(pf.fuse(causal, options=FORCED), *QKV, delta=1e-3)
    text = str(found)
    assert text.startswith("causal on target xla: equivalent\n")
    assert f"wrong with probability at most {found.bound:.1e} ({found.proof.trials} tests over finite fields)" in text
    assert "opaque (any function would do): max and min" in text
    assert "error of result (float32): fused max" in text
    assert "ulp, unfused max" in text
    for stage in ("inlining of calls", "conversion to loops", "bounds of", "folds of", "lowering of"):
        assert f"  stage: {stage}" in text
    for axis, extent in found.proof.extents.items():
        assert f"{axis} = {extent}" in text
    for condition in found.plan.conditions:
        assert condition in text
    assert "NOT" not in text


def test_shapes_are_enough():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in QKV]
    found = pf.verify(pf.fuse(attention), *shapes, delta=1e-3)
    assert found.equivalent
    assert found.errors  # measured on values that were drawn
    again = pf.verify(pf.fuse(attention), *shapes, delta=1e-3)
    assert again.errors == found.errors
    assert pf.verify(pf.fuse(attention), *shapes, delta=1e-3, seed=1).errors != found.errors


def test_integers_booleans_and_keywords():
    @pf.fuse(static_argnames="scale")
    def function(x, *, mask, count, scale):
        return jax.nn.softmax(jnp.where(mask, x * scale, -jnp.inf), -1), count + 1

    shapes = {"mask": jax.ShapeDtypeStruct((40,), jnp.bool_), "count": jax.ShapeDtypeStruct((), jnp.int32)}
    found = pf.verify(function, X[:, :40], **shapes, scale=2.0, delta=1e-2)
    assert found.equivalent, str(found)
    assert {e.output for e in found.errors} == {"result 0"}  # integers are compared, not measured


def test_half_precision_is_measured_in_its_own_ulp():
    found = pf.verify(pf.fuse(softmax), X.astype(np.float16), delta=1e-2)
    assert found.equivalent
    assert found.errors[0].dtype == "float16"
    assert found.errors[0].fused_max_ulp <= 4


def test_what_the_exceptions_of_a_plan_allow_is_no_counterexample():
    x = np.concatenate([X[:, :60], np.full((1, 60), 3e38, "float32")])

    def deviation(x):
        return jnp.std(x, -1)

    options = FuseOptions(target="xla", price=False)
    found = pf.verify(pf.fuse(deviation, options=options), x)
    assert found.plan.exceptions
    assert found.counterexample is None
    assert not found.equivalent
    assert "not covered: execution: result[6] is nan, expected inf, which the exceptions of the plan allow" in str(
        found
    )
    assert pf.verify(pf.fuse(deviation, options=replace(options, strict=True)), x).equivalent


@pytest.mark.deep  # `test_shapes_are_enough` verifies without arrays, too
def test_huge_shapes_do_not_allocate():
    shapes = [jax.ShapeDtypeStruct((8192, 64), jnp.float32)] * 3
    fused = pf.fuse(causal)
    pf.verify(fused, *[jax.ShapeDtypeStruct((512, 64), jnp.float32)] * 3, target="triton", delta=1e-2)  # tables
    monkey = pytest.MonkeyPatch()
    monkey.setattr(report, "_MOST_BYTES", 1 << 20)
    try:
        tracemalloc.start()
        found = pf.verify(fused, *shapes, delta=1e-2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        monkey.undo()
    assert found.equivalent
    assert "0.5 GiB for one value in float64" in found.not_measured
    assert "floating point not measured" in str(found)
    assert peak < 8192 * 8192


def test_another_target_is_planned_and_not_run():
    found = pf.verify(pf.fuse(attention), *QKV, target="triton", delta=1e-3)
    if jax.default_backend() == "cpu":
        assert found.not_measured == "no device for target triton"
        assert not found.errors
    assert found.equivalent
    assert found.plan.target.name == "triton"
    assert "on target triton" in str(found)


def test_what_cannot_be_tested_is_not_established(monkeypatch):
    monkeypatch.setattr(pipeline, "prove", with_uncovered(pipeline.prove))
    found = pf.verify(pf.fuse(variance), X[:, :40], delta=1e-2)
    assert found.equivalent is False
    assert found.counterexample is None
    text = str(found)
    assert "not established" in text
    assert "not covered: planted" in text


def with_uncovered(prove):
    def wrapped(*args, **kwargs):
        return replace(prove(*args, **kwargs), holds=False, uncovered=("planted",))

    return wrapped


# --- what is wrong


def planted(change):
    """An emitter whose results are changed."""
    right = execution._EMITTERS["xla"]

    def run(program, inputs):
        return {name: change(value) for name, value in right(program, inputs).items()}

    return run


CHANGES = {
    "one element": (lambda x: x.at[3, 2].add(1.0), (3, 2)),
    "a row": (lambda x: x.at[5].set(0.0), (5, 0)),
    "not a number": (lambda x: x.at[7, 1].set(jnp.nan), (7, 1)),
    "infinite": (lambda x: x.at[0, 4].set(jnp.inf), (0, 4)),
}


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_result_is_a_counterexample_of_the_execution(monkeypatch, name):
    change, index = CHANGES[name]
    monkeypatch.setitem(execution._EMITTERS, "xla", planted(change))
    found = pf.verify(pf.fuse(attention), *QKV, delta=1e-2)
    assert found.equivalent is False
    assert found.proof.holds  # the plan is right
    assert found.counterexample.stage == "execution"
    assert found.counterexample.index == index
    text = str(found)
    assert "NOT equivalent" in text
    assert f"counterexample: execution: result{list(index)} is " in text


def test_a_wrong_integer_is_a_counterexample(monkeypatch):
    def function(x):
        return jnp.sum(x == jnp.max(x, -1, keepdims=True), -1)

    found = pf.verify(pf.fuse(function), X[:, :40], delta=1e-2)
    assert found.counterexample is None
    monkeypatch.setitem(execution._EMITTERS, "xla", planted(lambda x: x.at[1].add(1)))
    if found.plan.kernels:
        wrong = pf.verify(pf.fuse(function), X[:, :40], delta=1e-2).counterexample
        assert (wrong.stage, wrong.index) == ("execution", (1,))


@pytest.mark.parametrize("part", [0, 1])
def test_complex_results_are_compared_part_by_part(monkeypatch, part):
    """Roundings are none of the wrong ones, and either part may be wrong."""

    def sums(x, y):
        return jnp.sum(x[:, None] / y[None], axis=-1)

    x, y = (jax.ShapeDtypeStruct((256, 64), "complex64") for _ in range(2))
    priced = FuseOptions(price=True, check=False)
    found = pf.verify(pf.fuse(sums, options=priced), x, y, delta=1e-2)
    assert found.plan.kernels and found.equivalent
    right = execution._EMITTERS["xla"]

    def run(program, inputs):
        made = right(program, inputs)
        wrong = list(made)[part]
        return made | {wrong: made[wrong].at[3, 2].add(1.0)}

    monkeypatch.setitem(execution._EMITTERS, "xla", run)
    wrong = pf.verify(pf.fuse(sums, options=priced), x, y, delta=1e-2).counterexample
    assert (wrong.stage, wrong.index) == ("execution", (3, 2))


def negate_updates(right):
    """`fold_over` with a wrong sign in every repair."""

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        if isinstance(result, Refusal):
            return result
        accumulators = tuple(
            a if a.update is None else replace(a, update=apply("neg", a.update, dtype=a.update.dtype))
            for a in result.fold.accumulators
        )
        return replace(result, fold=replace(result.fold, accumulators=accumulators))

    return wrong


@pytest.fixture
def spoiled(monkeypatch):
    wrong = negate_updates(folding.fold_over)
    for module in (folding, candidates):
        monkeypatch.setattr(module, "fold_over", wrong)


@pytest.mark.usefixtures("spoiled")
def test_a_wrong_rewrite_names_itself_in_the_report():
    found = pf.verify(pf.fuse(attention, options=FORCED), *QKV, delta=1e-3)
    assert found.equivalent is False
    assert found.counterexample.stage.startswith("folds of")
    assert f"counterexample: {found.counterexample}" in str(found)
    assert found.bound == 1.0


# --- FuseOptions(verify="stages")


@pytest.mark.deep  # `test_a_wrong_rewrite_names_itself_when_a_plan_is_made` does, too
def test_stages_are_verified_when_a_plan_is_made():
    fused = pf.fuse(layer_norm, options=FuseOptions(verify="stages"))
    plan = fused.explain(X[:, :40], X[0, :40])
    assert plan.proof.holds
    assert plan.proof.bound <= 1e-9
    np.testing.assert_allclose(fused(X, X[0]), layer_norm(X, X[0]), rtol=1e-4, atol=1e-4)
    assert pf.fuse(layer_norm).explain(X[:, :40], X[0, :40]).proof is None


@pytest.mark.usefixtures("spoiled")
def test_a_wrong_rewrite_names_itself_when_a_plan_is_made():
    fused = pf.fuse(attention, options=replace(FORCED, verify="stages"))
    with pytest.raises(VerificationError, match=r"folds of .* expected .*bug in pallasfuse"):
        fused(*QKV)
    with pytest.raises(VerificationError, match="folds of"):
        fused.explain(*QKV)


def test_strict_accepts_nothing_that_is_not_covered(monkeypatch):
    monkeypatch.setattr(pipeline, "prove", with_uncovered(pipeline.prove))
    relaxed = pf.fuse(softmax, options=FuseOptions(verify="stages")).explain(X[:, :40])
    assert not relaxed.proof.holds
    with pytest.raises(VerificationError, match="planted"):
        pf.fuse(softmax, strict=True, options=FuseOptions(verify="stages")).explain(X[:, :40])


# --- wrong arguments


def test_wrong_arguments():
    fused = pf.fuse(softmax)
    with pytest.raises(TypeError, match=r"takes a function from pallasfuse\.fuse, got function"):
        pf.verify(softmax, X)
    for delta in (0, 1, -0.5, 2.0, float("nan")):
        with pytest.raises(ValueError, match="delta is a probability"):
            pf.verify(fused, X, delta=delta)
    with pytest.raises(TargetError, match="no target"):
        pf.verify(fused, X, target="abacus")
    with pytest.raises(TraceError):
        pf.verify(fused, "text")
    with pytest.raises(ValueError, match=r"FuseOptions\.verify"):
        FuseOptions(verify="everything")


def test_keys_of_random_numbers_as_arguments():
    @pf.fuse
    def function(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), softmax(x), 0.0)

    found = pf.verify(function, X[:, :40], jax.eval_shape(lambda: jax.random.key(0)), delta=1e-2)
    assert found.counterexample is None


def test_what_rounding_the_arguments_turns_over_is_not_wrong(monkeypatch):
    """A step that the kernel takes on the other side, at a point where rounding decides."""
    steps = np.float32([[0.25, 1.0, 2.0, 3.5] * 10] * 6)
    beside = planted(lambda x: jnp.where(steps == 2.0, x - 1, x))

    def floors(x):
        return jnp.floor(x) + 0 * softmax(x)

    assert pf.verify(pf.fuse(floors), steps, delta=1e-2).counterexample is None
    monkeypatch.setitem(execution._EMITTERS, "xla", beside)
    assert pf.verify(pf.fuse(floors), steps, delta=1e-2).counterexample is None
    assert pf.verify(pf.fuse(floors), steps + 0.125, delta=1e-2).counterexample.stage == "execution"
