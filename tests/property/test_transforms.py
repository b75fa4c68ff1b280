"""A fused function behaves as the original under every way of calling and transforming it."""

import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from tests.property.programs import AXIS_NAMES

SMALL = pf.FuseOptions(tiles=tuple((name, 4) for name in AXIS_NAMES))
TARGETS = pytest.mark.parametrize("target", ["xla", "interpret"])


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def attention(q, k, v):
    s = q @ jnp.swapaxes(k, -1, -2)
    m = jnp.max(s, -1, keepdims=True)
    e = jnp.exp(s - m)
    return (e / jnp.sum(e, -1, keepdims=True)) @ v


def fused(fn, target="xla", **kwargs):
    return pf.fuse(fn, target=target, options=SMALL, **kwargs)


def close(have, want, tolerance=3e-6):
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.weak_type == b.weak_type
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


Q, K, V = normal(5, 6), normal(11, 6, seed=1), normal(11, 3, seed=2)


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_eager_jit_and_nested_jit(target):
    f = fused(attention, target)
    want = attention(Q, K, V)
    close(f(Q, K, V), want)
    close(jax.jit(f)(Q, K, V), want)
    close(jax.jit(lambda *a: jax.jit(f)(*a) + 1)(Q, K, V), want + 1)
    assert f.explain(Q, K, V).kernels[0].strategy == "rolling_update"


IN_AXES = [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 0, 0), (None, None, 0), (-1, None, 1), 0]


@pytest.mark.sampled(7, cover=("target",))
@TARGETS
@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_vmap(in_axes, target):
    each = in_axes if isinstance(in_axes, tuple) else (in_axes,) * 3
    batched = [x if a is None else jnp.stack([x, x * 0.5, -x], a) for x, a in zip((Q, K, V), each, strict=True)]
    close(jax.vmap(fused(attention, target), in_axes)(*batched), jax.jit(jax.vmap(attention, in_axes))(*batched))


def test_nested_vmap_and_out_axes():
    q, k = normal(2, 3, 5, 6), normal(3, 11, 6)
    nest = lambda f: jax.vmap(jax.vmap(f, (0, 0, None), out_axes=1), (0, None, None), out_axes=2)  # noqa: E731
    want = jax.jit(nest(attention))(q, k, V)
    close(nest(fused(attention))(q, k, V), want)
    close(jax.jit(nest(fused(attention)))(q, k, V), want)


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_scan_map_while_cond_checkpoint(target):
    f = fused(attention, target)

    def loop(f):
        return jax.lax.scan(lambda q, k: (f(q, k, V[:, :1]) + q, jnp.sum(q)), Q, jnp.stack([K, K * 2, K - 1]))

    close(loop(f), loop(attention))
    close(
        jax.lax.map(lambda q: f(q, K, V), jnp.stack([Q, Q * 2])),
        jnp.stack([attention(Q, K, V), attention(Q * 2, K, V)]),
    )
    close(jax.checkpoint(f)(Q, K, V), attention(Q, K, V))
    close(jax.lax.cond(Q[0, 0] > 100, lambda: f(Q, K, V), lambda: f(Q * 2, K, V)), attention(Q * 2, K, V))
    counted = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, f(s[1], K, V[:, :1]) + s[1]), (0, Q))[1]
    plain = Q
    for _ in range(3):
        plain = attention(plain, K, V[:, :1]) + plain
    close(counted, plain, 1e-5)


