"""What does not change in a loop is computed outside of it, and not in every trip by the kernel inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf

ROWS, COLUMNS, WIDTH = 24, 20, 3
RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=(n, WIDTH)).astype(np.float32) for n in (ROWS, COLUMNS))
SQUARE = RANDOM.normal(size=(ROWS, ROWS)).astype(np.float32)


def equations(jaxpr, name):
    """Every equation of a primitive, in nested jaxprs too, but for what is fused."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for value in eqn.params.values():
            if hasattr(value, "eqns"):
                yield from equations(value, name)


def fused_names(function, *args):
    """The primitives inside the one fused call of a function, and those of the jaxpr that it stands in."""
    (call,) = equations(jax.make_jaxpr(function)(*args), "pallasfuse")
    return {e.primitive.name for e in call.params["call"].jaxpr.eqns}


def step(x, y, f):
    cost = jnp.sqrt(jnp.square(x[:, None] - y[None]).sum(-1))
    g = -jax.nn.logsumexp(f[:, None] - cost, 0)
    return -jax.nn.logsumexp(g[None] - cost, 1)


def by_fori(step, x, y):
    return lax.fori_loop(0, 3, lambda _, f: step(x, y, f), jnp.zeros(ROWS))


def by_while(step, x, y):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(x, y, s[1])), (0, jnp.zeros(ROWS)))[1]


def by_scan(step, x, y):
    return lax.scan(lambda f, _: (step(x, y, f), None), jnp.zeros(ROWS), length=3)[0]


def by_keyword(step, x, y):
    return lax.fori_loop(0, 3, lambda _, f: step(x, f=f, y=y), jnp.zeros(ROWS))


LOOPS = [by_fori, by_while, by_scan, by_keyword]


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_what_does_not_change_is_handed_over(loop):
    whole = jax.jit(lambda x, y: loop(pf.fuse(step), x, y))
    names = fused_names(whole, X, Y)
    assert "square" not in names and "sqrt" not in names
    assert "exp" in names
    np.testing.assert_allclose(whole(X, Y), loop(step, X, Y), rtol=1e-5, atol=1e-5)


def test_a_step_outside_of_a_loop_is_fused_as_a_whole():
    fused = pf.fuse(step)
    assert "square" in fused_names(fused, X, Y, np.zeros(ROWS, np.float32))
    in_a_loop = jax.jit(lambda x, y: by_fori(fused, x, y))
    assert "square" not in fused_names(in_a_loop, X, Y)
    assert "square" in fused_names(fused, X, Y, np.zeros(ROWS, np.float32))


def test_what_changes_stays_inside():
    """The loop's own state, and what is computed from it."""

    def moving(x, y, f):
        return step(x + f[:, None], y, f)

    names = fused_names(lambda x, y: by_fori(pf.fuse(moving), x, y), X, Y)
    assert {"square", "sqrt"} <= names


def test_masks_and_layouts_stay_inside():
    """To hand over a mask would mean to read it; to compute it takes positions only."""

    def attend(q, k, n):
        visible = jnp.arange(ROWS)[None] < n[:, None]
        return jax.nn.softmax(jnp.where(visible, q @ k.T, -jnp.inf)) @ k

    lengths = np.arange(1, ROWS + 1)
    whole = jax.jit(lambda k, n: lax.fori_loop(0, 2, lambda _, q: pf.fuse(attend)(q, k, n), k))
    assert {"lt", "transpose", "dot_general"} <= fused_names(whole, SQUARE, lengths)
    expected = attend(attend(SQUARE, SQUARE, lengths), SQUARE, lengths)
    np.testing.assert_allclose(whole(SQUARE, lengths), expected, rtol=1e-4, atol=1e-4)


