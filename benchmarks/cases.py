"""The cases that tests and benchmarks share: each a fused example, its inputs at any size, and its arithmetic.

Attention cases have the sizes of Neptune's evaluation (batch 1, float16); `small()` is the same case for tests.
"""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pallasfuse as pf
from examples import attention_variants, cross_entropy, custom_variant, moments

DRAW = 1000
"""Distance between the seeds of one array in two draws."""


def normal(seed: int, shape: tuple[int, ...], dtype: Any, draw: int = 0) -> jax.Array:
    """Standard normal values, drawn in float32 and rounded to dtype."""
    return jax.random.normal(jax.random.key(seed + DRAW * draw), shape, jnp.float32).astype(dtype)


def all_pairs(query_length: int, key_length: int) -> int:
    return query_length * key_length


def causal_pairs(query_length: int, key_length: int) -> int:
    """Visible pairs when the last query sees the last key."""
    hidden = sum(query_length - 1 - i for i in range(query_length))
    return query_length * key_length - hidden


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """An attention variant. `fused` takes q, k, v [batch, length, heads, head_dim] and then `static`."""

    name: str
    fused: Callable[..., jax.Array]
    query_heads: int
    key_heads: int
    head_dim: int
    pairs: Callable[[int, int], int] = causal_pairs
    window: int | None = None
    """Keys that a query sees, its own included; passed on as a static argument."""
    value_dim: int | None = None
    """Where it is not head_dim."""
    more: Callable[[int, Any, int], tuple[jax.Array, ...]] | None = None
    """Further arrays for a length, type and draw."""
    longest: int = 1 << 30
    """The longest length that is measured."""
    queries: int | None = None
    """Where a length is only that of the keys: the last of so many queries sees the last key."""
    batch: int = 1
    """The batch size that is measured."""

    def lengths(self, length: int) -> tuple[int, int]:
        """Returns the lengths of queries and keys."""
        return self.queries or length, length

    def small(self) -> "AttentionCase":
        """Sizes for tests; groups stay groups, and the window is shorter than the lengths tested."""
        key_heads = 4 if self.query_heads == self.key_heads else 2
        window = None if self.window is None else 24
        return dataclasses.replace(self, query_heads=4, key_heads=key_heads, head_dim=32, window=window)

    @property
    def plain(self) -> Callable[..., jax.Array]:
        """The undecorated function."""
        return self.fused.__wrapped__

    @property
    def static(self) -> tuple[int, ...]:
        return () if self.window is None else (self.window,)

    @property
    def static_argnums(self) -> tuple[int, ...]:
        return () if self.window is None else (3,)

    def arrays(
        self, length: int, dtype: Any, *, batch: int = 1, key_length: int | None = None, draw: int = 0
    ) -> tuple[jax.Array, ...]:
        """q, k, v and what else there is; `draw` numbers independent draws."""
        key_length = length if key_length is None else key_length
        return (
            normal(0, (batch, length, self.query_heads, self.head_dim), dtype, draw),
            normal(1, (batch, key_length, self.key_heads, self.head_dim), dtype, draw),
            normal(2, (batch, key_length, self.key_heads, self.value_dim or self.head_dim), dtype, draw),
            *(self.more(length, dtype, draw) if self.more is not None else ()),
        )

    def flops(self, length: int, *, batch: int = 1, key_length: int | None = None) -> float:
        """Multiplications and additions of the two products over visible pairs, as the literature counts them."""
        key_length = length if key_length is None else key_length
        if self.window is not None:
            pairs = min(self.window, key_length) * length
        elif self.pairs is causal_pairs and length == key_length:
            pairs = length * key_length / 2  # the literature's count, half of all pairs
        else:
            pairs = self.pairs(length, key_length)
        return 2.0 * batch * pairs * self.query_heads * (self.head_dim + (self.value_dim or self.head_dim))


@dataclass(frozen=True, slots=True)
class ArrayCase:
    """Any other example. `build(length, dtype, draw)` makes the arrays; `length` is the extent of the reduced axis."""

    name: str
    fused: Callable[..., Any]
    build: Callable[[int, Any, int], tuple[jax.Array, ...]]

    def small(self) -> "ArrayCase":
        return self

    @property
    def plain(self) -> Callable[..., Any]:
        """The undecorated function."""
        return self.fused.__wrapped__

    @property
    def static(self) -> tuple[int, ...]:
        return ()

    @property
    def static_argnums(self) -> tuple[int, ...]:
        return ()

    def arrays(self, length: int, dtype: Any, *, batch: int = 1, draw: int = 0) -> tuple[jax.Array, ...]:
        del batch  # each case has a leading dimension of its own
        return self.build(length, dtype, draw)


