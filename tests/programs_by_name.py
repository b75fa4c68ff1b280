"""Small jnp functions by name, their loop programs and inputs: shared by the tests of ir, fusion, tiling and emission.

Extents are small and prime (5 rows, 13 reduced positions, 3 columns), so that no tile divides them by accident.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse.decisions import Grouping
from pallasfuse.fusion.grouping import group
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import LoopProgram, Nest, verify
from pallasfuse.ir.reducers import Reducer
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.targets import XLA_CPU, Target

Array = np.ndarray[Any, Any]

FREE = replace(XLA_CPU, name="free")
"""A device on which one kernel less is worth any amount of arithmetic: whatever is legal is fused."""

HALF = {"float16": 2.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class Case:
    """A function and its argument shapes; `fused` reductions share one kernel, in `passes` passes."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    offset: float = 0.0


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def scores(q, k):
    return jnp.einsum("id,jd->ij", q, k) * 0.5


def attention(q, k, v):
    return jax.nn.softmax(scores(q, k), axis=-1) @ v


def masked_attention(mask):
    def function(q, k, v):
        i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]
        return jax.nn.softmax(jnp.where(mask(i, j), scores(q, k), -jnp.inf), axis=-1) @ v

    return function


def variance(x):
    return jnp.var(x, axis=-1)


def log_sum_exp(x):
    return jax.nn.logsumexp(x, axis=-1)


def entropy(x):
    p = jax.nn.softmax(x, axis=-1)
    return -jnp.sum(p * jax.nn.log_softmax(x, axis=-1), axis=-1)


def picked(x):
    label = jnp.arange(x.shape[-1]) == 2 * jnp.arange(x.shape[0])[:, None]
    return jnp.sum(jnp.where(label, jax.nn.log_softmax(x, axis=-1), 0.0), axis=-1)


def norm_dot(x, w):
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)) @ w


def layer_norm(x, g):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5) * g


def layer_norm_dot(x, w):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)) @ w


def cross_entropy(x, w, y):
    logits = x @ w
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * y, axis=-1))


def quantized(x, w):
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return (x / scale) @ w


def scaled_max(x):
    """A maximum of values that are divided by another reduction."""
    return jnp.max(x / (1 + jnp.sum(jnp.exp(x), axis=-1, keepdims=True)), axis=-1)


def standardized_fourth_moment(x):
    """Three passes: the mean, the variance, and a power of both that no small repair exists for."""
    m = jnp.mean(x, axis=-1, keepdims=True)
    s = jnp.sqrt(jnp.mean((x - m) ** 2, axis=-1, keepdims=True))
    return jnp.sum(jnp.tanh((x - m) / s), axis=-1)


def two_softmaxes(x, y):
    return jax.nn.softmax(x, axis=-1) + jax.nn.softmax(y, axis=-1)


def batched_attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def grouped_queries(q, k, v):
    """Three query heads share one key and value head."""
    weights = jax.nn.softmax(jnp.einsum("ihgd,jhd->hgij", q, k), axis=-1)
    return jnp.einsum("hgij,jhd->ihgd", weights, v)


def capped_with_bias(q, k, v, bias):
    return jax.nn.softmax(3 * jnp.tanh(scores(q, k)) + bias, axis=-1) @ v


def constant_window(x):
    j = jnp.arange(x.shape[-1])
    return softmax(jnp.where((j >= 5) & (j < 9), x, -jnp.inf))


def group_norm(x):
    return (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(x.var((1, 2), keepdims=True) + 1e-5)


def distances(x):
    return jax.nn.softmax(-jnp.sum((x[:, None] - x[None]) ** 2, -1), axis=-1) @ x


def above_the_mean(x):
    return jnp.any(x > jnp.mean(x, -1, keepdims=True) + 1, -1), jnp.sum(x == jnp.max(x, -1, keepdims=True), -1)


def masked_share(x):
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None, :]
    return jnp.sum(jnp.where(j <= 2 * i, x, 0) / jnp.sum(1 + jnp.abs(x), -1, keepdims=True), -1)


QKV = ((5, 3), (13, 3), (13, 2))

