"""The weights and layers of modules in the sets from the twenty-sixth on; their other parts are those of the twenty-fifth."""

from collections.abc import Callable
from typing import Any

import jax
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