def _rows(length: int, dtype: Any, draw: int) -> tuple[jax.Array, ...]:
    return (normal(3, (61, length), dtype, draw),)


def _affine_rows(length: int, dtype: Any, draw: int) -> tuple[jax.Array, ...]:
    scale, bias = (normal(seed, (length,), dtype, draw) for seed in (4, 5))
    return *_rows(length, dtype, draw), scale, bias


def _labelled_rows(length: int, dtype: Any, draw: int) -> tuple[jax.Array, ...]:
    (rows,) = _rows(length, dtype, draw)
    return 3 * rows, jax.random.randint(jax.random.key(6 + DRAW * draw), (61,), 0, length)


def _heads(length: int, dtype: Any, draw: int) -> tuple[jax.Array, ...]:
    return tuple(normal(seed, (2, length, 4, 32), dtype, draw) for seed in range(3))


def _gated(length: int, dtype: Any, draw: int) -> tuple[jax.Array, ...]:
    arrays = (*_heads(length, dtype, draw), normal(3, (2, length, 4, 32), dtype, draw))
    return *arrays, jnp.array([0.5, 0.25, 0.125, 0.0625], jnp.float32), jnp.array([-1.0, 0.0, 1.0, 2.0], jnp.float32)


def _masked(length: int, dtype: Any, draw: int) -> tuple[jax.Array, ...]:
    mask = jax.random.bernoulli(jax.random.key(7 + DRAW * draw), 0.7, (2, 1, length, length))
    return *_heads(length, dtype, draw), mask | jnp.eye(length, dtype=bool)  # no query is left without a key


ATTENTION = (
    AttentionCase("global", attention_variants.global_attention, 16, 16, 64, all_pairs),
    AttentionCase("causal", attention_variants.causal, 32, 32, 128),
    AttentionCase("gqa", attention_variants.grouped_query, 64, 8, 128),
    AttentionCase("alibi", attention_variants.alibi, 32, 32, 128),
    AttentionCase("softcap", attention_variants.soft_cap, 32, 16, 128),
    AttentionCase("window", attention_variants.sliding_window, 32, 32, 128, window=256),
)


@pf.fuse
def gated_with_pair_bias(q, k, v, bias, gate):
    """A bias for every pair [heads, query, key], and a gate on the output."""
    scores = attention_variants.scaled_scores(q, k) + bias[None]
    return (attention_variants.weighted_values(scores, v) * jax.nn.sigmoid(gate)).astype(v.dtype)


def _pair_and_gate(length: int, dtype: Any, draw: int) -> tuple[jax.Array, ...]:
    return normal(8, (16, length, length), dtype, draw), normal(9, (1, length, 16, 64), dtype, draw)


def decoding(case: AttentionCase, queries: int = 1, batch: int = 1) -> AttentionCase:
    """The last queries of a sequence, each of which sees the keys before it."""
    name = f"{case.name}-{queries}" + (f"x{batch}" if batch > 1 else "")
    return dataclasses.replace(case, name=name, queries=queries, batch=batch)


DECODING = tuple(decoding(case) for case in ATTENTION if case.name in ("causal", "gqa", "alibi", "softcap"))
"""The other four of Neptune's ten operators."""
MORE_DECODING = (
    *(decoding(case, batch=16) for case in ATTENTION if case.name in ("causal", "gqa", "alibi", "softcap")),
    *(decoding(case, queries) for case in ATTENTION if case.name == "gqa" for queries in (8, 32)),
)
"""Many sequences; and several queries, as speculative decoding has them."""

MORE_ATTENTION = (
    AttentionCase("head256", attention_variants.causal, 16, 16, 256),
    AttentionCase("keys192", attention_variants.causal, 32, 32, 192, value_dim=128),
    AttentionCase("pair", gated_with_pair_bias, 16, 16, 64, all_pairs, more=_pair_and_gate, longest=8192),
)
"""Sizes and variants beyond Neptune's."""

OTHERS = (
    ArrayCase("variance", moments.variance, _rows),
    ArrayCase("third moment", moments.third_moment, _rows),
    ArrayCase("layer norm", moments.layer_norm, _affine_rows),
    ArrayCase("cross-entropy and entropy", cross_entropy.cross_entropy, _labelled_rows),
    ArrayCase("gated sink attention", custom_variant.gated_sink_attention, _gated),
)

Case = AttentionCase | ArrayCase


def all_cases() -> tuple[Case, ...]:
    """Every case. Those of the Flax examples import Flax, which a memory measurement must not."""
    from examples import decoder, flax_linen_attention

    return (
        *ATTENTION,
        *OTHERS,
        ArrayCase("decoder attention", decoder.fused_attention, _heads),
        ArrayCase("linen masked attention", flax_linen_attention.masked_attention, _masked),
    )
