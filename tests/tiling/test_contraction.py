"""Products that differences under exponentials take up, and where they may not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.execution import emit
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Let, Loop, verify
from pallasfuse.pipeline import prove_plan
from pallasfuse.targets import TARGETS, XLA_CPU
from pallasfuse.tiling import arithmetic, states
from pallasfuse.tiling.choose import choose
from pallasfuse.tiling.contraction import LIMIT

pytestmark = pytest.mark.optimized

ARRAYS = [jax.ShapeDtypeStruct((n, 2, 64), jnp.bfloat16) for n in (160, 192, 192)]


def scores(q, k):
    return jnp.einsum("ihd,jhd->hij", q, k, preferred_element_type=jnp.float32) * 0.125


def weighted(p, v):
    return jnp.einsum("hij,jhd->ihd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def attention(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k), axis=-1), v)


def with_log_sum(q, k, v):
    return attention(q, k, v), jax.nn.logsumexp(scores(q, k), axis=-1)


def masked(q, k, v):
    s = scores(q, k)
    seen = jnp.arange(s.shape[-2])[:, None] >= jnp.arange(s.shape[-1])
    return weighted(jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1), v)


def terms(q, k):
    s = scores(q, k)
    return jnp.exp(s - s.max(-1, keepdims=True))


def not_normalized(q, k, v):
    return weighted(terms(q, k), v)


def with_the_sum(q, k, v):
    e = terms(q, k)
    return weighted(e / e.sum(-1, keepdims=True), v), e.sum(-1)


def covered(q, k, v):
    """A finite mask: rows without a visible key have equal terms of any size."""
    s = scores(q, k)
    seen = jnp.arange(s.shape[-2])[:, None] >= jnp.arange(s.shape[-1])
    return weighted(jax.nn.softmax(jnp.where(seen, s, -1e30), axis=-1), v)


def sharp_rows_only(q, k, v):
    """The size of the sum decides, though it cancels elsewhere."""
    e = terms(q, k)
    total = e.sum(-1, keepdims=True)
    return weighted(e / total, v) * jnp.where(total < 20.0, 1.0, 0.0).transpose(1, 0, 2)


def bounded_below(q, k, v):
    e = terms(q, k)
    return weighted(e / jnp.maximum(e.sum(-1, keepdims=True), 0.1), v)


def with_the_maximum(q, k, v):
    """Nothing may round what is returned as it is."""
    return attention(q, k, v), scores(q, k).max(-1)


def with_mean_score(q, k, v):
    """In several parts, the maximum meets what is computed of scores."""
    s = scores(q, k)
    return attention(q, k, v), s.mean(-1) - s.max(-1)


def two_passes(q, k, v):
    return weighted(jnp.floor(8 * jax.nn.softmax(scores(q, k), axis=-1)), v)


FREE = [attention, with_log_sum, masked]
NOT_FREE = [not_normalized, with_the_sum, covered, sharp_rows_only, bounded_below, with_the_maximum]


def planned(function, arrays=ARRAYS, **options):
    plan = pf.fuse(function, options=pf.FuseOptions(target="mosaic_gpu", **options)).explain(*arrays)
    (kernel,) = plan.kernels
    assert kernel.target.name == "mosaic_gpu", kernel.declined
    return plan, kernel


def program(function):
    return verify(planned(function)[1].program)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("function", FREE)
def test_what_does_not_care_for_the_maximum(function):
    after = program(function)
    assert after.instead is not None
    assert after.instead.limit == LIMIT
    draw = np.random.default_rng(0)
    inputs = {t.name: draw.normal(size=[a.extent for a in t.axes]) for t in after.inputs}
    ours, theirs = (evaluate_tiles(p, inputs) for p in (after, after.instead.program))
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("function", NOT_FREE)
def test_what_does(function):
    assert program(function).instead is None


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("function", FREE)
def test_parts(function):
    """A state's accumulators are those at the frame that it stores."""
    _, kernel = planned(function, parts=3)
    first, second = (verify(p.program) for p in kernel.phases)
    assert first.instead is not None
    assert first.instead.limit == LIMIT
    draw = np.random.default_rng(0)
    inputs = {t.name: draw.normal(size=[a.extent for a in t.axes]) for t in first.inputs}
    ours, theirs = (evaluate_tiles(p, inputs) for p in (first, first.instead.program))
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=1e-9)
    whole = evaluate_tiles(program(function).instead.program, inputs)
    for name, value in evaluate_tiles(second, ours).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-6, atol=1e-9)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("function", [*NOT_FREE, with_mean_score, two_passes])
