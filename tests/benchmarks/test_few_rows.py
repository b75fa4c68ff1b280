"""Launches of products of few rows are drawn as they can run, and a drawn one is what runs."""

import jax
import numpy as np
import pytest

from benchmarks.few_rows import CASES, SHARED_BYTES, Launch, _of, fused, launches


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_drawn_launches_differ_and_divide_the_sum(case):
    drawn = launches(case, 20)
    assert 10 <= len(drawn) == len(set(drawn)) <= 20
    assert drawn == launches(case, 20) != launches(case, 20, seed=1)
    assert all(case.shapes[0][1] % (w.summed * w.parts) == 0 for w in drawn)
    elements = case.rows + 64 * case.matrices  # beside one that is summed
    size = np.dtype(case.dtype).itemsize if case.dtype != "bfloat16" else 2
    assert all(w.stages * w.summed * elements * size <= SHARED_BYTES for w in drawn)


@pytest.mark.parametrize("kind", ["relu", "turned", "gated", "added"])
def test_a_product_runs_as_it_is_asked_for(kind):
    case = _of(kind, 3, 256, 128, "float32")
    assert case.rows == 16
    structs = [jax.ShapeDtypeStruct(s, case.dtype) for s in case.shapes]
    (kernel,) = fused(case, Launch(32, 2, 8, 3)).explain(*structs).kernels
    assert kernel.tiles["j"] == 32
    assert {p.program.warps for p in kernel.phases[:1]} == {8}
    arrays = [np.random.default_rng(n).normal(size=s).astype(np.float32) for n, s in enumerate(case.shapes)]
    x, w, *more = arrays
    silu = lambda y: y / (1 + np.exp(-y))  # noqa: E731
    wanted = {
        "relu": lambda: np.maximum(x @ w, 0), "turned": lambda: np.maximum(x @ w.T, 0),
        "gated": lambda: silu(x @ w) * (x @ more[0]), "added": lambda: x @ w + more[0],
    }  # fmt: skip
    np.testing.assert_allclose(case.function(*arrays), wanted[kind](), rtol=1e-4, atol=1e-4)