def test_products_of_what_does_not_change_are_computed_once():
    def attend(q, x, w):
        k = x @ w
        return jax.nn.softmax(q @ k.T) @ k

    whole = jax.jit(lambda x, w: lax.fori_loop(0, 2, lambda _, q: pf.fuse(attend)(q, x, w), x))
    (call,) = equations(jax.make_jaxpr(whole)(SQUARE, SQUARE), "pallasfuse")
    inside = [e for e in call.params["call"].jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(inside) == 2
    expected = attend(attend(SQUARE, SQUARE, SQUARE), SQUARE, SQUARE)
    np.testing.assert_allclose(whole(SQUARE, SQUARE), expected, rtol=1e-4, atol=1e-4)


def test_under_vmap_in_the_loop():
    def whole(step, x, y):
        many = jax.vmap(step, in_axes=(None, None, 0))
        return lax.fori_loop(0, 2, lambda _, f: many(x, y, f), jnp.zeros((4, ROWS)))

    fused = jax.jit(lambda x, y: whole(pf.fuse(step), x, y))
    assert "square" not in fused_names(fused, X, Y)
    np.testing.assert_allclose(fused(X, Y), whole(step, X, Y), rtol=1e-5, atol=1e-5)


def test_gradients_in_and_of_a_loop():
    def loss(step, x, y):
        return by_scan(step, x, y).sum()

    with pytest.warns(UserWarning, match="differentiating a fused function"):
        got = jax.grad(lambda x: loss(pf.fuse(step), x, Y))(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: loss(step, x, Y))(X), rtol=1e-4, atol=1e-4)

    def descend(step, x, y):
        slope = jax.grad(lambda f: step(x, y, f).sum())
        return lax.fori_loop(0, 2, lambda _, f: f - 0.1 * slope(f), jnp.zeros(ROWS))

    with pytest.warns(UserWarning, match="differentiating a fused function"):
        got = jax.jit(lambda x, y: descend(pf.fuse(step), x, y))(X, Y)
    np.testing.assert_allclose(got, descend(step, X, Y), rtol=1e-4, atol=1e-4)


def test_static_arguments_and_trees():
    def scaled(points, f, power):
        return step(points["x"] ** power, points["y"], f)

    fused = pf.fuse(scaled, static_argnames="power")
    points = {"x": np.abs(X), "y": Y}
    whole = jax.jit(lambda p: lax.fori_loop(0, 2, lambda _, f: fused(p, f, power=2), jnp.zeros(ROWS)))
    assert "square" not in fused_names(whole, points)
    plain = lax.fori_loop(0, 2, lambda _, f: scaled(points, f, 2), jnp.zeros(ROWS))
    np.testing.assert_allclose(whole(points), plain, rtol=1e-5, atol=1e-5)


def test_captured_values_do_not_change_either():
    fused = pf.fuse(lambda f: step(X, Y, f))
    whole = jax.jit(lambda: lax.fori_loop(0, 2, lambda _, f: fused(f), jnp.zeros(ROWS)))
    np.testing.assert_allclose(whole(), step(X, Y, step(X, Y, np.zeros(ROWS, np.float32))), rtol=1e-5, atol=1e-5)


def test_derivatives_of_its_own_stay():
    """A step keeps its custom rules, though something is computed outside of it."""

    @jax.custom_vjp
    def flipped(x):
        return x

    flipped.defvjp(lambda x: (x, None), lambda _, g: (-g,))

    def step(x, w):
        return x + jax.nn.softmax(jax.nn.relu(flipped(x)) @ jnp.tanh(w @ w))

    def loss(step, x, w):
        return (lax.scan(lambda x, _: (step(x, w), None), x, length=2)[0] * w[0]).sum()

    x = jnp.asarray([0.0, 0.5, -0.5, 1.0])
    w = jnp.asarray(SQUARE[:4, :4])
    with pytest.warns(UserWarning, match="differentiating a fused function"):
        got = jax.grad(lambda x: loss(pf.fuse(step), x, w))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: loss(step, x, w))(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [lambda w: jnp.split(w, 2), lambda w: lax.top_k(w, 10), lambda w: lax.sort([w, -w])])
def test_one_of_several_results_is_a_result_of_the_step(parts):
    def run(step, x, w):
        return lax.scan(lambda x, _: step(x, w), x, length=2)

    def simple(x, w):
        first, second = parts(w)
        return jax.nn.softmax(x * first.sum()), second

    x, w = jnp.asarray(SQUARE[0]), jnp.asarray(SQUARE[:20, :20])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), run(pf.fuse(simple), x, w), run(simple, x, w)
    )


def test_results_that_do_not_change_are_computed_outside():
    def step(q, k):
        return jax.nn.softmax(q), (k @ k.T).sum(-1)

    names = fused_names(lambda q, k: lax.scan(lambda q, _: pf.fuse(step)(q, k), q, length=2), SQUARE, SQUARE)
    assert "dot_general" not in names


def test_what_a_closure_of_the_body_captures_changes():
    def whole(q, w):
        def body(c, _):
            inner = pf.fuse(lambda q, w: jax.nn.softmax(q @ w, -1) * jax.nn.logsumexp(c))
            return inner(c, w), None

        return lax.scan(body, q, length=2)[0]

    names = fused_names(whole, SQUARE, SQUARE)
    assert "log" in names