PROGRAMS: dict[str, Case] = {
    "softmax": Case(softmax, ((5, 13),)),
    "attention": Case(attention, QKV),
    "causal": Case(masked_attention(lambda i, j: j <= i + 4), QKV),
    "window": Case(masked_attention(lambda i, j: (j <= i + 4) & (j > i)), QKV),
    "prefix": Case(masked_attention(lambda i, j: (j <= i) | (j < 6)), QKV),
    "empty_rows": Case(masked_attention(lambda i, j: j + 3 <= i), QKV),
    "variance": Case(variance, ((5, 13),), offset=3.0),
    "log_sum_exp": Case(log_sum_exp, ((5, 13),)),
    "entropy": Case(entropy, ((5, 13),)),
    "picked": Case(picked, ((5, 13),)),
    "norm_dot": Case(norm_dot, ((5, 13), (13, 3))),
    "layer_norm": Case(layer_norm, ((5, 13), (13,)), offset=3.0),
    "layer_norm_dot": Case(layer_norm_dot, ((5, 13), (13, 3)), offset=3.0),
    "cross_entropy": Case(cross_entropy, ((5, 3), (3, 13), (5, 13))),
    "quantized": Case(quantized, ((5, 13), (13, 3))),
    "scaled_max": Case(scaled_max, ((5, 13),)),
    "fourth_moment": Case(standardized_fourth_moment, ((5, 13),), offset=1.0),
    "two_softmaxes": Case(two_softmaxes, ((5, 13), (5, 13))),
    "batched_attention": Case(batched_attention, ((2, 5, 2, 3), (2, 7, 2, 3), (2, 7, 2, 3))),
    "grouped_queries": Case(grouped_queries, ((5, 2, 3, 3), (7, 2, 3), (7, 2, 3))),
    "capped_with_bias": Case(capped_with_bias, (*QKV, (5, 13))),
    "constant_window": Case(constant_window, ((5, 13),)),
    "one_query": Case(attention, ((1, 3), (13, 3), (13, 2))),
    "leading_axis": Case(lambda x: jax.nn.softmax(x, axis=0), ((13, 5),)),
    "whole_array": Case(lambda x: jnp.sum(jnp.exp(x - jnp.max(x))), ((13,),)),
    "group_norm": Case(group_norm, ((3, 5, 7),), offset=3.0),
    "distances": Case(distances, ((13, 3),)),
    "above_the_mean": Case(above_the_mean, ((5, 13),)),
    "masked_share": Case(masked_share, ((5, 13),)),
    "half_attention": Case(attention, QKV, dtype="float16"),
}


def program_of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str = "float32") -> LoopProgram:
    """The loop program of a function over arrays of these shapes."""
    arguments = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
    return verify(convert(jax.make_jaxpr(function)(*arguments)).program)


@cache
def program(name: str) -> LoopProgram:
    case = PROGRAMS[name]
    return program_of(case.function, *case.shapes, dtype=case.dtype)


@cache
def grouping(name: str, target: Target = FREE) -> Grouping:
    return group(program(name), target)


@cache
def only_group(name: str) -> Group:
    (chosen,) = grouping(name).groups
    return chosen


def tensors_of(loops: LoopProgram) -> dict[str, Tensor]:
    return {d.name: Tensor(d.name, d.axes, d.dtype) for d in loops.definitions()}


def random_inputs(loops: LoopProgram, *, seed: int = 0, offset: float = 0.0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {t.name: random.normal(offset, 1.0, [a.extent for a in t.axes]) for t in loops.inputs}


def values(name: str, *, seed: int = 0) -> dict[str, Array]:
    """Every tensor of a named program, on random inputs."""
    return evaluate(program(name), random_inputs(program(name), seed=seed, offset=PROGRAMS[name].offset))


def schedule_of(chosen: Group, grid_tile: int, rolled_tile: int) -> Schedule:
    """Every grid axis in tiles of `grid_tile` (at most its extent)."""
    grid = tuple((a, min(grid_tile, a.extent)) for a in chosen.parallel)
    return Schedule(grid, chosen.rolled, min(rolled_tile, chosen.rolled.extent))


def reduction(name: str, axes, over, reducer: Reducer, body) -> Nest:
    """A float32 reduction nest."""
    return Nest(name, tuple(axes), body, "float32", tuple(over), reducer)


def close(got: Array, want: Array, *, tolerance: float = 1e-9, message: str = "") -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=message)


def lookup(tensors: Mapping[str, Array], names: Mapping[str, Any]) -> dict[str, Array]:
    return {n: tensors[n] for n in names}
