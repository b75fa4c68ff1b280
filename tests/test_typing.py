"""Fused functions keep their types: mypy checks this file in `make lint`, and pytest runs it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_type

import jax
import jax.numpy as jnp

import pallasfuse as pf


@pf.fuse
def plain(x: jax.Array, scale: float = 1.0) -> jax.Array:
    return jax.nn.softmax(x * scale)


@pf.fuse(static_argnames="axis", options=pf.FuseOptions(target="xla"))
def with_options(x: jax.Array, *, axis: int) -> tuple[jax.Array, int]:
    return jax.nn.softmax(x, axis=axis), 1


class Layer:
    @pf.fuse
    def method(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x)

    @staticmethod
    @pf.fuse(strict=True)
    def alone(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x)


X = jnp.ones((4, 8))


def test_a_call_has_the_type_of_the_result() -> None:
    assert_type(plain(X), jax.Array)
    assert_type(plain(X, scale=2.0), jax.Array)
    assert_type(with_options(X, axis=0), tuple[jax.Array, int])


def test_a_method_has_the_type_of_the_result() -> None:
    assert_type(Layer().method(X), jax.Array)
    assert_type(Layer.alone(X), jax.Array)
    assert_type(Layer().method.explain(X), pf.Plan)


def test_it_is_a_callable_of_the_same_type() -> None:
    function: Callable[[jax.Array], jax.Array] = plain
    assert_type(plain.__wrapped__(X), jax.Array)
    assert_type(plain.__name__, str)
    function(X)


if TYPE_CHECKING:
    assert_type(Layer.method(Layer(), X), jax.Array)
    plain("text")  # type: ignore[arg-type]
    plain(X, size=1.0)  # type: ignore[call-arg]
    with_options(X)  # type: ignore[call-arg]
    Layer().method()  # type: ignore[call-arg]
    Layer().method(1)  # type: ignore[arg-type]
    pf.fuse(3)  # type: ignore[call-overload]
