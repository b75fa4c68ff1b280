"""Golden text: the loop programs of small functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.jaxpr_frontend.programs import text

F32, BF16 = jnp.float32, jnp.bfloat16


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def softmax_rows(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, axis=-1)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8
    rows, columns = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    scores = jnp.where(rows[:, None] >= columns[None, :], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def grouped_by_reshape(q: jax.Array, k: jax.Array) -> jax.Array:
    b, t, h, d = q.shape
    return jnp.einsum("btkgd,bskd->bkgts", q.reshape(b, t, k.shape[2], h // k.shape[2], d), k)


def grouped_by_repeat(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2))


def variance(x: jax.Array) -> jax.Array:
    return x.var(-1)


def log_of_sum_of_exponentials(x: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(x, axis=-1)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * scale + bias


def library_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def self_attention(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x @ x.T) @ x


def projected_heads(x: jax.Array, w: jax.Array) -> jax.Array:
    b, t, d = x.shape
    q, k, v = ((x @ w[n]).reshape(b, t, 2, d // 2) for n in range(3))
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return x + jnp.einsum("bhts,bshd->bthd", p, v).reshape(b, t, d)


def odd_contraction(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("abc,cda->db", x, y)


def max_over_two(x: jax.Array) -> jax.Array:
    return x.max((0, 2))


GOLDEN: dict[str, tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...], str]] = {
    "softmax_rows": (
        softmax_rows,
        (array(4, 6),),
        """
input x: float32[i:4, j:6]
t0[i]: float32 max[j:6]= x[i, j]
t1[i]: float32 = t0[i]
t2[i]: float32 = t1[i]
t3[i]: float32 = t2[i]
t4[i, j]: float32 = x[i, j] - t3[i]
t5[i, j]: float32 = exp(t4[i, j])
t6[i]: float32 sum[j:6]= t5[i, j]
t7[i]: float32 = t6[i]
t8[i, j]: float32 = t5[i, j] / t7[i]
return t8
""",
    ),
    "causal_attention": (
        causal_attention,
        (array(2, 16, 4, 8), array(2, 16, 4, 8), array(2, 16, 4, 8)),
        """
input q: float32[i:2, j:16, l:4, m:8]
input k: float32[i:2, n:16, l:4, m:8]
input v: float32[i:2, n:16, l:4, o:8]
t0[i, l, j, n]: float32 sum[m:8]= q[i, j, l, m] * k[i, n, l, m]
t1[i, l, j, n]: float32 = t0[i, l, j, n] / 8
t2[j]: int32 = j
t3[n]: int32 = n
t4[j]: int32 = t2[j]
t5[n]: int32 = t3[n]
t6[j, n]: bool = t4[j] >= t5[n]
t7[]: float32 = -inf
t8[i, l, j, n]: bool = t6[j, n]
t9[i, l, j, n]: float32 = t7
t10[i, l, j, n]: float32 = select(t8[i, l, j, n], t1[i, l, j, n], t9[i, l, j, n])
t11[i, l, j]: float32 max[n:16]= t10[i, l, j, n]
t12[i, l, j]: float32 = t11[i, l, j]
t13[i, l, j]: float32 = t12[i, l, j]
t14[i, l, j]: float32 = t13[i, l, j]
t15[i, l, j, n]: float32 = t10[i, l, j, n] - t14[i, l, j]
t16[i, l, j, n]: float32 = exp(t15[i, l, j, n])
t17[i, l, j]: float32 sum[n:16]= t16[i, l, j, n]
t18[i, l, j]: float32 = t17[i, l, j]
t19[i, l, j, n]: float32 = t16[i, l, j, n] / t18[i, l, j]
t20[i, l, o, j]: float32 sum[n:16]= v[i, n, l, o] * t19[i, l, j, n]
t21[i, j, l, o]: float32 = t20[i, l, o, j]
return t21
""",
    ),
    "grouped_by_reshape": (
        grouped_by_reshape,
        (array(2, 16, 4, 8, dtype=BF16), array(2, 12, 2, 8, dtype=BF16)),
        """
input q: bfloat16[i:2, j:16, l:2, m:2, n:8]
input k: bfloat16[i:2, o:12, l:2, n:8]
t0[i, j, l, m, n]: bfloat16 = q[i, j, l, m, n]
t1[i, l, o, j, m]: bfloat16 sum[n:8]= float32(k[i, o, l, n]) * float32(t0[i, j, l, m, n])
t2[i, l, m, j, o]: bfloat16 = t1[i, l, o, j, m]
return t2
""",
    ),
    "grouped_by_repeat": (
        grouped_by_repeat,
        (array(2, 16, 4, 8, dtype=BF16), array(2, 12, 2, 8, dtype=BF16)),
        """
input q: bfloat16[i:2, j:16, l:2, m:2, n:8]
input k: bfloat16[i:2, o:12, l:2, n:8]
t0[i, o, l, m, n]: bfloat16 = k[i, o, l, n]
t1[i, o, l, m, n]: bfloat16 = t0[i, o, l, m, n]
t2[i, l, m, j, o]: bfloat16 sum[n:8]= float32(q[i, j, l, m, n]) * float32(t1[i, o, l, m, n])
return t2
""",
    ),
    "variance": (
        variance,
        (array(4, 6),),
        """
