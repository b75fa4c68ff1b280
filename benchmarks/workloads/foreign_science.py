"""Programs of biology, physics and recommendation, as users write them who knew nothing of the package."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.foreign_vision import GROUP, _apply, _bias, _dense, _ln_params
from benchmarks.workloads.registry import (
    Built,
    Size,
    booleans,
    gain,
    half,
    integers,
    like,
    normal,
    pick,
    program,
    weight,
)


@program("evoformer-msa-row-outer-mean", GROUP)
def _evoformer(size: Size) -> Built:
    """MSA row attention with a bias of the pairs and a gate, then the outer product mean into the pairs."""
    seqs, res, c_m, c_z, heads, c_o = pick(
        size, (64, 256, 256, 128, 8, 32), (24, 72, 64, 48, 4, 16), (3, 5, 8, 8, 2, 4)
    )
    dtype = half(size)
    d = c_m // heads

    def ln(p, x):
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.var(x32, axis=-1, keepdims=True)
        return (p["scale"] * (x32 - mean) / jnp.sqrt(variance + 1e-5) + p["bias"]).astype(x.dtype)

    def update(p, msa, pair, mask):
        m = ln(p["ln_m"], msa)
        pair_bias = jnp.einsum("qkc,ch->hqk", ln(p["ln_z"], pair), p["pair_w"])
        bias = 1e9 * (mask.astype(jnp.float32) - 1.0)[:, None, None, :]
        q = jnp.einsum("sra,ahc->srhc", m, p["q"]) * d ** (-0.5)
        k = jnp.einsum("sra,ahc->srhc", m, p["k"])
        v = jnp.einsum("sra,ahc->srhc", m, p["v"])
        logits = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32) + bias + pair_bias[None]
        weights = jax.nn.softmax(logits).astype(dtype)
        average = jnp.einsum("bhqk,bkhc->bqhc", weights, v)
        gate = jax.nn.sigmoid(jnp.einsum("bqa,ahc->bqhc", m, p["gate_w"]) + p["gate_b"])
        msa = msa + jnp.einsum("bqhc,hco->bqo", average * gate, p["o"])

        act = ln(p["ln_o"], msa)
        float_mask = mask[..., None].astype(dtype)
        left, right = float_mask * (act @ p["left"]), float_mask * (act @ p["right"])
        outer = jnp.einsum("sic,sje->ijce", left, right)
        norm = jnp.einsum("abc,adc->bdc", float_mask, float_mask)
        pair = pair + jnp.einsum("ijce,cef->ijf", outer, p["outer_w"]) / (1e-3 + norm)
        return msa, pair

    head = normal(c_m, heads, d, dtype=dtype, scale=c_m**-0.5)
    params = {
        "q": head,
        "k": head,
        "v": head,
        "gate_w": head,
        "gate_b": normal(heads, d, dtype=dtype, scale=0.1, offset=1.0),
    }
    params |= {"o": normal(heads, d, c_m, dtype=dtype, scale=c_m**-0.5), "pair_w": weight(c_z, heads, dtype=dtype)}
    params |= {"left": weight(c_m, c_o, dtype=dtype), "right": weight(c_m, c_o, dtype=dtype)}
    params |= {"outer_w": normal(c_o, c_o, c_z, dtype=dtype, scale=1.0 / c_o)}
    params |= {"ln_m": _ln_params(c_m), "ln_z": _ln_params(c_z), "ln_o": _ln_params(c_m)}
    arguments = normal(seqs, res, c_m, dtype=dtype), normal(res, res, c_z, dtype=dtype), booleans(seqs, res)
    return Built(update, (params, *arguments))


@program("triangles-incoming-then-ending", GROUP)
def _triangles(size: Size) -> Built:
    """Pairs of residues: triangle multiplication along incoming edges, then triangle attention around ending nodes."""
    res, c, heads = pick(size, (256, 128, 4), (64, 64, 4), (4, 8, 2))
    dtype = half(size)
    d = c // heads

    def ln(p, x):
        x = x.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        square = (x * x).mean(-1, keepdims=True)
        return ((x - mean) * lax.rsqrt(square - mean**2 + 1e-5) * p["scale"] + p["bias"]).astype(dtype)

    def incoming(p, z, mask):
        x = ln(p["ln_in"], z)
        proj = mask[..., None].astype(dtype) * (x @ p["proj"]) * jax.nn.sigmoid(x @ p["proj_gate"])
        left, right = proj[..., :c], proj[..., c:]
        out = jnp.einsum("kjc,kic->ijc", left, right, preferred_element_type=jnp.float32)
        return (ln(p["ln_mid"], out) @ p["mul_out"]) * jax.nn.sigmoid(x @ p["out_gate"])

    def ending(p, z, mask):
        x = ln(p["ln_att"], jnp.swapaxes(z, 0, 1))
        there = jnp.swapaxes(mask, 0, 1)
        bias = jnp.transpose(x @ p["att_bias"], (2, 0, 1)).astype(jnp.float32)

        def row(r, seen):
            q, k, v = ((r @ p[name]).reshape(res, heads, d) for name in ("att_q", "att_k", "att_v"))
            s = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) / jnp.sqrt(float(d)) + bias
            s = jnp.where(seen[None, None, :], s, jnp.finfo(jnp.float32).min)
            a = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s, -1).astype(dtype), v).reshape(res, c)
            return (a * jax.nn.sigmoid(r @ p["att_gate"])) @ p["att_out"]

        return jnp.swapaxes(jax.vmap(row)(x, there), 0, 1)

    def block(p, z, mask):
        z = z + incoming(p, z, mask)
        return z + ending(p, z, mask)

    names = ("mul_out", "out_gate", "att_q", "att_k", "att_v", "att_gate", "att_out")
    params: dict[str, Any] = {name: weight(c, c, dtype=dtype) for name in names}
    params |= {"proj": weight(c, 2 * c, dtype=dtype), "proj_gate": weight(c, 2 * c, dtype=dtype)}
    params |= {"att_bias": weight(c, heads, dtype=dtype)} | {k: _ln_params(c) for k in ("ln_in", "ln_mid", "ln_att")}
    return Built(block, (params, normal(res, res, c, dtype=dtype), booleans(res, res)))


@program("invariant-points-and-frames", GROUP)
def _ipa(size: Size) -> Built:
    """Invariant point attention: frames by Gram-Schmidt, squared distances of points in the scores, values in local frames."""
    n, c, c_z, heads, sq, pq, pv = pick(
        size, (384, 384, 128, 12, 16, 4, 8), (140, 96, 32, 6, 16, 4, 8), (5, 8, 4, 2, 4, 2, 3)
    )

    def frames(v1, v2):
        e1 = v1 / jnp.linalg.norm(v1, axis=-1, keepdims=True)
        u2 = v2 - e1 * jnp.sum(e1 * v2, -1, keepdims=True)
        e2 = u2 / jnp.linalg.norm(u2, axis=-1, keepdims=True)
        return jnp.stack([e1, e2, jnp.cross(e1, e2)], axis=-1)

    def attention(p, s, z, v1, v2, trans, there):
        rot = frames(v1, v2)
        q, k = ((s @ p[x]).reshape(n, heads, sq) for x in ("q", "k"))
        v = (s @ p["v"]).reshape(n, heads, sq)

        def to_global(x):
            return jnp.einsum("nij,nhpj->nhpi", rot, x) + trans[:, None, None, :]

        q_pts = to_global((s @ p["q_pts"]).reshape(n, heads, pq, 3))
        k_pts = to_global((s @ p["k_pts"]).reshape(n, heads, pq, 3))
        v_pts = to_global((s @ p["v_pts"]).reshape(n, heads, pv, 3))
        d2 = jnp.sum((q_pts[:, None] - k_pts[None]) ** 2, axis=(-1, -2))
        gamma = jax.nn.softplus(p["gamma"]) * math.sqrt(1.0 / (3 * (pq * 9.0 / 2)))
        logits = math.sqrt(1.0 / (3 * sq)) * jnp.einsum("qhc,khc->qkh", q, k)
        logits = logits + math.sqrt(1.0 / 3) * (z @ p["z_bias"]) - 0.5 * gamma * d2
        logits = logits - 1e5 * (1.0 - (there[:, None] & there[None, :]).astype(jnp.float32))[..., None]
        a = jax.nn.softmax(logits, axis=1)
        o = jnp.einsum("qkh,khc->qhc", a, v)
        o_pts = jnp.einsum("qkh,khpx->qhpx", a, v_pts) - trans[:, None, None, :]
        o_pts = jnp.einsum("nji,nhpj->nhpi", rot, o_pts)
        length = jnp.sqrt(jnp.sum(o_pts**2, -1) + 1e-8)
        o_z = jnp.einsum("qkh,qkc->qhc", a, z)
        out = jnp.concatenate([t.reshape(n, -1) for t in (o, o_pts, length, o_z)], -1)
        return s + out @ p["out"]

    params = {k: weight(c, heads * sq) for k in "qkv"} | {"gamma": normal(heads, scale=0.1, offset=0.5)}
    params |= {
        "q_pts": weight(c, heads * pq * 3),
        "k_pts": weight(c, heads * pq * 3),
        "v_pts": weight(c, heads * pv * 3),
    }
    params |= {"z_bias": weight(c_z, heads), "out": weight(heads * (sq + 4 * pv + c_z), c)}
    vec = normal(n, 3)
    return Built(attention, (params, normal(n, c), normal(n, n, c_z), vec, vec, normal(n, 3), booleans(n)))


@program("hmm-posterior-two-scans", GROUP)
def _hmm(size: Size) -> Built:
    """The posterior of a hidden Markov model: forward and backward in log space by two scans, vmapped over sequences."""
    batch, steps, states = pick(size, (16, 64, 256), (4, 48, 128), (2, 5, 3))

    def posterior(log_emit, trans_logits, init_logits):
        log_a, log_pi = jax.nn.log_softmax(trans_logits, axis=1), jax.nn.log_softmax(init_logits)

        def one(emit):
            def forward(alpha, e):
                new = jax.scipy.special.logsumexp(alpha[:, None] + log_a, axis=0) + e
                return new, new

            def backward(beta, e):
                new = jax.scipy.special.logsumexp(log_a + (e + beta)[None, :], axis=1)
                return new, beta

            first = log_pi + emit[0]
            last, alphas = lax.scan(forward, first, emit[1:])
            _, betas = lax.scan(backward, jnp.zeros(states), jnp.roll(emit, -1, axis=0), reverse=True)
            alphas = jnp.concatenate([first[None], alphas])
            evidence = jax.scipy.special.logsumexp(last)
            return jnp.exp(
                alphas + betas - jax.scipy.special.logsumexp(alphas + betas, axis=1, keepdims=True)
            ), evidence

        return jax.vmap(one)(log_emit)

    return Built(posterior, (normal(batch, steps, states), normal(states, states), normal(states)))


@program("lennard-jones-periodic-grad", GROUP)
def _lennard_jones(size: Size) -> Built:
    """The energy of a truncated, shifted and soft-cored Lennard-Jones fluid in a periodic box, with its forces."""
    n = pick(size, 4096, 1024, 6)
    box = float((n / 0.8) ** (1 / 3))
    cutoff = min(2.5, box / 2)

    def energy(fraction):
        pos = box * fraction
        dr = pos[:, None, :] - pos[None, :, :]
        dr = dr - box * jnp.round(dr / box)
        r2 = jnp.sum(dr**2, axis=-1)
        near = (r2 < cutoff**2) & ~jnp.eye(n, dtype=bool)
        safe = jnp.where(near, jnp.maximum(r2, 0.64), 1.0)
        inv6 = (1.0 / safe) ** 3
        shift = cutoff**-12 - cutoff**-6
        return 0.5 * jnp.sum(jnp.where(near, 4.0 * (inv6 * (inv6 - 1.0) - shift), 0.0))

    def forces(fraction):
        value, gradient = jax.value_and_grad(energy)(fraction)
        return value, -gradient / box

    return Built(forces, (normal(n, 3, scale=0.5),))


@program("fourier-operator-layer", GROUP)
def _fno(size: Size) -> Built:
    """A layer of a Fourier neural operator: two corners of the spectrum times complex weights, a 1x1 skip, instance norm."""
    batch, side, c, modes = pick(size, (16, 64, 64, 12), (4, 64, 32, 12), (1, 8, 4, 2))

    def layer(p, x):
        ft = jnp.fft.rfft2(x, axes=(1, 2))
        out = jnp.zeros((batch, side, side // 2 + 1, c), jnp.complex64)
        w1 = lax.complex(p["re1"], p["im1"])
        w2 = lax.complex(p["re2"], p["im2"])
        out = out.at[:, :modes, :modes].set(jnp.einsum("bxyi,ioxy->bxyo", ft[:, :modes, :modes], w1))
        out = out.at[:, -modes:, :modes].set(jnp.einsum("bxyi,ioxy->bxyo", ft[:, -modes:, :modes], w2))
        y = jnp.fft.irfft2(out, s=(side, side), axes=(1, 2)) + jnp.einsum("bxyi,io->bxyo", x, p["skip"]) + p["bias"]
        mean, var = jnp.mean(y, axis=(1, 2), keepdims=True), jnp.var(y, axis=(1, 2), keepdims=True)
        y = (y - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["shift"]
        return jax.nn.gelu(y)

    spectral = normal(c, c, modes, modes, scale=1.0 / c)
    params = {name: spectral for name in ("re1", "im1", "re2", "im2")}
    params |= {"skip": weight(c, c), "bias": _bias(c), "scale": gain(c), "shift": _bias(c)}
    return Built(layer, (params, normal(batch, side, side, c)))


@program("neural-ode-runge-kutta", GROUP)
def _ode(size: Size) -> Built:
    """A continuous flow: sixteen Runge-Kutta steps of a network of time and state, in a fori_loop."""
    rows, n, hidden, steps = pick(size, (2048, 64, 256, 16), (256, 32, 96, 12), (4, 3, 8, 3))

    def field(p, t, y):
        h = jnp.tanh(_apply(p[0], jnp.concatenate([y, jnp.full((rows, 1), t)], axis=-1)))
        h = jnp.tanh(_apply(p[1], h))
        return _apply(p[2], h)

    def integrate(p, y0):
        dt = 1.0 / steps

        def body(i, y):
            t = i * dt
            k1 = field(p, t, y)
            k2 = field(p, t + dt / 2, y + dt / 2 * k1)
            k3 = field(p, t + dt / 2, y + dt / 2 * k2)
            k4 = field(p, t + dt, y + dt * k3)
            return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

        y = lax.fori_loop(0, steps, body, y0)
        return y, -0.5 * jnp.sum(y * y, axis=-1) - 0.5 * n * jnp.log(2 * jnp.pi)

    return Built(integrate, ([_dense(n + 1, hidden), _dense(hidden, hidden), _dense(hidden, n)], normal(rows, n)))


@program("deep-fm-click-linen", GROUP)
def _deepfm(size: Size) -> Built:
    """DeepFM in linen: first order, the pairwise term by squares of sums, a deep tower, and the mean click loss."""
    from flax import linen as nn

    batch, fields, rows, n, widths = pick(
        size, (16384, 39, 200000, 16, (400, 400)), (4096, 39, 20000, 10, (128, 128)), (4, 3, 10, 4, (8, 8))
    )

    class DeepFM(nn.Module):
        @nn.compact
        def __call__(self, ids, values, clicked):
            first = nn.Embed(rows, 1)(ids)[..., 0] * values
            e = nn.Embed(rows, n)(ids) * values[..., None]
            second = 0.5 * (jnp.square(e.sum(1)) - jnp.square(e).sum(1)).sum(-1)
            h = e.reshape(e.shape[0], -1)
            for width in widths:
                h = nn.relu(nn.Dense(width)(h))
            logit = first.sum(-1) + second + nn.Dense(1)(h)[:, 0]
            y = clicked.astype(jnp.float32)
            return -jnp.mean(y * jax.nn.log_sigmoid(logit) + (1 - y) * jax.nn.log_sigmoid(-logit)), jax.nn.sigmoid(
                logit
            )

    inputs = integers(batch, fields, below=rows), normal(batch, fields, offset=1.0, scale=0.2), integers(batch, below=2)
    module = DeepFM()
    shapes = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs), *[r.struct for r in inputs])
    return Built(module.apply, (like(shapes), *inputs))


@program("sampled-softmax-logq-grad", GROUP)
def _sampled_softmax(size: Size) -> Built:
    """Next-item loss by sampled softmax: pooled histories, negatives corrected by log q, accidental hits hidden; gradients."""
    batch, history, items, negatives, n = pick(
        size, (4096, 20, 100000, 2048, 128), (768, 20, 10000, 768, 48), (4, 3, 16, 5, 8)
    )

    def loss(p, past, target, negative, log_q):
        seen = (past > 0).astype(jnp.float32)
        pooled = jnp.einsum("blc,bl->bc", p["items"][past], seen) / jnp.maximum(seen.sum(1, keepdims=True), 1.0)
        user = jax.nn.relu(_apply(p["fc1"], pooled)) @ p["fc2"]
        user = user / jnp.sqrt(jnp.sum(user**2, axis=1, keepdims=True) + 1e-12)

        def unit(e):
            return e / (jnp.linalg.norm(e, axis=1, keepdims=True) + 1e-6)

        pos, neg = unit(p["items"][target]), unit(p["items"][negative])
        pos_logit = jnp.sum(user * pos, axis=1) / 0.07 - log_q[target]
        neg_logit = jnp.matmul(user, neg.T) / 0.07 - log_q[negative][None, :]
        hit = target[:, None] == negative[None, :]
        neg_logit = jnp.where(hit, jnp.finfo(neg_logit.dtype).min, neg_logit)
        logits = jnp.concatenate([pos_logit[:, None], neg_logit], axis=1)
        return -jnp.mean(jax.nn.log_softmax(logits, axis=1)[:, 0])

    params = {"items": normal(items, n, scale=0.1), "fc1": _dense(n, 2 * n), "fc2": weight(2 * n, n)}
    past, target = integers(batch, history, below=items), integers(batch, below=items)
    arguments = past, target, integers(negatives, below=items), normal(items, scale=0.5, offset=-8.0)
    return Built(jax.value_and_grad(loss), (params, *arguments))