def test_parts_of_what_does(function):
    assert all(p.program.instead is None for p in planned(function, parts=3)[1].phases)


def far_apart(level, spread):
    """Scores of about `level`, which differ by about one among keys, and by `spread` between thirds of them."""
    draw = np.random.default_rng(1)
    q, k, v = (np.zeros((n, 2, 64), np.float32) for n in (384, 384, 384))  # whole tiles, which loops of XLA ask for
    q[:], v[:] = draw.normal(size=q.shape), draw.normal(size=v.shape)
    q[..., 0] = k[..., 0] = np.sqrt(8 * level)
    q[..., 1] = 8
    k[..., 1] = spread * (np.arange(len(k)) // 128)[:, None]
    k[..., 2:] = draw.normal(size=(*k.shape[:2], 62))
    return [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]


@pytest.mark.deep  # `test_parts` compares parts with the sum
@pytest.mark.sampled(9, cover=())
@pytest.mark.parametrize(("level", "spread"), [(2.0**12, 4.0), (2.0**12, -0.25), (0.0, 1e3)])
@pytest.mark.parametrize("function", FREE)
def test_parts_that_round_differently(function, level, spread):
    """In float32: some parts' products are rounded before the difference, and others' are not."""
    arrays = far_apart(level, spread)
    _, kernel = planned(function, arrays, parts=3)
    first, second = (p.program for p in kernel.phases)
    inputs = dict(zip([t.name for t in first.inputs], arrays, strict=True))
    assert [tuple(a.extent for a in t.axes) for t in first.inputs] == [x.shape for x in arrays]
    states_of = jax.jit(lambda inputs: [emit(XLA_CPU, p, inputs) for p in (first, first.instead.program)])(inputs)
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in jax.tree.leaves(function(*(np.asarray(x, np.float64) for x in arrays)))]
    names = [t.name for t in second.outputs]
    merge = jax.jit(lambda mixed: emit(TARGETS["interpret"], second, mixed))
    for choice in ((0, 0, 0), (0, 1, 0), (1, 0, 1)):
        mixed = {n: jnp.stack([states_of[c][n][i] for i, c in enumerate(choice)]) for n in states_of[0]}
        found = merge(mixed)
        for name, reference in zip(names, exact, strict=True):
            ours = np.asarray(found[name], np.float64).reshape(reference.shape)
            limit = (2.0**-7 + (level + 2 * abs(spread)) * 2.0**-21) * max(1.0, np.abs(reference).max())
            assert np.abs(ours - reference).max() <= limit, (choice, name)


def test_state_of_a_piece():
    """What `sharding` runs is contracted as well, where the whole kernel may be."""
    for function, free in ((masked, True), (with_the_sum, False)):
        plan, kernel = planned(function)
        group, target = kernel.group, kernel.target
        tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}
        given = {t: {d: a for d, a in enumerate(tensors[t].axes) if a == group.rolled} for t in group.inputs}
        piece = states.localize(group, tensors, {group.rolled: 96}, given)
        local = states.local(group, piece, choose(piece.group, target)[0], target, inside=True)
        assert (arithmetic.rewrite_for(target, local).instead is not None) is free


def test_parts_are_proved():
    arrays = [jax.ShapeDtypeStruct((n, 2, 64), jnp.bfloat16) for n in (64, 192, 192)]
    plan, _ = planned(masked, arrays, parts=2)
    proof = prove_plan(plan, delta=1e-4)
    assert proof.holds, proof
    assert any("runs instead" in stage for stage in proof.stages)


def test_text():
    after = program(attention)
    (loop,) = (s for s in after.body if isinstance(s, Loop))
    lets = [s for s in loop.segments[0].body if isinstance(s, Let)]
    (frame,) = (s.name for s in lets if s.name.endswith(".frame0"))
    (peak,) = (s for s in lets if s.name == f"{frame}.peak.next")
    assert str(peak.value) == f"max({frame}.peak[j, i], abs({frame}[j, i]))"
    usual, other = str(after).split(f"  where {frame}.peak[j, i] >= 1.67772e+07 in a row, instead:")
    assert "base2" not in usual
    assert f"sum(exp2(t0[j, i, m] * 0.18033688011112042 - {frame}[j, i]); m)" in usual
    assert "t0.base2[j, i, m] = t0[j, i, m] * 0.18033688011112042" in other
