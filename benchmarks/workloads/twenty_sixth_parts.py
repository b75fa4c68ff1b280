"""The weights, states and layers of modules in the sets from the twenty-sixth on; other parts are those of the twenty-fifth."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads.registry import Random, normal


def drawn(structs: Any, dtype: Any = None) -> Any:
    """This describes weights of a module: biases and means near zero, gains near one, matrices by their inputs."""

    def of(path: Any, s: Any) -> Random:
        kind = s.dtype if dtype is None else dtype
        if len(s.shape) > 1:
            return normal(*s.shape, dtype=kind, scale=float(np.prod(s.shape[:-1])) ** -0.5)
        names = {str(getattr(k, "key", getattr(k, "name", k))) for k in path}
        near_zero = names & {"b", "bias", "mean", "offset"}
        return normal(*s.shape, dtype=kind, scale=0.1, offset=0.0 if near_zero else 1.0)

    return jax.tree_util.tree_map_with_path(of, structs)


def layers_of_nnx(dtype: Any) -> tuple[Callable[..., Any], ...]:
    """Returns functions that make a dense layer, a norm and a convolution of nnx with weights of a type."""
    from flax import nnx

    def dense(i, o, rngs):
        return nnx.Linear(i, o, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def norm(c, rngs):
        return nnx.LayerNorm(c, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def conv(i, o, k, rngs, stride=1, groups=1):
        how = {"strides": stride, "feature_group_count": groups, "dtype": dtype, "param_dtype": dtype}
        return nnx.Conv(i, o, (k, k), padding="SAME", rngs=rngs, **how)

    return dense, norm, conv


def residual_layers_of_nnx(dtype: Any, groups: int) -> tuple[Callable[..., Any], type]:
    """Returns a function that makes a norm by groups of channels, and the class of residual units of nnx with such norms."""
    from flax import nnx

    _, _, conv = layers_of_nnx(dtype)

    def norm(n, rngs):
        return nnx.GroupNorm(n, num_groups=min(groups, n // 2), dtype=dtype, param_dtype=dtype, rngs=rngs)

    class Unit(nnx.Module):
        """This is a residual unit: two convolutions of 3 x 3, beside the input or a convolution of it."""

        def __init__(self, i, o, stride, rngs):
            self.first, self.second = conv(i, o, 3, rngs, stride), conv(o, o, 3, rngs)
            self.norm1, self.norm2 = norm(o, rngs), norm(o, rngs)
            self.short = conv(i, o, 1, rngs, stride) if i != o or stride > 1 else None

        def __call__(self, x):
            y = self.norm2(self.second(nnx.relu(self.norm1(self.first(x)))))
            return nnx.relu(y + (x if self.short is None else self.short(x)))

    return norm, Unit


def state_of(optimiser: Any, weights: Any) -> Any:
    """This describes the state of an optimiser: counts of steps, small averages and small squares above zero."""

    def of(s: Any) -> Random:
        if jnp.issubdtype(s.dtype, jnp.integer):
            return Random(tuple(s.shape), jnp.dtype(s.dtype), below=1000)
        return normal(*s.shape, dtype=s.dtype, scale=1e-5, offset=1e-4)

    structs = jax.tree.map(lambda r: r.struct if isinstance(r, Random) else r, weights, is_leaf=is_random)
    return jax.tree.map(of, jax.eval_shape(optimiser.init, structs))


def is_random(leaf: Any) -> bool:
    return isinstance(leaf, Random)
