"""The user's interface: calls, stages, options and messages."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.errors import FusionError, PallasfuseError, TargetError, TraceError
from pallasfuse.options import FuseOptions
from tests.programs_by_name import attention, softmax

X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")
QKV = tuple(
    np.random.default_rng(n).normal(size=s).astype("float32") for n, s in enumerate([(20, 8), (37, 8), (37, 5)])
)


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


# --- calls


def test_called_as_the_original():
    fused = pf.fuse(attention)
    same(fused(*QKV), attention(*QKV))
    same(jax.jit(fused)(*QKV), attention(*QKV))
    assert fused.__name__ == "attention"
    assert repr(fused) == "<pallasfuse.fuse of attention>"


def test_a_pytree_in_and_a_pytree_out():
    @pf.fuse
    def function(inputs, *, scale):
        p = softmax(inputs["x"] * scale)
        return {"p": p, "pair": (p.sum(), inputs["y"])}

    arguments = {"x": X, "y": np.float32(2.0)}
    got = function(arguments, scale=np.float32(0.5))
    assert set(got) == {"p", "pair"}
    same(got["p"], softmax(X * np.float32(0.5)))
    same(got["pair"][1], np.float32(2.0))


def test_decorator_with_options_and_static_arguments():
    @pf.fuse(target="xla", static_argnums=1, static_argnames="power")
    def function(x, axis, power=1):
        return jax.nn.softmax(x, axis=axis) ** power

    same(function(X, 0), jax.nn.softmax(X, axis=0))
    same(function(X, 1, power=2), jax.nn.softmax(X, axis=1) ** 2)
    assert function.explain(X, 0, power=2).kernels


def test_methods():
    class Layer:
        scale = 0.5

        @pf.fuse
        def __call__(self, x):
            return softmax(x * self.scale)

    same(Layer()(X), softmax(X * 0.5))


def test_numpy_scalars_and_empty_pytrees():
    same(pf.fuse(lambda x, nothing: softmax(x) * 2)(X, {}), softmax(X) * 2)


# --- stages


@pytest.mark.parametrize("target", ["xla", "interpret"])
def test_every_stage_equals_the_call(target):
    fused = pf.fuse(attention, target=target)
    traced = fused.trace(*QKV)
    groups = traced.fuse()
    tiled = groups.tile()
    lowered = tiled.lower()
    compiled = lowered.compile()
    np.testing.assert_array_equal(compiled(*QKV), fused(*QKV))
    assert str(traced).startswith("input q: float32[i:20, j:8]")
    assert "repaired" in str(groups)
    assert str(tiled) == str(fused.explain(*QKV))
    assert "stablehlo" in lowered.as_text()


def test_stages_take_shapes_and_keep_the_tree():
    def function(inputs):
        return {"p": softmax(inputs["x"])}

    compiled = pf.fuse(function).trace({"x": jax.ShapeDtypeStruct(X.shape, "float32")}).fuse().tile().lower().compile()
    same(compiled({"x": X}), function({"x": X}))


def test_a_stage_may_change_the_target():
    groups = pf.fuse(attention).trace(*QKV).fuse("triton")
    assert groups.target.name == "triton"
    assert groups.tile().plan.target.name == "triton"
    assert groups.tile("interpret").plan.target.name == "interpret"


def test_nothing_to_fuse_says_so():
    assert str(pf.fuse(lambda x: x + 1).trace(X).fuse()) == "no group"


def test_tiles_of_the_options_reach_the_plan():
    options = FuseOptions(tiles=(("i", 4), ("l", 16)))
    fused = pf.fuse(attention, options=options)
    (kernel,) = fused.explain(*QKV).kernels
    assert (kernel.tiles["i"], kernel.tiles["l"], kernel.strategy) == (4, 16, "rolling_update")
    same(fused(*QKV), attention(*QKV))


def test_arguments_override_options():
    fused = pf.fuse(jnp.sort, target="interpret", strict=True, options=FuseOptions(target="xla"))
    with pytest.raises(FusionError):
        fused(X)
    with pytest.raises(FusionError):
        pf.fuse(jnp.sort, options=FuseOptions(strict=True))(X)
    assert pf.fuse(softmax, target="interpret", options=FuseOptions(target="xla")).explain(X).target.name == "interpret"


# --- messages


def test_strict_raises_when_called_and_names_the_line():
    @pf.fuse(strict=True)
    def function(x):
        return softmax(jnp.sort(x, axis=-1))

    with pytest.raises(
        FusionError, match=r"strict: 1 operations are left to XLA:\n  sort at .*test_api\.py:\d+.*function"
    ):
        function(X)


def test_an_unknown_target_lists_the_targets():
    for make in (lambda: pf.fuse(softmax, target="metal"), lambda: pf.fuse(target="metal")(softmax),
                 lambda: pf.fuse(softmax).explain(X, target="metal")):  # fmt: skip
        with pytest.raises(TargetError, match=r"no target 'metal': choose one of interpret, .*triton, .*or None"):
            make()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without a GPU")
def test_a_gpu_target_on_a_cpu():
    message = "target 'triton' runs on cuda or rocm, but the function is compiled for cpu: choose target=None"
    with pytest.raises(TargetError, match=message):
        pf.fuse(softmax, target="triton")(X)
    with pytest.raises(TargetError, match=message):
        pf.fuse(softmax, target="triton").trace(X).fuse().tile().lower()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without a GPU")
def test_a_gpu_target_of_a_stage_on_a_cpu():
    with pytest.raises(TargetError, match="target 'triton' runs on cuda or rocm"):
        pf.fuse(softmax).trace(X).fuse("triton").tile().lower()


def test_the_plan_of_a_stage_is_the_plan_that_runs():
    staged = pf.fuse(softmax).trace(X).fuse("interpret").tile().lower().as_text()
    assert staged == pf.fuse(softmax, target="interpret").trace(X).fuse().tile().lower().as_text()


def test_what_cannot_be_traced():
    def function(x, axis):
        return softmax(x) if x.sum() > 0 else x

    with pytest.raises(TraceError, match="function could not be traced") as error:
        pf.fuse(function).trace(X, 0)
    assert "static_argnums" in str(error.value)
    with pytest.raises(TraceError, match="could not be traced"):
        pf.fuse(softmax).explain("text")


def test_only_functions_are_fused():
    with pytest.raises(TypeError, match="takes a function, got int"):
        pf.fuse(3)


def test_one_base_class_catches_everything():
    for error in (FusionError, TargetError, TraceError):
        assert issubclass(error, PallasfuseError)


# --- differentiation


def test_the_gradient_is_the_original_s_and_warns_once():
    def own_name_for_the_warning(x):
        return jnp.sum(softmax(x) ** 2)

    fused = pf.fuse(own_name_for_the_warning)
    with pytest.warns(UserWarning, match="own_name_for_the_warning: differentiating a fused function"):
        got = jax.grad(fused)(X)
    same(got, jax.grad(own_name_for_the_warning)(X))
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(fused)(X)


def test_vmap_plans_the_batched_program():
    fused = pf.fuse(softmax)
    batch = np.stack([X, X + 1])
    same(jax.vmap(fused)(batch), softmax(batch))
    same(jax.vmap(fused, in_axes=1, out_axes=1)(batch), softmax(batch.transpose(1, 0, 2)).transpose(1, 0, 2))


def operations(function, *arrays):
    """The operations of a compiled program, whatever they are called."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    return sorted(re.findall(r" = (\S+ [\w-]+)\(", text))


@pytest.mark.optimized
def test_without_a_kernel_it_is_the_very_program_of_jit():
    """In its own order, with its own calls: else XLA might fuse it otherwise, and be slower."""

    def function(x, y):
        p = jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf))
        return jax.nn.logsumexp(p @ y), jnp.sort(p.T, axis=0)

    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4), (4, 3))]
    fused = pf.fuse(function, options=pf.FuseOptions(price=True))
    assert fused.explain(*arrays).kernels == ()
    assert operations(fused, *arrays) == operations(function, *arrays)


