"""Activations, and products with something after them."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.users_programs.registry import Programs

PROGRAMS = Programs()
program = PROGRAMS.register


@program((12, 16), (16, 20), (20,))
def gelu_by_erf_after_a_product(x, w, b):
    return jax.nn.gelu(x @ w + b, approximate=False)


@program((12, 16), (16, 20), (20,))
def gelu_by_tanh_after_a_product(x, w, b):
    return jax.nn.gelu(x @ w + b, approximate=True)


@program((12, 40))
def softmax_of_gelu(x):
    return jax.nn.softmax(0.5 * x * (1 + lax.erf(x / jnp.sqrt(2.0))), axis=-1)


@program((12, 40))
def softmax_of_gelu_by_tanh(x):
    inner = jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)
    return jax.nn.softmax(0.5 * x * (1 + jnp.tanh(inner)), axis=-1)


@program((12, 40))
def sums_of_activations(x):
    return sum(f(x).sum(-1) for f in (jax.nn.softplus, jax.nn.silu, jax.nn.leaky_relu, jax.nn.elu, jax.nn.hard_swish,
                                      jax.nn.mish, jax.nn.relu6, jax.nn.selu))  # fmt: skip


@program((12, 16), (16, 40), (16, 40), (40, 16))
def gated_mlp(x, w, u, v):
    return (jax.nn.silu(x @ w) * (x @ u)) @ v


@program((12, 16), (16, 4), (4, 16), (16, 16))
def adapter(x, a, b, w):
    return x @ w + (x @ a @ b) * (32.0 / 4)
