"""Fused functions are copied and pickled as functions are, alone and inside the objects of users."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallasfuse as pf
from tests import fused_by_name as named

X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")
WANT = jax.nn.softmax(X)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


COPIES = pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])


def same(got, want=WANT):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


# --- functions


@COPIES
@pytest.mark.parametrize("name", ["decorated", "with_options"])
def test_a_decorated_function_is_the_same_one_by_its_name(again, name):
    fused = getattr(named, name)
    assert again(fused) is fused
    if again is pickled:
        assert len(pickle.dumps(fused)) < 100  # the name, and nothing else


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle(protocol):
    for fused in (named.decorated, pf.fuse(named.softmax)):
        same(pickle.loads(pickle.dumps(fused, protocol))(X))


def test_a_function_below_another_decorator():
    inner = named.decorated_twice.__wrapped__
    assert isinstance(inner, pf.FusedFunction)
    assert pickled(inner) is inner


def test_a_function_whose_name_is_not_its_own():
    """The name of the function that is fused anew means the decorated one."""
    other = pf.fuse(named.with_options.__wrapped__, static_argnums=1, options=pf.FuseOptions(target="interpret"))
    found = pickled(other)
    assert found.__wrapped__ is named.with_options.__wrapped__
    assert found.explain(X, 0).target.name == "interpret"
    same(found(X, 0, power=2), jax.nn.softmax(X, axis=0) ** 2)


@pytest.mark.sampled(3, cover=())
@COPIES
def test_options_and_static_arguments_are_kept(again):
    options = pf.FuseOptions(tiles=(("i", 4),), verify="stages")
    fused = again(pf.fuse(named.with_options.__wrapped__, static_argnames=("axis", "power"), options=options))
    (kernel,) = fused.explain(X, 1, power=1).kernels
    assert kernel.tiles["i"] == 4
    assert fused.explain(X, axis=1).proof is not None
    same(fused(X, 1))


@COPIES
def test_a_fused_fused_function(again):
    same(again(pf.fuse(named.decorated))(X))


def test_a_function_of_no_module_is_refused_as_pickle_refuses_functions():
    def local(x):
        return named.softmax(x)

    fused = pf.fuse(local)
    assert copy.deepcopy(fused) is fused
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"local"):
        pickle.dumps(fused)


def test_another_process_finds_it():
    code = "import pickle, sys; [print(f.__name__, type(f).__name__) for f in pickle.load(sys.stdin.buffer)]"
    both = pickle.dumps([named.decorated, pf.fuse(named.softmax)])
    ran = subprocess.run([sys.executable, "-c", code], input=both, capture_output=True, check=True)
    assert ran.stdout.decode().split() == ["decorated", "FusedFunction", "softmax", "FusedFunction"]


def test_a_copy_of_a_callable_object_has_a_state_of_its_own():
    affine = named.Affine()
    fused = pf.fuse(affine)
    own, stored = copy.deepcopy(fused), pickled(fused)
    for other in (own, stored):
        assert other is not fused
        assert other.__wrapped__ is not affine
        same(other(X), jax.nn.softmax(2 * X))
    affine.scale = jnp.zeros(())
    same(own(X), jax.nn.softmax(2 * X))


# --- methods


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("instance", [named.Layer(0.5), named.Weights(jnp.float32(0.5))], ids=["object", "pytree"])
@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_a_bound_method(instance, again):
    method = instance.apply
    assert isinstance(method, pf.FusedFunction)
    same(method(X), jax.nn.softmax(X * 0.5))
    assert method.explain(X).kernels
    other = again(method)
    same(other(X), jax.nn.softmax(X * 0.5))
    same(other(x=X), jax.nn.softmax(X * 0.5))
    assert pickled(type(instance).apply) is type(instance).apply


def test_a_copied_method_has_its_own_instance():
    layer = named.Layer(0.5)
    own = copy.deepcopy(layer.apply)
    layer.scale = 0.0
    same(own(X), jax.nn.softmax(X * 0.5))


def test_a_method_of_a_pytree_is_differentiated_by_its_instance():
    def loss(weights):
        return jnp.sum(weights.apply(X) ** 2)

    got = jax.grad(loss)(named.Weights(jnp.float32(0.5))).scale
    same(got, jax.grad(lambda s: jnp.sum(jax.nn.softmax(X * s) ** 2))(jnp.float32(0.5)))
    assert pf.verify(named.Weights(jnp.float32(0.5)).apply, X, delta=1e-4).equivalent


def test_static_and_class_methods():
    class Holder:
        factor = 2.0

        @staticmethod
        @pf.fuse
        def alone(x):
            return named.softmax(x)

    same(Holder.alone(X))
    same(Holder().alone(X))


# --- inside the objects of users


@COPIES
def test_a_field_of_a_dataclass(again):
    settings = again(named.Settings(pf.fuse(named.softmax)))
    same(settings.function(X))
    same(dataclasses.replace(settings, width=4).function(X))
    same(dataclasses.asdict(settings)["function"](X))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """As modules of Equinox are: a frozen dataclass that is a pytree, with a function as a static field."""

    weights: jax.Array
    function: object = dataclasses.field(metadata={"static": True})

    def __call__(self, x):
        return self.function(x @ self.weights)


def test_a_static_field_of_a_pytree_compares_equal_in_a_copy():
    block = Block(jnp.eye(40), named.decorated)
    for again in (copy.deepcopy, pickled):
        other = again(block)
        same(jax.jit(lambda b, x: b(x))(other, X))
        jax.tree.map(np.testing.assert_array_equal, block, other)  # of one structure


class Module(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(40, 40, rngs=rngs)
        self.normalize = pf.fuse(named.softmax)

    @pf.fuse
    def fused_method(self, x):
        return named.softmax(self.linear(x))

    def __call__(self, x):
        return self.normalize(self.linear(x))


def test_a_module_of_nnx():
    module = Module(nnx.Rngs(0))
    want = module(X)
    graph, state = nnx.split(module)
    same(nnx.merge(graph, state)(X), want)
    same(nnx.clone(module)(X), want)
    same(nnx.jit(lambda m, x: m(x))(module, X), want)
    same(module.fused_method(X), want)
    other = copy.deepcopy(module)
    same(other(X), want)
    module.linear.kernel[...] = jnp.zeros((40, 40))
    same(other(X), want)
    same(other.fused_method(X), want)


# --- stages and folds


def test_stages_are_shared_by_copies_and_stay_in_their_process():
    traced = pf.fuse(named.softmax).trace(X)
    fused = traced.fuse()
    tiled = fused.tile()
    lowered = tiled.lower()
    for stage in (traced, fused, tiled, tiled.plan, lowered, lowered.compile()):
        assert copy.deepcopy(stage) is stage
        assert copy.deepcopy([stage])[0] is stage
        with pytest.raises(TypeError, match="pickle the fused function"):
            pickle.dumps(stage)


@pytest.mark.sampled(3, cover=())
@COPIES
def test_a_fold(again):
    folded = again(pf.fold(named.normalizer, axis=1))
    state = folded.init(X)
    state = folded.update(state, X[:, 20:], start=20)
    state = folded.update(state, X[:, :20], start=0)
    same(folded.finish(state), named.normalizer(X))
