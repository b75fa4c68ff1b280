"""Models of sound and of time series, and the periods of stars, of the ninth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.ninth_models import dense, linear, rms
from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "ninth"


@program("descript-codec-snake-decoder", GROUP)
def _codec(size: Size) -> Built:
    """This gives the sound that two blocks and the end of the Descript Audio Codec's decoder make of latent frames (dac-jax).

    Each block makes the signal longer by a transposed convolution and adds three dilated units; activations are snakes, a
    square of a sine with a frequency per channel, and every convolution has a normed weight.
    """
    b, t, channels, strides = pick(size, (8, 384, 512, (8, 4)), (1, 60, 96, (8, 4)), (2, 5, 12, (3, 2)))
    dtype, layout = half(size), ("NHC", "HIO", "NHC")

    def snake(alpha, x):
        return x + (1.0 / (alpha + 1e-9)) * jnp.sin(alpha * x) ** 2

    def kernel(p):
        v = p["v"].astype(jnp.float32)
        return (p["g"] * v * lax.rsqrt(jnp.sum(v * v, axis=(0, 1)) + 1e-12)).astype(dtype)

    def convolve(p, x, dilation=1):
        pad = (p["v"].shape[0] - 1) * dilation // 2
        y = lax.conv_general_dilated(
            x, kernel(p), (1,), [(pad, pad)], rhs_dilation=(dilation,), dimension_numbers=layout
        )
        return y + p["b"]

    def unit(p, x, dilation):
        y = convolve(p["wide"], snake(p["alpha1"], x), dilation)
        return x + convolve(p["narrow"], snake(p["alpha2"], y))

    def block(p, x, stride):
        x = snake(p["alpha"], x)
        x = lax.conv_transpose(x, kernel(p["up"]), (stride,), "SAME", dimension_numbers=layout) + p["up"]["b"]
        for weights, dilation in zip(p["units"], (1, 3, 9), strict=True):
            x = unit(weights, x, dilation)
        return x

    def decode(p, x):
        for weights, stride in zip(p["blocks"], strides, strict=True):
            x = block(weights, x, stride)
        return jnp.tanh(convolve(p["out"], snake(p["alpha"], x)))[..., 0].astype(jnp.float32)

    def convolution(width, i, o):
        return {
            "v": normal(width, i, o, dtype=dtype),
            "g": normal(o, scale=0.05, offset=0.7),
            "b": normal(o, dtype=dtype, scale=0.02),
        }

    def alpha(n):
        return normal(n, dtype=dtype, scale=0.2, offset=1.2)

    def units(n):
        wide, narrow = convolution(7, n, n), convolution(1, n, n)
        return [{"wide": wide, "narrow": narrow, "alpha1": alpha(n), "alpha2": alpha(n)}] * 3

    widths = [channels // 2**i for i in range(3)]
    blocks = [
        {"alpha": alpha(i), "up": convolution(2 * stride, i, o), "units": units(o)}
        for i, o, stride in zip(widths[:-1], widths[1:], strides, strict=True)
    ]
    params = {"blocks": blocks, "alpha": alpha(widths[-1]), "out": convolution(7, widths[-1], 1)}
    return Built(decode, (params, normal(b, t, channels, dtype=dtype)))


@program("timesfm-patched-quantile-forecast", GROUP)
def _timesfm(size: Size) -> Built:
    """This gives the forecasts of TimesFM 2.5 with two layers: patches of series that were padded in front, and ten quantiles.

    Mean and deviation of a series up to each patch, by a scan, norm the patch and undo that for its forecast; queries have a
    learned scale per channel.
    """
    b, patches, patch, horizon, n, h, layers, quantiles = pick(
        size, (48, 64, 32, 128, 1280, 16, 2, 10), (4, 32, 32, 128, 192, 4, 2, 10), (3, 5, 4, 7, 12, 2, 1, 3)
    )
    dtype, d = half(size), n // h
    angle = np.arange(patches)[:, None] * 10_000.0 ** (-2.0 * np.arange(d // 2) / d)
    sine, cosine = (f(angle)[None, :, None, :].astype(np.float32) for f in (np.sin, np.cos))

    def residual(p, x):
        return dense(p["out"], jax.nn.silu(dense(p["hidden"], x))) + dense(p["skip"], x)

    def running(carry, item):
        count, mean, deviation = carry
        x, padded = item
        real = jnp.logical_not(padded)
        more = jnp.sum(real, axis=-1).astype(jnp.float32)
        safe = jnp.where(more == 0, 1.0, more)
        mean_here = jnp.sum(jnp.where(real, x, 0.0), axis=-1) / safe
        variance = jnp.sum(jnp.where(real, (x - mean_here[:, None]) ** 2, 0.0), axis=-1) / safe
        total = count + more
        total_safe = jnp.where(total == 0, 1.0, total)
        new_mean = (count * mean + more * mean_here) / total_safe
        old = count * (deviation**2 + (mean - new_mean) ** 2)
        spread = (old + more * (variance + (mean_here - new_mean) ** 2)) / total_safe
        carry = (total, new_mean, jnp.sqrt(jnp.maximum(spread, 0.0)))
        return carry, carry[1:]

    def rotate(x):
        left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)

    def attend(p, x, first):
        q, k, v = (y.reshape(b, patches, h, d) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
        q, k = rms(p["q_norm"], rotate(q)), rms(p["k_norm"], rotate(k))
        q = q * (1.442695041 / np.sqrt(d)) * jax.nn.softplus(p["scale"])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(dtype), k.astype(dtype)).astype(jnp.float32)
        place = jnp.arange(patches)
        seen = (place[None, :] <= place[:, None])[None] & (place[None, None, :] >= first[:, None, None])
        probs = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1).astype(dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, patches, n) @ p["o"]

    def forecast(p, series, start):
        x = series.reshape(b, patches, patch)
        padded = jnp.arange(patches * patch).reshape(patches, patch)[None] < start[:, None, None]
        zero = jnp.zeros(b)
        _, (mean, deviation) = lax.scan(running, (zero,) * 3, (x.swapaxes(0, 1), padded.swapaxes(0, 1)))
        mean, deviation = mean.T[..., None], deviation.T[..., None]
        safe = jnp.where(deviation < 1e-6, 1.0, deviation)
        normed = jnp.where(padded, 0.0, (x - mean) / safe)
        y = residual(p["input"], jnp.concatenate([normed, padded.astype(jnp.float32)], axis=-1).astype(dtype))
        first = jnp.sum(padded[..., -1], axis=-1)
        for layer in p["layers"]:
            y = rms(layer["norms"][1], attend(layer, rms(layer["norms"][0], y), first)) + y
            wide = jax.nn.silu(rms(layer["norms"][2], y) @ layer["up"]) @ layer["down"]
            y = rms(layer["norms"][3], wide) + y
        out = residual(p["output"], y).astype(jnp.float32).reshape(b, patches, horizon, quantiles)
        out = out * safe[..., None] + mean[..., None]
        last = out[:, -1]
        return last[..., 0], jnp.sort(last[..., 1:], axis=-1), out[..., 0]

    def block(i, m, o):
        return {"hidden": linear(i, m, dtype), "out": linear(m, o, dtype), "skip": linear(i, o, dtype)}

    layer = {name: weight(n, n, dtype=dtype) for name in ("o", "up", "down")}
    layer |= {name: gain(d) for name in ("q_norm", "k_norm")}
    layer |= {"qkv": weight(n, 3 * n, dtype=dtype), "scale": normal(d, offset=0.5, scale=0.1), "norms": [gain(n)] * 4}
    params = {"input": block(2 * patch, n, n), "output": block(n, n, horizon * quantiles), "layers": [layer] * layers}
    series = normal(b, patches * patch, scale=3.0, offset=10.0)
    return Built(forecast, (params, series, integers(b, below=patches * patch // 2)))


@program("lomb-scargle-floating-mean-many-stars", GROUP)
def _lomb_scargle(size: Size) -> Built:
    """This gives the periodograms of stars by astropy's direct method with a floating mean, their best periods and false alarms.

    Sums over the observations, weighted by their errors, for each frequency first find the phase at which sine and cosine are
    orthogonal, then the power; the peak is refined by a parabola.
    """
    stars, n, frequencies = pick(size, (8, 600, 16384), (2, 150, 1500), (2, 7, 11))

    def one(gaps, y, dy, frequency):
        t = jnp.cumsum(0.05 + jnp.abs(gaps))
        t = t - t[0]
        w = 1.0 / (0.1 + jnp.abs(dy)) ** 2
        w = w / jnp.sum(w)
        y = y - jnp.dot(w, y)
        omega = 2.0 * np.pi * frequency

        def total(weights, x):
            return jnp.sum(weights[:, None] * x, axis=0)

        angle = omega[None, :] * t[:, None]
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        s, c = total(w, sine), total(w, cosine)
        s2 = 2.0 * total(w, sine * cosine) - 2.0 * s * c
        c2 = 2.0 * total(w, 0.5 - sine**2) - (c * c - s * s)
        tau = 0.5 * jnp.arctan2(s2, c2) / omega

        angle = omega[None, :] * (t[:, None] - tau[None, :])
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        yy = jnp.dot(w, y * y)
        s, c = total(w, sine), total(w, cosine)
        yc, ys = total(w * y, cosine), total(w * y, sine)
        cc, ss = total(w, cosine * cosine) - c * c, total(w, sine * sine) - s * s
        power = (yc * yc / jnp.maximum(cc, 1e-9) + ys * ys / jnp.maximum(ss, 1e-9)) / yy

        i = jnp.clip(jnp.argmax(power), 1, frequencies - 2)
        left, top, right = power[i - 1], power[i], power[i + 1]
        bend = left - 2.0 * top + right
        shift = jnp.where(jnp.abs(bend) > 1e-12, 0.5 * (left - right) / jnp.where(bend == 0.0, 1.0, bend), 0.0)
        best = frequency[i] + jnp.clip(shift, -1.0, 1.0) * (frequency[1] - frequency[0])
        z = jnp.clip(top, 0.0, 1.0 - 1e-6)
        chance = (1.0 - z) ** (0.5 * (n - 3))
        effective = jnp.sqrt(4.0 * np.pi * jnp.var(t))
        tail = frequency[-1] * effective * chance * jnp.sqrt(0.5 * (n - 1) * z)
        return power, best, 1.0 - (1.0 - chance) * jnp.exp(-tail)

    def search(gaps, y, dy):
        frequency = 0.01 + 2.0 / frequencies * jnp.arange(frequencies, dtype=jnp.float32)
        return jax.vmap(one, in_axes=(0, 0, 0, None))(gaps, y, dy, frequency)

    return Built(search, (normal(stars, n, scale=0.5), normal(stars, n), normal(stars, n, scale=0.2)))
