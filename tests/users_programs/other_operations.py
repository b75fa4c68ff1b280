"""Reductions beside other operations: sorts, scatters, convolutions, loops, branches, gradients."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.users_programs.registry import BOOL, I32, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


@program((24, 30))
def statistics_beside_a_sort(x):
    p = jax.nn.softmax(x)
    ordered = jnp.sort(p, -1)[:, ::-1]
    return jnp.cumsum(ordered, -1), jnp.median(x, -1), x.argmax(-1), jnp.ptp(x, -1)


@program((24, 30), ((24,), I32))
def sums_by_scatter(x, index):
    p = jax.nn.softmax(x)
    return jax.ops.segment_sum(p, index, num_segments=4), jnp.zeros((4, 30)).at[index].max(p)


@program((2, 12, 12, 4), (3, 3, 4, 8))
def norm_after_a_convolution(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu((y - y.mean((1, 2), keepdims=True)) * lax.rsqrt(y.var((1, 2), keepdims=True) + 1e-5))


@program((12, 20))
def sinkhorn_in_a_loop(cost):
    def step(_, uv):
        u, v = uv
        u = -jax.nn.logsumexp(v[None, :] - cost, axis=1)
        return u, -jax.nn.logsumexp(u[:, None] - cost, axis=0)

    u, v = lax.fori_loop(0, 3, step, (jnp.zeros(12), jnp.zeros(20)))
    return u[:, None] + v[None, :] - cost


@program((5, 12, 20))
def norms_in_a_scan(x):
    def step(carry, row):
        carry = carry + row / jnp.linalg.norm(row, axis=-1, keepdims=True)
        return carry, jax.nn.softmax(carry, -1)

    return lax.scan(step, jnp.zeros((12, 20)), x)


@program((12, 20), ((), BOOL))
def one_branch_or_the_other(x, flag):
    return lax.cond(flag, lambda x: jax.nn.softmax(x, -1), lambda x: x / x.std(-1, keepdims=True), x) + x.var(
        -1, keepdims=True
    )


@program((12, 20), ((), I32))
def dropout_of_a_softmax(x, seed):
    keep = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return jnp.where(keep, jax.nn.softmax(x) / 0.9, 0.0)


@program((12, 20), (20, 8))
def gradients_of_a_loss(x, w):
    return jax.value_and_grad(lambda w: jnp.mean(jax.nn.logsumexp(x @ w, -1) - (x @ w)[:, 0]))(w)


@program((12, 20), (20, 8))
def recomputed_layer(x, w):
    return jax.checkpoint(lambda x: jax.nn.softmax(x @ w / jnp.sqrt(20.0), -1))(x).sum(0)


@jax.custom_vjp
def _scaled_gradient(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


_scaled_gradient.defvjp(lambda x: (_scaled_gradient(x), x), lambda x, g: (g,))


@program((12, 20))
def function_with_its_own_gradient(x):
    return jax.nn.softmax(_scaled_gradient(x) * 7.3, -1)


@program((4, 6, 3, 2, 5))
def norms_of_five_axes(x):
    centred = x - x.mean((1, 3, 4), keepdims=True)
    return centred / jnp.sqrt((centred**2).mean((1, 3, 4), keepdims=True) + 1e-3), jax.nn.softmax(x, (1, 4))


@program((1, 30), (30, 1))
def axes_of_one_element(x, y):
    return jax.nn.softmax(x), jax.nn.softmax(y, 0), jax.nn.softmax(y, 1), jnp.linalg.norm(x @ y)


@program((0, 30), (12, 30))
def no_rows(x, y):
    return jax.nn.softmax(x), jax.nn.softmax(y), x.sum(0)


@program(((12, 30), I32), ((12, 30), "uint8"))
def integers(n, image):
    pixels = image.astype(jnp.float32) / 255.0
    pixels = pixels - pixels.mean(-1, keepdims=True)
    return (
        n.sum(-1),
        n.mean(-1),
        n.max(-1),
        pixels / jnp.sqrt(pixels.var(-1, keepdims=True) + 1e-5),
    )


@program(((12, 30), BOOL), (12, 30))
def counts(keep, x):
    share = keep.mean(-1)
    return keep.any(-1), keep.all(-1), keep.sum(-1), jnp.where(keep, x, 0).sum(-1) / (share * 30 + 1e-6)


@program((12, 30))
def results_that_are_arguments_or_constants(x):
    return x, jnp.ones(3), jax.nn.softmax(x), jax.nn.softmax(x), x.shape[0], 2.5


@program(((12, 30), "float8_e4m3fn"), (12, 1))
def dequantised_float8(x, scale):
    return jax.nn.softmax(x.astype(jnp.float32) * scale, -1)


@program((12, 30))
def waves_of_positions(x):
    position = jnp.arange(30) * jnp.pi / 7
    return jnp.sum(x * jnp.sin(position), -1) / jnp.sqrt(jnp.sum((x * jnp.cos(position)) ** 2, -1)), jax.nn.softmax(
        jnp.cos(x) * 3
    )


@program((12, 30))
def powers(x):
    y, z = jnp.abs(x) + 0.1, x - x.max(-1, keepdims=True)
    return (
        (y**1.5).sum(-1) ** (2 / 3),
        (y**0.3).mean(-1) ** (1 / 0.3),
        jnp.prod(y[:, :5], -1),
        2.0**z,
    )


@program((12, 30), (30,), ())
def scaled_by_learned_numbers(x, g, s):
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jax.nn.softmax(y * (1 + g) * jax.nn.softplus(s) / 3.7) * jnp.sqrt(jnp.abs(s) + 0.5), jnp.max(
        y * jnp.exp(s), -1
    )


@program((12, 30), (12, 30))
def extremes_of_scaled_rows(x, y):
    scale = jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) / 19.0)
    return (
        jnp.max(x / scale, -1),
        jnp.min(x * -0.31 * scale, -1),
        jnp.abs(x * 29.0).max(-1),
        jnp.max(jnp.sqrt(11.0 * y * y), -1),
    )


@program((12, 30))
def logarithms_of_scaled_sums(x):
    e = jnp.exp(x)
    return (
        jnp.log(17.0 * e.sum(-1)),
        jnp.log2((e / 0.37).mean(-1)),
        jnp.log10(1e-3 + e.sum(-1)),
        jnp.log1p(13.7 * e.sum(-1)),
    )


@program((2, 12, 8), (2, 24, 8), (2, 24, 8), (2, 4, 8), (2, 4, 8), ((), I32))
def attention_after_an_update_of_the_cache(q, k_cache, v_cache, k, v, start):
    k, v = (lax.dynamic_update_slice(c, n, (0, start, 0)) for c, n in ((k_cache, k), (v_cache, v)))
    mask = jnp.arange(24) < start + 4
    return jax.nn.softmax(jnp.where(mask, jnp.einsum("hid,hjd->hij", q, k) * 8**-0.5, -1e10), -1) @ v


@program((12, 16), (16, 24), (24,), (24,))
def norm_of_a_product_with_a_residual(x, w, g, b):
    y = x @ w
    y = jnp.roll(y, 3, -1) + jnp.pad(x, ((0, 0), (4, 4)))
    return (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5) * g + b


@program((2, 8, 8, 6))
def structural_similarity(x):
    y = x[:, ::-1]
    mx, my = x.mean((1, 2)), y.mean((1, 2))
    vx, vy = x.var((1, 2)), y.var((1, 2))
    cov = (x * y).mean((1, 2)) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    return (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))


@program((2, 6, 40))
def gram_matrices(x):
    g = jnp.einsum("bct,bdt->bcd", x, x) / (6 * 40)
    return jnp.linalg.norm(g - jnp.eye(6), axis=(1, 2)), jnp.trace(g, axis1=1, axis2=2)
