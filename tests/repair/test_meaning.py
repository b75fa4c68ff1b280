"""A repaired fold gives what the original reduction gives at the final frames, for any frames on the way."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import Expr, Read, postorder, rename_axes
from pallasfuse.ir.reducers import REDUCERS, SUM
from pallasfuse.repair import OLD, Accumulator, Frame, Repair, accumulator_name, derive
from tests.repair.repair_cases import ACCEPTED, FIXED, Accepted, J, L, M, R, V, over_j

Array = np.ndarray[Any, Any]
Values = Mapping[str, float]


def chunk_terms(repair: Repair, data: Mapping[str, Array], frames: Values, part: Array) -> list[Any]:
    """Each accumulator over the elements `part`, framed at `frames`."""
    axis = Axis("j", len(part))
    here = {name: x[part] if np.ndim(x) else x for name, x in data.items()} | dict(frames)
    return [a.reducer.reduce(evaluate_expr(rename_axes(a.term, {J: axis}), (axis,), here)) for a in repair.accumulators]


def moved(repair: Repair, state: list[Any], data: Mapping[str, Array], old: Values, new: Values) -> list[Any]:
    """The state at the frames `new`, from the state at the frames `old`."""
    scope = {n: x for n, x in data.items() if not np.ndim(x)} | dict(new) | {n + OLD: x for n, x in old.items()}
    scope |= {accumulator_name(n): np.asarray(x) for n, x in enumerate(state)}
    return [evaluate_expr(a.update, (), scope) for a in repair.accumulators]


def combined(repair: Repair, a: list[Any], b: list[Any]) -> list[Any]:
    return [x.reducer.reduce([p, q]) for x, p, q in zip(repair.accumulators, a, b, strict=True)]


def folded(repair: Repair, data: Mapping[str, Array], path: list[Values], parts: list[Array]) -> list[Any]:
    state = chunk_terms(repair, data, path[0], parts[0])
    for old, new, part in zip(path, path[1:], parts[1:], strict=False):
        state = combined(repair, moved(repair, state, data, old, new), chunk_terms(repair, data, new, part))
    return state


def sample(body: Expr, frames: tuple[Frame, ...], seed: int) -> tuple[dict[str, Any], list[Values], list[Array]]:
    """Data, a path of frames and a random partition in random order; frames move up and down."""
    random = np.random.default_rng(seed)
    names = {n.tensor: n for n in postorder(body) if isinstance(n, Read)}
    data: dict[str, Any] = {}
    for name, node in names.items():
        shape = () if name in FIXED else (J.extent,)
        if name not in {f.name for f in frames}:
            data[name] = random.random(shape) < 0.6 if node.dtype == "bool" else random.normal(size=shape) + 0.1
            if name in FIXED:
                data[name] = np.abs(data[name]) + 0.3
    signs = {"positive": 1, "nonnegative": 1, "negative": -1, "nonpositive": -1}
    path = []
    turn = random.choice([-1, 1])
    for _ in range(4):
        step = {f.name: random.uniform(0.3, 2.2) * signs.get(f.sign, turn) for f in frames}
        if "sqrt" in str(body):
            step = {n: abs(x) for n, x in step.items()}
        path.append(step)
    cuts = np.sort(random.choice(np.arange(1, J.extent), size=3, replace=False))
    return data, path, np.split(random.permutation(J.extent), cuts)


@pytest.mark.sampled(8, cover=("case",))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_fold_in_random_chunks_equals_the_reduction(case: Accepted, seed: int) -> None:
    body = over_j(case.text, case.frames)
    repair = derive(body, case.reducer, case.frames, over=(J,))
    assert isinstance(repair, Repair)
    data, path, parts = sample(body, case.frames, seed)
    got = folded(repair, data, path, parts)
    wanted = chunk_terms(repair, data, path[-1], np.arange(J.extent))
    assert np.all(np.isfinite(wanted))
    for value, target in zip(got, wanted, strict=True):
        np.testing.assert_allclose(value, target, rtol=1e-8, atol=1e-8)


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("case", [c for c in ACCEPTED if c.matrix != "[[1]]"], ids=str)
def test_leaving_the_repair_out_is_noticed(case: Accepted) -> None:
    """The property above can fail: an update that moves nothing, or moves the wrong way, gives another value."""
    body = over_j(case.text, case.frames)
    repair = derive(body, case.reducer, case.frames, over=(J,))
    assert isinstance(repair, Repair)
    differs = False
    for seed in range(6):
        data, path, parts = sample(body, case.frames, seed)
        with np.errstate(all="ignore"):
            identity = [chunk_terms(repair, data, f, p) for f, p in zip(path, parts, strict=True)]
        state = identity[0]
        for other in identity[1:]:
            state = combined(repair, state, other)
        wanted = chunk_terms(repair, data, path[-1], np.arange(J.extent))
        differs |= not np.allclose(state[0], wanted[0], rtol=1e-6)
    assert differs


@pytest.mark.parametrize("case", ACCEPTED[::5], ids=str)
def test_split_parts_merge_in_any_order(case: Accepted) -> None:
    """Split-k: each part at its own frame, all moved to the last frame and combined."""
    body = over_j(case.text, case.frames)
    repair = derive(body, case.reducer, case.frames, over=(J,))
    assert isinstance(repair, Repair)
    data, path, parts = sample(body, case.frames, 11)
    total: list[Any] | None = None
    for old, part in reversed(list(zip(path, parts, strict=True))):
        state = moved(repair, chunk_terms(repair, data, old, part), data, old, path[-1])
        total = state if total is None else combined(repair, total, state)
    assert total is not None
    wanted = chunk_terms(repair, data, path[-1], np.arange(J.extent))
    np.testing.assert_allclose(total[0], wanted[0], rtol=1e-8, atol=1e-8)


# Random separable bodies: sums of products of an opaque factor and frame factors.
_FACTORS = st.sampled_from(
    ["exp(c-r)", "exp(0.5*(d-r))", "(c-r)", "(d-m)", "w", "tanh(c)", "1/l", "rsqrt(v)", "sqrt(v)", "l", "log(l)", "m",
     "exp(m-2)", "exp2(d-m)", "(w-log(l))", "select(p, c-r, 0)", "select(p, exp(c-m), d)", "sin(d-m)", "3", "(c+m*w)",
     "cosh(c-r)", "(1+l)", "r*r"]
)  # fmt: skip
_BODIES = st.lists(st.lists(_FACTORS, min_size=1, max_size=3).map("*".join), min_size=1, max_size=2).map(" - ".join)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(text=_BODIES, seed=st.integers(0, 10**6))
def test_random_separable_bodies(text: str, seed: int) -> None:
    frames = (R, L, V, M)
    body = over_j(text, frames)
    repair = derive(body, SUM, frames, over=(J,))
    if not isinstance(repair, Repair):
        assert any(
            reason in repair.reason for reason in ("more than 12 accumulators", "operations", "too many terms")
        ), repair.reason
        assume(False)
        return
    data, path, parts = sample(body, frames, seed)
    got = folded(repair, data, path, parts)
    wanted = chunk_terms(repair, data, path[-1], np.arange(J.extent))
    scale = 1 + max(float(np.max(np.abs(x))) for x in wanted)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-7, atol=1e-7 * scale)


def test_variance_is_stable_in_float32() -> None:
    """Design, section 3: mean 1e4, variance 1, 8192 values; the frame is the running mean, updated in float32."""
    repair = derive("square(c-r)", "sum", ["r"])
    assert isinstance(repair, Repair)
    x = np.random.default_rng(0).normal(1e4, 1, 8192).astype(np.float32)
    exact = np.var(x.astype(np.float64))
    state: list[np.float32] = [np.float32(0)] * 3
    seen, old = np.float32(0), np.float32(0)
    for tile in np.split(x, 64):
        seen = np.float32(seen + tile.sum(dtype=np.float32))
        new = np.float32(seen / np.float32((state[2] or 0) + 128))
        delta = np.float32(old - new)
        # the same expressions, in float32: interpreted by hand from the golden update
        assert str(repair.accumulators[0].update) == "acc.0 + acc.1 * (2 * (r.old - r)) + acc.2 * square(r.old - r)"
        shifted = [
            np.float32(state[0] + state[1] * np.float32(2 * delta) + state[2] * np.float32(delta * delta)),
            np.float32(state[1] + state[2] * delta),
            state[2],
        ]
        centred = tile - new
        parts = [(centred * centred).sum(dtype=np.float32), centred.sum(dtype=np.float32), np.float32(128)]
        state = [np.float32(a + b) for a, b in zip(shifted, parts, strict=True)]
        old = new
    mean = np.float32(x.mean(dtype=np.float64))
    final = state[0] + state[1] * 2 * (old - mean) + state[2] * (old - mean) ** 2
    assert abs(final / 8192 - exact) / exact < 1e-4


def test_exponentials_of_large_values_stay_finite() -> None:
    repair = derive("exp(c-r)*(c-r)", "sum", ["r"])
    assert isinstance(repair, Repair)
    path = [{"r": 5000.0}, {"r": 8000.0}]
    state = moved(repair, [np.asarray(-0.1), np.asarray(1.5)], {}, path[0], path[1])
    assert np.all(np.isfinite(state))
    state = moved(repair, [np.asarray(-0.1), np.asarray(1.5)], {}, {"r": 8000.0}, {"r": 8000.5})
    np.testing.assert_allclose(state[1], 1.5 * np.exp(-0.5))


def test_masked_elements_that_are_infinite_do_not_poison_the_companions() -> None:
    """0 * inf: an element that is masked out contributes zero to every accumulator, whatever its value is."""
    repair = derive(over_j("select(p, exp(c-r)*(c-r), 0)", (R,)), "sum", (R,), over=(J,))
    assert isinstance(repair, Repair)
    data = {"c": np.array([1.0, -np.inf, np.nan, np.inf] * 3), "p": np.array([True, False, False, False] * 3)}
    terms = chunk_terms(repair, data, {"r": 1.0}, np.arange(J.extent))
    np.testing.assert_allclose(terms, [0.0, 3.0])


def test_every_accumulator_has_a_known_reducer() -> None:
    for case in ACCEPTED:
        repair = derive(over_j(case.text, case.frames), case.reducer, case.frames, over=(J,))
        assert isinstance(repair, Repair)
        first: Accumulator = repair.accumulators[0]
        assert first.reducer is REDUCERS[case.reducer]
        assert all(a.reducer is SUM for a in repair.accumulators[1:])