input x: float32[i:4, j:6]
t0[i]: float32 sum[j:6]= x[i, j]
t1[i]: float32 = t0[i]
t2[i]: float32 = t1[i] / 6
t3[i, j]: float32 = x[i, j] - t2[i]
t4[i, j]: float32 = square(t3[i, j])
t5[]: float32 = float32(0)
t6[]: float32 = 6 - t5
t7[i]: float32 sum[j:6]= t4[i, j]
t8[i]: float32 = t7[i] / t6
t9[]: bool = t6 > 0
t10[]: float32 = nan
t11[i]: float32 = t10
t12[i]: float32 = select(t9, t8[i], t11[i])
return t12
""",
    ),
    "log_of_sum_of_exponentials": (
        log_of_sum_of_exponentials,
        (array(4, 6),),
        """
input x: float32[i:4, j:6]
t0[i]: float32 max[j:6]= x[i, j]
t1[i]: float32 = t0[i]
t2[i]: bool = is_finite(t1[i])
t3[i]: float32 = 0
t4[i]: float32 = select(t2[i], t1[i], t3[i])
t5[i]: float32 = t4[i]
t6[i]: float32 = t5[i]
t7[i, j]: float32 = x[i, j] - t6[i]
t8[i, j]: float32 = exp(t7[i, j])
t9[i]: float32 sum[j:6]= t8[i, j]
t10[i]: float32 = abs(t9[i])
t11[i]: float32 = log(t10[i])
t12[i]: float32 = t11[i] + t5[i]
return t12
""",
    ),
    "layer_norm": (
        layer_norm,
        (array(4, 6), array(6), array(6)),
        """
input x: float32[i:4, j:6]
input scale: float32[j:6]
input bias: float32[j:6]
t0[i]: float32 sum[j:6]= x[i, j]
t1[i]: float32 = t0[i]
t2[i]: float32 = t1[i] / 6
t3[i, j]: float32 = x[i, j] - t2[i]
t4[i, j]: float32 = square(t3[i, j])
t5[i]: float32 sum[j:6]= t4[i, j]
t6[i]: float32 = t5[i]
t7[i]: float32 = t6[i] / 6
t8[i, j]: float32 = x[i, j] - t2[i]
t9[i]: float32 = t7[i] + 9.999999974752427e-07
t10[i]: float32 = rsqrt(t9[i])
t11[i, j]: float32 = t8[i, j] * t10[i]
t12[j]: float32 = scale[j]
t13[i, j]: float32 = t11[i, j] * t12[j]
t14[j]: float32 = bias[j]
t15[i, j]: float32 = t13[i, j] + t14[j]
return t15
""",
    ),
    "library_attention": (
        library_attention,
        (array(2, 16, 4, 8, dtype=BF16), array(2, 16, 2, 8, dtype=BF16), array(2, 16, 2, 8, dtype=BF16)),
        """
input q: bfloat16[i:2, j:16, l:2, m:2, n:8]
input k: bfloat16[i:2, o:16, l:2, n:8]
input v: bfloat16[i:2, o:16, l:2, p:8]
t0[i, j, l, m, n]: bfloat16 = q[i, j, l, m, n]
t1[i, l, j, m, o]: float32 sum[n:8]= float32(t0[i, j, l, m, n]) * float32(k[i, o, l, n])
t2[i, l, j, m, o]: float32 = t1[i, l, j, m, o] * 0.3535533845424652
t3[i, l, j, o]: bool = True
t4[j, o]: bool = True
t5[j, o]: int32 = j
t6[j, o]: int32 = t5[j, o]
t7[j, o]: int32 = o
t8[j, o]: bool = t6[j, o] >= t7[j, o]
t9[j, o]: bool = False
t10[j, o]: bool = select(t8[j, o], t4[j, o], t9[j, o])
t11[j, o]: bool = t10[j, o]
t12[i, l, j, o]: bool = t3[i, l, j, o] & t11[j, o]
t13[i, l, j, o]: float32 = -2.381976325057654e+38
t14[m, i, l, j, o]: bool = t12[i, l, j, o]
t15[m, i, l, j, o]: float32 = t13[i, l, j, o]
t16[m, i, l, j, o]: float32 = t2[i, l, j, m, o]
t17[m, i, l, j, o]: float32 = select(t14[m, i, l, j, o], t16[m, i, l, j, o], t15[m, i, l, j, o])
t18[m, i, l, j]: float32 max[o:16]= t17[m, i, l, j, o]
t19[m, i, l, j]: float32 = t18[m, i, l, j]
t20[m, i, l, j]: float32 = t19[m, i, l, j]
t21[m, i, l, j]: float32 = t20[m, i, l, j]
t22[m, i, l, j, o]: float32 = t17[m, i, l, j, o] - t21[m, i, l, j]
t23[m, i, l, j, o]: float32 = exp(t22[m, i, l, j, o])
t24[m, i, l, j]: float32 sum[o:16]= t23[m, i, l, j, o]
t25[m, i, l, j]: float32 = t24[m, i, l, j]
t26[m, i, l, j, o]: float32 = t23[m, i, l, j, o] / t25[m, i, l, j]
t27[m, i, l, j, o]: bfloat16 = bfloat16(t26[m, i, l, j, o])
t28[i, l, p, m, j]: bfloat16 sum[o:16]= float32(v[i, o, l, p]) * float32(t27[m, i, l, j, o])
t29[m, i, j, l, p]: bfloat16 = t28[i, l, p, m, j]
t30[i, j, l, m, p]: bfloat16 = t29[m, i, j, l, p]
t31[i, j, l, m, p]: bfloat16 = t30[i, j, l, m, p]
return t31
""",
    ),
    "self_attention": (
        self_attention,
        (array(4, 6),),
        """
