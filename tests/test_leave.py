"""What the user leaves to XLA inside a fused function, by `leave` and by the names of scopes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.reducers import MAX
from tests.programs_by_name import softmax

X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")
W = np.random.default_rng(1).normal(size=(40, 40)).astype("float32")


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


@pf.leave
def left_softmax(x):
    return softmax(x)


def both(x, w):
    """Two chains, of which the second is left."""
    return left_softmax(softmax(x) @ w)


def plain(x, w):
    return softmax(softmax(x) @ w)


def maxima(plan):
    """The number of softmaxes that kernels compute: each has one maximum."""
    nests = [n for k in plan.kernels for n in (*(f.nest for f in k.group.folds), *k.group.inner)]
    return sum(n.reducer is MAX for n in nests)


# --- leave


def test_no_kernel_reaches_into_it():
    fused = pf.fuse(both)
    plan = fused.explain(X, W)
    assert maxima(pf.fuse(plain).explain(X, W)) == 2
    assert maxima(plan) == 1
    assert [f.operation for f in plan.fallbacks if f.asked] == ["jit"]
    assert "pallasfuse.leave(left_softmax) asks for XLA" in str(plan)
    same(fused(X, W), plain(X, W))


def test_it_works_under_every_transformation():
    fused = pf.fuse(both)
    same(jax.jit(fused)(X, W), plain(X, W))
    batched = functools.partial(jax.vmap, in_axes=(0, None))
    xs = np.stack([X, X + 1, X * 2])
    same(batched(fused)(xs, W), batched(plain)(xs, W))

    def gradient(function):
        return jax.grad(lambda x, w: jnp.sum(function(x, w) ** 2), argnums=(0, 1))(X, W)

    same(gradient(fused), gradient(plain))
    same(jax.checkpoint(fused)(X, W), plain(X, W))
    same(jax.lax.map(lambda x: fused(x, W), xs), jax.lax.map(lambda x: plain(x, W), xs))


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("transform", [
    lambda f: jax.vmap(f, in_axes=(0, None)),
    lambda f: jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2)),
    lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,)),
    jax.jit,
    jax.checkpoint,
    pf.fuse,
], ids=["vmap", "grad", "jvp", "jit", "checkpoint", "fuse"])  # fmt: skip
def test_it_is_left_where_it_is_transformed_inside(transform):
    def function(x, w):
        return transform(lambda x, w: left_softmax(x @ w))(x, w)

    x = np.stack([X, X])
    plan = pf.fuse(function).explain(x, W)
    assert maxima(plan) == 0
    assert any(f.asked for f in plan.fallbacks)
    same(pf.fuse(function)(x, W), transform(lambda x, w: softmax(x @ w))(x, W))


def test_in_a_loop_around_the_fused_function():
    fused = pf.fuse(both)

    def run(function):
        return jax.lax.fori_loop(0, 3, lambda _, x: x + function(x, W), X)

    same(jax.jit(functools.partial(run, fused))(), run(plain))


def test_options_of_leave_and_names():
    @pf.leave(static_argnames="axis")
    def along(x, *, axis):
        """Its own text."""
        return jax.nn.softmax(x, axis=axis)

    assert (along.__name__, along.__doc__) == ("along", "Its own text.")
    assert not pf.fuse(lambda x: along(x, axis=0)).explain(X).kernels
    same(along(X, axis=1), softmax(X))
    assert pf.leave(left_softmax).__wrapped__ is left_softmax
    with pytest.raises(TypeError, match="takes a function, got int"):
        pf.leave(3)


def test_a_function_whose_name_is_like_it_is_fused():
    @jax.jit
    def leave_softmax(x):
        return softmax(x)

    assert pf.fuse(leave_softmax).explain(X).kernels


def test_methods_and_fused_functions_inside():
    class Layer:
        scale = 2.0

        @functools.partial(pf.leave, static_argnums=0)
        def apply(self, x):
            return pf.fuse(softmax)(x * self.scale)

    layer = Layer()
    outer = pf.fuse(lambda x: layer.apply(x) + softmax(x))
    assert maxima(outer.explain(X)) == 1
    same(outer(X), softmax(X * 2) + softmax(X))
    assert "pallasfuse[" in str(outer.trace(X).call.jaxpr)


# --- scopes


def layers(x, w):
    with jax.named_scope("first"):
        y = softmax(x)
    with jax.named_scope("second"), jax.named_scope("norm"):
        return jax.jit(softmax)(y @ w)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(("scope", "left"), [
    *((scope, True) for scope in ("first", "second", "norm", "second/norm", "/second/")),
    *((scope, False) for scope in ("other", "nor", "sec", "first/norm", "norm/second")),
])  # fmt: skip
def test_what_is_in_a_scope_is_left(scope, left):
    fused = pf.fuse(layers, options=pf.FuseOptions(exclude=(scope,)))
    plan = fused.explain(X, W)
    assert maxima(plan) == (1 if left else 2)
    assert any(f.asked and f"exclude={scope!r}" in f.reason for f in plan.fallbacks) == left
    same(fused(X, W), plain(X, W))


def test_several_scopes_and_the_stages():
    options = pf.FuseOptions(exclude=("first", "norm"))
    fused = pf.fuse(layers, options=options)
    assert fused.trace(X, W).fuse().tile().plan.kernels == ()
    assert "FuseOptions(exclude='first') asks for XLA" in fused.explain(X, W).summary


def test_scopes_of_calls_that_are_inlined():
    @jax.jit
    def inner(x):
        with jax.named_scope("deep"):
            return softmax(x)

    def function(x):
        with jax.named_scope("outer"):
            return inner(x)

    for scope in ("outer", "deep", "outer/deep"):
        assert not pf.fuse(function, options=pf.FuseOptions(exclude=(scope,))).explain(X).kernels
    assert pf.fuse(function, options=pf.FuseOptions(exclude=("deep/outer",))).explain(X).kernels


def looped(kind):
    """A loop inside the scope `outer`, whose body has another scope `inner` with a softmax of its own."""

    def step(y):
        with jax.named_scope("inner"):
            y = softmax(y * 2.0)
        return y + softmax(y + 1.0)

    def scanned(x):
        return jax.lax.scan(lambda y, _: (step(y), None), x, None, length=3)[0]

    loops = {
        "scan": scanned,
        "while": lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (step(c[0]), c[1] + 1), (x, 0))[0],
        "cond": lambda x: jax.lax.cond(x[0, 0] > 0, step, lambda x: x * 2.0, x),
        "nested": lambda x: jax.lax.scan(lambda y, _: (scanned(y), None), x, None, length=2)[0],
    }

    def function(x):
        with jax.named_scope("outer"):
            return jax.jit(loops[kind])(x)

    return function


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("kind", ["scan", "while", "cond", "nested"])
def test_scopes_around_a_loop_and_in_its_body(kind):
    function = looped(kind)

    def kernels_without(*exclude):
        plan = pf.fuse(function, options=pf.FuseOptions(exclude=exclude, price=False)).explain(X)
        return sum(maxima(p) for p in plan.all())

    assert kernels_without() == kernels_without("inner/outer") == kernels_without("other/inner") == 2
    assert kernels_without("outer") == 0
    assert kernels_without("inner") == kernels_without("outer/inner") == 1
    fused = pf.fuse(function, options=pf.FuseOptions(exclude=("outer/inner",), price=False))
    same(fused(X), function(X))


@pytest.mark.parametrize("exclude", [(), ("outer",), ("inner",), ("outer/inner",)])
def test_scopes_of_what_a_loop_need_not_repeat(exclude):
    def function(x, w):
        def step(y, _):
            with jax.named_scope("inner"):
                table = softmax(w)
            return softmax(y) + table, None

        with jax.named_scope("outer"):
            return jax.lax.scan(step, x, None, length=3)[0]

    plan = pf.fuse(function, options=pf.FuseOptions(exclude=exclude, price=False)).explain(X, X)
    assert sum(maxima(p) for p in plan.all()) == {(): 2, ("outer",): 0}.get(exclude, 1)


def test_scopes_of_a_batched_call():
    def function(x):
        with jax.named_scope("first"):
            return softmax(x)

    fused = pf.fuse(function, options=pf.FuseOptions(exclude=("first",)))
    same(jax.vmap(fused)(np.stack([X, X])), softmax(np.stack([X, X])))
    assert not pf.fuse(jax.vmap(function), options=pf.FuseOptions(exclude=("first",))).explain(np.stack([X, X])).kernels


@pytest.mark.parametrize("exclude", ["norm", ("",), (3,), ["norm"]])
def test_what_is_no_tuple_of_names(exclude):
    with pytest.raises(ValueError, match=r"exclude is a tuple of names of scopes"):
        pf.FuseOptions(exclude=exclude)


# --- both


def test_strict_allows_what_was_asked_for():
    same(pf.fuse(lambda x: left_softmax(softmax(x)), strict=True)(X), softmax(softmax(X)))
    options = pf.FuseOptions(strict=True, exclude=("first",))

    def function(x):
        with jax.named_scope("first"):
            y = jnp.sort(x)
        return softmax(y)

    same(pf.fuse(function, options=options)(X), softmax(np.sort(X)))
    with pytest.raises(pf.FusionError, match="strict: 1 operations are left to XLA:\n  sort"):
        pf.fuse(lambda x: jnp.sort(function(x)), options=options)(X)


def test_the_plan_is_proven():
    for fused in (pf.fuse(both), pf.fuse(layers, options=pf.FuseOptions(exclude=("norm",)))):
        report = pf.verify(fused, X, W, delta=1e-4)
        assert report.equivalent
        assert report.counterexample is None
