"""Programs to make variants of: Mirage's twelve benchmarks, and four of its repository. Exponentials have no maximum, as there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.jaxpr_frontend.conversion import convert

KEYS = 4096
WIDTH = 4096
type Shapes = tuple[tuple[int, ...], ...]


def softmax(scores: jax.Array) -> jax.Array:
    """Returns exponentials over their sum."""
    e = jnp.exp(scores)
    return e / e.sum(-1, keepdims=True)


def norm(x: jax.Array) -> jax.Array:
    """Returns rows over their root mean square."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def heads(q, k, v):
    """Attention of heads h, each with its own keys."""
    p = softmax(jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("hqk,hkd->hqd", p, v)


def groups(q, k, v):
    """Attention of groups g of r heads, with the keys of the group."""
    p = softmax(jnp.einsum("grqd,gkd->grqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("grqk,gkd->grqd", p, v)


def one_group(q, k, v):
    """Attention of heads r with the same keys."""
    p = softmax(jnp.einsum("rqd,kd->rqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("rqk,kd->rqd", p, v)


def adapter(x, down, up):
    """A narrow layer beside a connection that skips it."""
    return x + jax.nn.relu(x @ down) @ up


def low_rank(x, w, a, b):
    """A product and a correction of low rank."""
    return x @ w + x @ a @ b


def experts(x, w, v, gates):
    """Experts e of one hidden layer, joined by their gates."""
    hidden = jax.nn.relu(jnp.einsum("bk,ekf->bef", x, w))
    return jnp.einsum("be,ben->bn", gates, jnp.einsum("bef,efn->ben", hidden, v))


def norm_product(x, w):
    return norm(x) @ w


def gated(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


def normalised_residual(h, a, alpha):
    """The step of a normalised transformer towards the output of a layer, on the sphere."""
    unit = a * jax.lax.rsqrt((a * a).sum(-1, keepdims=True))
    moved = h + alpha * (unit - h)
    return moved * jax.lax.rsqrt((moved * moved).sum(-1, keepdims=True))


def normed_keys(q, k, v):
    return groups(norm(q), norm(k), v)


PROGRAMS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    **{
        f"{name} {queries}": (function, ((*lead, queries, d), (*keys, KEYS, d), (*keys, KEYS, d)))
        for name, function, lead, keys, d in (
            ("MHA", heads, (32,), (32,), 128), ("GQA", groups, (2, 8), (2,), 128), ("MQA", one_group, (71,), (), 64)
        )
        for queries in (1, 32, 512)
    },
    "MLP": (adapter, ((16, WIDTH), (WIDTH, 16), (16, WIDTH))),
    "MoE": (experts, ((16, WIDTH), (8, WIDTH, 1024), (8, 1024, WIDTH), (16, 8))),
    "LoRA": (low_rank, ((16, WIDTH), (WIDTH, WIDTH), (WIDTH, 16), (16, WIDTH))),
    "RMSNorm + product": (norm_product, ((16, WIDTH), (WIDTH, 6144))),
    "gated MLP": (gated, ((8, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))),
    "normalised residual": (normalised_residual, ((8, WIDTH), (8, WIDTH), (WIDTH,))),
    "QKNorm": (normed_keys, ((2, 8, 1, 128), (2, KEYS, 128), (2, KEYS, 128))),
}  # fmt: skip


def program_of(name: str, dtype: Any = jnp.float16) -> LoopProgram:
    """Returns the loop program of a benchmark."""
    function, shapes = PROGRAMS[name]
    return convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).program