input x: float32[i:4, j:6]
t0[j, i]: float32 = x[i, j]
t1[i, k]: float32 sum[j:6]= x[i, j] * t0[j, k]
t2[i]: float32 max[k:4]= t1[i, k]
t3[i]: float32 = t2[i]
t4[i]: float32 = t3[i]
t5[i]: float32 = t4[i]
t6[i, k]: float32 = t1[i, k] - t5[i]
t7[i, k]: float32 = exp(t6[i, k])
t8[i]: float32 sum[k:4]= t7[i, k]
t9[i]: float32 = t8[i]
t10[i, k]: float32 = t7[i, k] / t9[i]
t11[i, j]: float32 sum[k:4]= t10[i, k] * x[k, j]
return t11
""",
    ),
    "projected_heads": (
        projected_heads,
        (array(2, 16, 8), array(3, 8, 8)),
        """
input x: float32[i:2, j:16, k:2, l:4]
input w: float32[m:3, n:8, o:8]
t0[k, l, p, q]: float32 = xla(w)  # slices are left to XLA
t1[k, l, p, q]: float32 = t0[k, l, p, q]
t2[i, j, p, q]: float32 sum[k:2, l:4]= x[i, j, k, l] * t1[k, l, p, q]
t3[i, j, p, q]: float32 = t2[i, j, p, q]
t4[k, l, p, q]: float32 = xla(w)  # slices are left to XLA
t5[k, l, p, q]: float32 = t4[k, l, p, q]
t6[i, j, p, q]: float32 sum[k:2, l:4]= x[i, j, k, l] * t5[k, l, p, q]
t7[i, j, p, q]: float32 = t6[i, j, p, q]
t8[k, l, p, r]: float32 = xla(w)  # slices are left to XLA
t9[k, l, p, r]: float32 = t8[k, l, p, r]
t10[i, j, p, r]: float32 sum[k:2, l:4]= x[i, j, k, l] * t9[k, l, p, r]
t11[i, j, p, r]: float32 = t10[i, j, p, r]
t12[i, p, j, s]: float32 sum[q:4]= t3[i, j, p, q] * t7[i, s, p, q]
t13[i, p, j]: float32 max[s:16]= t12[i, p, j, s]
t14[i, p, j]: float32 = t13[i, p, j]
t15[i, p, j]: float32 = t14[i, p, j]
t16[i, p, j]: float32 = t15[i, p, j]
t17[i, p, j, s]: float32 = t12[i, p, j, s] - t16[i, p, j]
t18[i, p, j, s]: float32 = exp(t17[i, p, j, s])
t19[i, p, j]: float32 sum[s:16]= t18[i, p, j, s]
t20[i, p, j]: float32 = t19[i, p, j]
t21[i, p, j, s]: float32 = t18[i, p, j, s] / t20[i, p, j]
t22[i, p, r, j]: float32 sum[s:16]= t11[i, s, p, r] * t21[i, p, j, s]
t23[i, j, p, r]: float32 = t22[i, p, r, j]
t24[i, j, p, r]: float32 = t23[i, j, p, r]
t25[i, j, p, r]: float32 = x[i, j, p, r] + t24[i, j, p, r]
return t25
""",
    ),
    "odd_contraction": (
        odd_contraction,
        (array(2, 3, 4), array(4, 5, 2)),
        """
input x: float32[i:2, j:3, k:4]
input y: float32[k:4, l:5, i:2]
t0[l, j]: float32 sum[i:2, k:4]= y[k, l, i] * x[i, j, k]
return t0
""",
    ),
    "max_over_two": (
        max_over_two,
        (array(2, 3, 4),),
        """
input x: float32[i:2, j:3, k:4]
t0[j]: float32 max[i:2, k:4]= x[i, j, k]
return t0
""",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_text(name: str) -> None:
    function, args, expected = GOLDEN[name]
    assert text(function, *args) == expected.strip("\n")


def test_text_does_not_depend_on_what_was_converted_before() -> None:
    function, args, _ = GOLDEN["library_attention"]
    assert text(function, *args) == text(function, *args)
