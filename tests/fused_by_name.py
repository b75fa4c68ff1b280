"""Fused functions under names of a module, for tests that pickle them."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import pallasfuse as pf


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


@pf.fuse
def decorated(x):
    return jax.nn.softmax(x, axis=-1)


@pf.fuse(static_argnums=1, static_argnames="power", options=pf.FuseOptions(target="xla"))
def with_options(x, axis, power=1):
    return jax.nn.softmax(x, axis=axis) ** power


def _counted(function):
    @functools.wraps(function)
    def run(*args):
        run.calls += 1
        return function(*args)

    run.calls = 0
    return run


@_counted
@pf.fuse
def decorated_twice(x):
    return jax.nn.softmax(x, axis=-1)


class Layer:
    """No pytree: a method reads it anew."""

    def __init__(self, scale):
        self.scale = scale

    @pf.fuse
    def apply(self, x):
        return softmax(x * self.scale)


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    """A pytree: a method takes it as an argument."""

    scale: jax.Array

    @pf.fuse
    def apply(self, x):
        return softmax(x * self.scale)


@dataclass
class Settings:
    function: object
    width: int = 8


class Affine:
    """A callable object with a state of its own."""

    def __init__(self):
        self.scale = jnp.full((), 2.0)

    def __call__(self, x):
        return softmax(x * self.scale)


def normalizer(x):
    return jax.nn.logsumexp(x, axis=-1)