def test_nested_functions_without_a_kernel_are_not_planned_once_more():
    inner = pf.fuse(jax.nn.softmax, options=pf.FuseOptions(price=True))
    outer = pf.fuse(lambda x: inner(x) + 1, options=pf.FuseOptions(price=True))
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    assert outer.explain(x).kernels == ()
    np.testing.assert_allclose(outer(x), jax.nn.softmax(x) + 1, rtol=1e-6)


def test_the_transpose_of_a_linear_function():
    w = jax.random.normal(jax.random.key(0), (64, 128))
    x = jnp.ones((32, 64))

    def linear(x, w):
        return (x @ w).sum(-1), x[:, :3] * 2, jnp.arange(3)

    def by_weights(w, f):
        return f(x, w)[0]

    for function, at, cotangents in (
        (lambda x, f: f(x, w)[:2], x, (jnp.arange(32.0), jnp.ones((32, 3)))),
        (by_weights, w, jnp.arange(32.0)),
    ):
        fused, plain = (
            jax.linear_transpose(lambda y, g=g, function=function: function(y, g), at)(cotangents)[0]
            for g in (pf.fuse(linear), linear)
        )
        np.testing.assert_allclose(fused, plain, rtol=1e-6)


def test_a_method_whose_instance_is_static():
    """It is traced once for each instance, as by `jax.jit`, whatever its position is called."""
    traced = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Module:
        factor: float

        @functools.partial(pf.fuse, static_argnums=0)
        def softmax(self, x):
            traced.append(self.factor)
            return jax.nn.softmax(self.factor * x, -1) if self.factor > 1 else x

    class Scaled:
        factor = 2.0

        @functools.partial(pf.fuse, static_argnums=(-3, -1))
        def softmax(self, x, axis):
            traced.append(axis)
            return jax.nn.softmax(self.factor * x, axis)

        @functools.partial(pf.fuse, static_argnames="self")
        def twice(self, x):
            traced.append("twice")
            return 2 * x

    x = jnp.linspace(0.0, 1.0, 12).reshape(3, 4)
    scaled = Scaled()
    for _ in range(3):
        np.testing.assert_allclose(Module(2.0).softmax(x), jax.nn.softmax(2 * x, -1), rtol=1e-6)
        np.testing.assert_allclose(scaled.softmax(x, 0), jax.nn.softmax(2 * x, 0), rtol=1e-6)
        np.testing.assert_allclose(scaled.twice(x), 2 * x)
    assert traced == [2.0, 0, "twice"]
