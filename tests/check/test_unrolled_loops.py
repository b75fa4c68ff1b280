"""What a clock says about loops with trips written out."""

import jax
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import loop_check, unrolled_loops
from pallasfuse.options import FuseOptions
from pallasfuse.unrolled_loops import MOST_TRIPS
from pallasfuse.verdicts import LOOPS
from tests.check.clock import Clock
from tests.test_unrolled_loops import X, decayed, trips


@pytest.fixture
def partly(monkeypatch):
    """Loops are unrolled in part, as on a GPU."""
    original = unrolled_loops.unrollings
    monkeypatch.setattr(
        "pallasfuse.primitive.unrollings", lambda jaxpr, exclude, partly: original(jaxpr, exclude, partly=True)
    )


@pytest.mark.usefixtures("partly")
@pytest.mark.parametrize("faster", [True, False])
def test_the_clock_decides(monkeypatch, faster):
    clock = Clock(2.0 if faster else 0.5)
    monkeypatch.setattr(loop_check, "compare", clock)
    for _ in range(2):
        fused = pf.fuse(decayed)
        for got, want in zip(fused(X), decayed(X), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
        plan = fused.explain(X)
        (verdict,) = (v for v in plan.verdicts if v.subject == LOOPS)
        assert verdict.kept == plan.unrolled == plan.fuses == faster
        assert trips(plan.converted.original) == [MOST_TRIPS if faster else 1]
        assert ("they are used" if faster else "as they are") in fused.explain(X).summary
    assert len(clock.compared) == 1


@pytest.mark.usefixtures("partly")
def test_without_a_clock_nothing_is_unrolled(monkeypatch):
    clock = Clock(2.0)
    monkeypatch.setattr(loop_check, "compare", clock)
    fused = pf.fuse(decayed, options=FuseOptions(check=False))
    fused(X)
    assert not fused.explain(X).unrolled
    with pytest.raises(pf.FusionError, match="scan"):
        pf.fuse(decayed, strict=True)(X)
    assert not clock.compared


@pytest.mark.usefixtures("partly")
def test_a_loop_that_might_not_end_is_not_run_on_drawn_arguments(monkeypatch):
    clock = Clock(2.0)
    monkeypatch.setattr(loop_check, "compare", clock)

    def function(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, decayed(x)[1])

    fused = pf.fuse(function)
    np.testing.assert_allclose(fused(X), function(X), rtol=1e-6)
    assert not clock.compared and not fused.explain(X).unrolled


@pytest.mark.usefixtures("partly")
def test_a_failure_of_the_check_leaves_loops_as_they_are(monkeypatch):
    monkeypatch.setattr(loop_check, "compare", lambda *args, **kwargs: 1 / 0)
    fused = pf.fuse(decayed)
    with pytest.warns(UserWarning, match="loops could not be checked .ZeroDivisionError"):
        np.testing.assert_allclose(fused(X)[1], decayed(X)[1], rtol=1e-6)