def once(call):
    """The result of `call` and how many warnings of pallasfuse it gave."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call()
    return result, sum("unfused" in str(w.message) for w in seen)


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_gradients_are_the_originals_and_warn_once(target):
    def named(q, k, v):
        return attention(q, k, v)

    named.__name__ = f"attention_of_test_{target}"
    f = fused(named, target)
    loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)))  # noqa: E731

    def everything():
        first = jax.grad(loss(f), (0, 1, 2))(Q, K, V)
        second = jax.jit(jax.grad(loss(f)))(Q, K, V)
        third = jax.jvp(f, (Q, K, V), (Q, K * 0, V))
        fourth = jax.vmap(jax.grad(loss(f)), (0, None, None))(jnp.stack([Q, -Q]), K, V)
        fifth = jax.grad(jax.checkpoint(loss(f)))(Q, K, V)
        sixth = jax.hessian(lambda t: jnp.sum(f(Q * t, K, V)))(1.0)
        return first, second, third, fourth, fifth, sixth

    got, warned = once(everything)
    plain = loss(attention)
    gradients = jax.jit(jax.grad(plain, (0, 1, 2)))(Q, K, V)
    close(got[0], gradients, 1e-5)
    close(got[1], gradients[0], 1e-5)
    close(got[2], jax.jit(lambda *t: jax.jvp(attention, (Q, K, V), t))(Q, K * 0, V), 1e-5)
    close(got[3], jax.jit(jax.vmap(jax.grad(plain), (0, None, None)))(jnp.stack([Q, -Q]), K, V), 1e-5)
    close(got[4], gradients[0], 1e-5)
    close(got[5], jax.jit(jax.hessian(lambda t: jnp.sum(attention(Q * t, K, V))))(1.0), 1e-4)
    assert warned == 1


def test_each_function_warns_on_its_own():
    def make(scale):
        def loss(x):
            return jnp.sum(jax.nn.softmax(x * scale) * x)

        return fused(loss)

    _, first = once(lambda: jax.grad(make(1.0))(Q[0]))
    _, second = once(lambda: jax.grad(make(2.0))(Q[0]))
    assert (first, second) == (1, 1), "two functions of one name are two functions"


def test_pytrees_keywords_defaults_and_none():
    def fn(inputs, *, extra=None, scale=1.0):
        p = jax.nn.softmax(inputs["x"] * scale, axis=-1)
        out = p @ inputs["v"][0]
        return {"out": out, "pair": (jnp.max(p, -1), [extra])}

    inputs = {"x": normal(5, 11), "v": [V, None]}
    close(fused(fn)(inputs), fn(inputs))
    close(fused(fn)(inputs, scale=0.5, extra=Q), fn(inputs, scale=0.5, extra=Q))
    assert fused(fn).explain(inputs, scale=0.5).kernels


def moment(x, order, axis=-1):
    d = x - jnp.mean(x, axis, keepdims=True)
    return jnp.mean(d**order, axis)


def test_static_arguments():
    x = normal(5, 11)
    close(fused(moment, static_argnums=(1, 2))(x, 2, 0), moment(x, 2, 0))
    close(fused(moment, static_argnums=1)(x, 3), moment(x, 3))
    close(fused(moment, static_argnums=(1, -1))(x, 3, 0), moment(x, 3, 0))
    close(fused(moment, static_argnames=("order", "axis"))(x, order=3, axis=0), moment(x, 3, 0))
    close(fused(moment, static_argnames="order")(x, order=2), moment(x, 2))
    close(fused(functools.partial(moment, order=2, axis=0))(x), moment(x, 2, 0))
    close(jax.vmap(lambda row: fused(moment, static_argnums=1)(row, 2))(x), moment(x, 2))
    assert fused(moment, static_argnums=(1,)).explain(x, 2).kernels
    assert fused(moment, static_argnames=("order",)).explain(x, order=2).kernels


def test_static_argnames_given_by_position():
    """As with jax.jit, a name is resolved to its position."""
    x = normal(5, 11)
    close(fused(moment, static_argnames=("order",))(x, 2), moment(x, 2))
    assert fused(moment, static_argnames=("order",)).explain(x, 2).kernels


def test_static_argnums_given_by_name():
    x = normal(5, 11)
    close(fused(moment, static_argnums=(1,))(x, order=2), moment(x, 2))


def test_methods_closures_and_callables():
    scale = jnp.float32(0.5)
    table = normal(11, 3, seed=5)

    class Layer:
        def __init__(self, weight):
            self.weight = weight

        @pf.fuse
        def __call__(self, x):
            return jax.nn.softmax(x * self.weight, axis=-1) @ table

        @functools.partial(pf.fuse, static_argnums=(2,))
        def power(self, x, n):
            return moment(x, n)

    x = normal(5, 11)
    close(Layer(scale)(x), jax.nn.softmax(x * scale, axis=-1) @ table)
    close(Layer(scale).power(x, 3), moment(x, 3))
    close(jax.jit(lambda w: Layer(w)(x))(scale), jax.nn.softmax(x * scale, axis=-1) @ table)  # a traced closure

    class Plain:
        def __call__(self, x):
            return jax.nn.softmax(x, axis=-1) @ table

    close(pf.fuse(Plain())(x), Plain()(x))
    close(jax.vmap(lambda w: fused(lambda x: jax.nn.softmax(x * w, -1) @ table)(x))(jnp.arange(3.0)),
          jax.vmap(lambda w: jax.nn.softmax(x * w, -1) @ table)(jnp.arange(3.0)))  # fmt: skip
    close(jax.grad(lambda w: jnp.sum(fused(lambda x: jax.nn.softmax(x * w, -1) @ table)(x)))(scale),
          jax.grad(lambda w: jnp.sum(jax.nn.softmax(x * w, -1) @ table))(scale), 1e-5)  # fmt: skip


def test_python_scalars_numpy_arrays_and_weak_types():
    def fn(x, scale):
        return jax.nn.logsumexp(x * scale, axis=-1) * scale, scale

    x = normal(5, 11)
    for scale in (2, 0.5, True, np.float32(0.5), jnp.float32(2), np.float64(1.5)):
        close(fused(fn)(x, scale), jax.jit(fn)(x, scale))
    half = x.astype(jnp.bfloat16)
    close(fused(fn)(half, 2.0), jax.jit(fn)(half, 2.0), 0.02)
    close(fused(fn)(np.asarray(x), 2), jax.jit(fn)(x, 2))
    assert fused(fn).explain(x, 2.0).kernels


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_x64(target):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 37)) + 1e6)
        assert x.dtype == jnp.float64
        f = fused(lambda x: jnp.var(x, -1), target)
        np.testing.assert_allclose(f(x), np.var(np.asarray(x), -1), rtol=1e-7)
        close(
            fused(attention, target)(*(a.astype(jnp.float64) for a in (Q, K, V))),
            attention(*(a.astype(jnp.float64) for a in (Q, K, V))),
            1e-12,
        )
        close(fused(attention, target)(Q, K, V), attention(Q, K, V))


def test_same_function_in_and_out_of_x64():
    f = fused(attention)
    close(f(Q, K, V), attention(Q, K, V))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in (Q, K, V)]
        close(f(*wide), attention(*wide), 1e-12)
    close(f(Q, K, V), attention(Q, K, V))


def test_donation_and_outer_jit():
    q = jnp.array(Q)
    step = jax.jit(lambda q: fused(attention)(q, K, V[:, :1]) + q, donate_argnums=0)
    close(step(q), attention(Q, K, V[:, :1]) + Q)


@pytest.mark.deep  # tests/hostile/test_threads.py calls from threads, too
@pytest.mark.parametrize("rounds", range(2))
def test_eight_threads_at_once(rounds):
    f = fused(attention)
    shapes = [3, 5, 7, 9]
    results, barrier = {}, threading.Barrier(8)

    def work(n):
        q = normal(shapes[n % 4], 6, seed=n)
        barrier.wait()
        try:
            for _ in range(3):
                results[n] = (f(q, K, V), attention(q, K, V))
        except Exception as error:  # reported by the main thread
            results[n] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for value in results.values():
        assert not isinstance(value, Exception), value
        close(*value)


def test_stages_with_shapes_only():
    spec = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (Q, K, V)]
    f = fused(attention)
    plan = f.explain(*spec)
    assert plan.kernels[0].strategy == "rolling_update" and not plan.fallbacks and str(plan)
    compiled = f.trace(*spec).fuse().tile().lower().compile()
    close(compiled(Q, K, V), attention(Q, K, V))


def test_outputs_that_are_inputs_constants_or_twice_the_same():
    def fn(x):
        p = jax.nn.softmax(x, -1)
        return x, p, p, 3.0, jnp.arange(4), jnp.sum(p, -1)

    x = normal(5, 11)
    close(fused(fn)(x), jax.jit(fn)(x))
    close(jax.vmap(fused(fn))(x), jax.vmap(fn)(x))


def test_empty_axes_and_no_reduction():
    close(fused(lambda x: jax.nn.softmax(x, -1))(jnp.zeros((0, 5))), jnp.zeros((0, 5)))
    close(fused(lambda x: jnp.sum(x - jnp.mean(x, -1, keepdims=True), -1))(jnp.zeros((0, 5))), jnp.zeros((0,)))
    close(fused(lambda x: x + 1)(Q), Q + 1)
    close(fused(lambda: jnp.arange(3.0) + 1)(), jnp.arange(3.0) + 1)


def test_wrong_use_is_explained():
    with pytest.raises(TypeError):
        pf.fuse(3)
    with pytest.raises(pf.TargetError):
        pf.fuse(attention, target="no such target")
    f = fused(attention)
    for arguments in (("text", K, V), (object(), K, V), (Q,), (Q, K, V, V), (Q, K[:, :2], V)):
        with pytest.raises((TypeError, pf.TraceError)):
            f(*arguments)
        with pytest.raises((TypeError, pf.TraceError)):
            f.explain(*arguments)
    with pytest.raises((jax.errors.JAXTypeError, pf.TraceError)):
        fused(lambda x: jnp.sum(x) if x[0] > 0 else x)(Q[0])
    with pytest.raises(pf.TraceError):
        fused(lambda x: jnp.sum(x) if x[0] > 0 else x).explain(Q[0])
    with pytest.raises(pf.FusionError):
        pf.fuse(jnp.sort, strict=True)(Q[0])
