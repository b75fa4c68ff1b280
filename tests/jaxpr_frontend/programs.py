"""Helpers: convert a function, and the value that JAX gives to every tensor of the result."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.loop_program import External, Nest
from pallasfuse.jaxpr_frontend import Converted, convert


@contextmanager
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def converted(function: Callable[..., Any], *args: Any) -> Converted:
    return convert(jax.make_jaxpr(function)(*args))


def text(function: Callable[..., Any], *args: Any) -> str:
    return str(converted(function, *args).program)


def reasons(result: Converted) -> list[str]:
    return [n.reason for n in result.program.nests if isinstance(n, External)]


def tensor_values(result: Converted, *args: Any) -> dict[str, np.ndarray]:
    """The value of every tensor's variable, computed by JAX from the flat jaxpr, in the shape of the tensor's axes."""
    names = [name for name, var in result.variable.items()]
    variables = [result.variable[name] for name in names]
    every = result.jaxpr.replace(outvars=variables)
    values = jax.jit(lambda *given: jax.core.eval_jaxpr(every, every.consts, *given))(*jax.tree.leaves(args))
    shapes = {d.name: tuple(a.extent for a in d.axes) for d in result.program.definitions()}
    return {name: np.asarray(v).reshape(shapes[name]) for name, v in zip(names, values, strict=True)}


def check(function: Callable[..., Any], *args: Any, tolerance: float = 1e-9) -> Converted:
    """Every nest of the converted function, and its outputs, agree with JAX in float64.

    Tensors that are left to XLA get JAX's value, so that what comes after them is checked as well.
    """
    with x64():
        result = converted(function, *args)
        values = tensor_values(result, *args)
        expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*args))]
    close = {"rtol": tolerance, "atol": tolerance / 1000}
    given = {t.name for t in result.program.inputs}
    given |= {n.name for n in result.program.nests if isinstance(n, External)}
    computed = evaluate(result.program, {name: values[name] for name in given})
    for nest in result.program.nests:
        if isinstance(nest, Nest) and not nest.internal:  # a step of an operation has no equation of its own
            np.testing.assert_allclose(computed[nest.name], values[nest.name], err_msg=str(nest), **close)
    assert len(result.results) == len(expected)
    for name, want in zip(result.results, expected, strict=True):
        have = computed[name] if isinstance(name, str) else np.asarray(name.val)
        np.testing.assert_allclose(have.reshape(want.shape), want, **close)
    return result
