"""The numbers that a difference in the fields is tried on."""

import numpy as np
import pytest

from pallasfuse.ir.domain import FLOAT64
from pallasfuse.ir.evaluate import evaluate_nest
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.verification.field import tower
from pallasfuse.verification.folds import GroupRun
from pallasfuse.verification.reals import RealComparison, Reals
from tests.programs_by_name import only_group, program
from tests.verification.test_folds import negated, spoiled, swapped_frames

pytestmark = pytest.mark.any_jax

TRIALS = 64


def reals(seed=0):
    return Reals(tower(1, TRIALS, seed))


def compared(a, b, dtype="float64"):
    comparison = RealComparison(dtype)
    comparison.add(a, b, TRIALS)
    return comparison.mismatch


@pytest.mark.parametrize(
    ("op", "evaluate"), [("mul", np.multiply), ("max", np.maximum), ("div", np.divide), ("lt", np.less)]
)
def test_operations_are_those_of_float64(op, evaluate):
    fields = reals()
    x, y = fields.random((3, 1), "float32"), fields.random((3, 4), "float32")
    found = fields.apply(op, [x, y], "bool" if op == "lt" else "float32")
    assert np.array_equal(found.real, evaluate(x.real, y.real))


def test_reductions_are_those_of_float64():
    fields = reals()
    x = fields.random((3, 4), "float32")
    for reducer in (SUM, MAX):
        found = fields.reduce(reducer, x, (1,), "float32")
        assert np.array_equal(found.real, FLOAT64.reduce(reducer, x.real, (1,), "float32"))


def test_positive_numbers_integers_and_casts():
    fields = reals()
    assert (fields.squares(fields.random((3,), "float32")).real > 0).all()
    assert set(np.unique(fields.random((50,), "int32").real)) == set(range(-3, 6))
    assert fields.random((3,), "bool").real.dtype == bool
    far = fields.apply("convert", [fields.constant(-1e30, "float32", 0)], "float16")
    assert far.real.item() == -np.inf


def run(name, change=None, split=False):
    group = only_group(name) if change is None else spoiled(only_group(name), change)[0]
    fields = reals()
    loops = program(name)
    known = {t.name: fields.squares(fields.random([a.extent for a in t.axes], t.dtype)) for t in loops.inputs}
    for nest in loops.nests:
        assert isinstance(nest, Nest)
        known[nest.name] = evaluate_nest(nest, known, fields).typed(nest.dtype)
    found = GroupRun(group, known, fields, split=split).run()
    return [n for n, value in found if compared(known[n], value, "float32") is not None]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["softmax", "attention", "causal", "variance", "norm_dot", "entropy", "fourth_moment"])
def test_right_folds_agree(name, split):
    assert run(name, split=split) == []


@pytest.mark.parametrize("change", [negated, swapped_frames])
@pytest.mark.parametrize("name", ["softmax", "variance", "attention"])
def test_wrong_folds_differ(name, change):
    assert run(name, change) or run(name, change, split=True)


# --- comparisons


def test_a_few_inputs_that_differ_are_enough():
    fields = reals()
    x = fields.random((2, 3), "float32")
    for count, differs in ((0, False), (2, False), (3, True), (TRIALS, True)):
        other = x.real.copy()
        other[1, 2, :count] *= 1.01
        found = compared(x, fields.real(other, "float32"), "float32")
        assert (found is not None) == differs
        assert found is None or (
            found.index == (1, 2) and float(found.found) == pytest.approx(1.01 * float(found.expected), rel=1e-4)
        )


def test_roundings_of_constants_are_no_difference():
    fields = reals()
    x = fields.random((5,), "float32")
    rounded = fields.real(x.real * (1 + 2.0**-24), "float32")
    assert compared(x, rounded, "float32") is None
    assert compared(x, rounded, "float64") is not None


def test_special_values_differ_from_numbers_and_agree_with_themselves():
    fields = reals()
    x = fields.random((5,), "float32")
    for special in (np.nan, np.inf, -np.inf):
        other = fields.real(np.full_like(x.real, special), "float32")
        assert compared(x, other) is not None
        assert compared(other, x) is not None
        assert compared(other, other) is None
    assert (
        compared(fields.real(np.full(TRIALS, np.inf), "float32"), fields.real(np.full(TRIALS, -np.inf), "float32"))
        is not None
    )


def test_integers_differ_exactly():
    fields = reals()
    n = fields.random((5,), "int32")
    assert compared(n, n) is None
    assert compared(n, fields.real(n.real + 1, "int32")) is not None
