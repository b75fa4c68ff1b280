"""Microphones, gravitational waves, spoken commands and stereo images of the tenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.foreign_attention import _uint8
from benchmarks.workloads.registry import Built, Random, Size, half, normal, pick, program

GROUP = "tenth"


@program("masked-covariance-beamformer-resynthesis", GROUP)
def _beamformer(size: Size) -> Built:
    """This gives speech that a beamformer of Souden's form takes from some microphones, with masks of speech and noise.

    Short-time spectra give the covariances of speech and noise per frequency, weighted by masks; small complex systems with a
    loaded diagonal are solved for the filter, the reference is a softmax over signal-to-noise ratios, and frames overlap again.
    """
    b, microphones, frames, window, hop = pick(size, (6, 7, 780, 512, 128), (3, 5, 400, 256, 64), (2, 3, 9, 16, 4))
    samples, bins = (frames - 1) * hop + window, window // 2 + 1
    taper = np.sqrt(np.hanning(window + 1)[:-1] + 1e-4).astype(np.float32)
    places = np.arange(frames)[:, None] * hop + np.arange(window)[None, :]

    def covariance(spectra, mask):
        weights = mask / (jnp.sum(mask, axis=-1, keepdims=True) + 1e-6)
        return jnp.einsum("bcft,bdft,bft->bfcd", spectra, jnp.conj(spectra), weights)

    def enhance(audio, logits, scale):
        spectra = jnp.swapaxes(jnp.fft.rfft(audio[..., places] * taper), -1, -2) * window**-0.5
        mask = jax.nn.sigmoid(logits + 0.5 * jnp.log1p(jnp.mean(jnp.abs(spectra), axis=1)))
        speech, noise = covariance(spectra, mask), covariance(spectra, 1.0 - mask)
        load = 1e-2 * jnp.trace(noise, axis1=-2, axis2=-1).real[..., None, None] / microphones
        ratio = jnp.linalg.solve(noise + load * jnp.eye(microphones), speech)
        filters = ratio / (jnp.trace(ratio, axis1=-2, axis2=-1)[..., None, None] + 1e-6)
        gained = jnp.einsum("bfcr,bfcd,bfdr->bfr", jnp.conj(filters), speech, filters).real
        lost = jnp.einsum("bfcr,bfcd,bfdr->bfr", jnp.conj(filters), noise, filters).real
        quality = jnp.sum(gained, axis=1) / jnp.maximum(jnp.sum(lost, axis=1), 1e-6)
        chosen = jax.nn.softmax(scale * quality, axis=-1)
        steer = jnp.einsum("bfcr,br->bfc", filters, chosen)
        clean = jnp.einsum("bfc,bcft->btf", jnp.conj(steer), spectra)
        pieces = jnp.fft.irfft(clean, n=window) * taper * window**0.5
        total = jnp.zeros((b, samples)).at[:, places].add(pieces)
        weight = jnp.zeros(samples).at[places].add(jnp.asarray(taper**2)[None, :])
        return total / (weight + 1e-3), chosen, 10.0 * jnp.log10(quality + 1e-3)

    return Built(enhance, (normal(b, microphones, samples), normal(b, bins, frames, scale=2.0), normal(offset=5.0)))


@program("gravitational-wave-bank-marginal-evidence", GROUP)
def _gravitational_waves(size: Size) -> Built:
    """This gives the evidence for templates of merging stars in long strain data, over all times and phases of arrival.

    Chirps are made in the frequency domain from masses; a smoothed periodogram whitens; an inverse transform gives the complex
    signal-to-noise ratio at each of more than fifty thousand times, whose likelihoods by a Bessel function are summed with a prior.
    """
    templates, samples, bands, best = pick(size, (60, 131072, 8, 5), (6, 65536, 8, 5), (2, 64, 2, 3))
    rate = 2048.0
    half_length = samples // 2
    frequency = np.maximum(np.arange(half_length) * rate / samples, rate / samples).astype(np.float32)
    middle = np.where(np.arange(half_length) % 2, -1.0, 1.0).astype(np.float32)  # the phases of half the time
    heard = ((frequency > 0.03 * rate) & (frequency < 0.4 * rate)).astype(np.float32)

    def chirp(mass, lean):
        v = jnp.cbrt(np.pi * 4.9e-6 * mass * frequency)
        phase = 3.0 / (128.0 * 0.24) * (v**-5 + (3715 / 756 + 55 / 9 * 0.24 + lean) * v**-3 - 16 * np.pi * v**-2)
        phase = jnp.mod(phase, 2.0 * np.pi)
        return heard * (frequency / 100.0) ** (-7.0 / 6.0) * lax.complex(jnp.cos(phase), -jnp.sin(phase))

    def smooth_power(spectrum):
        power = jnp.log(jnp.abs(spectrum) ** 2 + 1e-3)
        padded = jnp.pad(power, (17, 16), mode="edge")
        return jnp.exp(lax.reduce_window(padded, 0.0, lax.add, (34,), (1,), "VALID") / 34.0 + 0.5772)

    def evidence(strain, masses, leans, prior):
        spectrum = jnp.fft.rfft(strain * np.hanning(samples).astype(np.float32))[:half_length] * samples**-0.5
        power = smooth_power(spectrum)

        def one(mass, lean):
            template = chirp(30.0 + mass, lean)
            density = jnp.abs(template) ** 2 / power
            template = template * lax.rsqrt(jnp.sum(density))
            filtered = spectrum * jnp.conj(template) / power
            ratio = jnp.fft.ifft(jnp.pad(filtered, (0, samples - half_length))) * samples * 1.4
            size = jnp.abs(ratio)
            likely = jnp.log(jax.scipy.special.i0e(size)) + size - 0.5
            total = jax.scipy.special.logsumexp(likely + jax.nn.log_softmax(prior))
            loud, _ = lax.top_k(size, best)
            share = jnp.sum((density / jnp.sum(density)).reshape(bands, -1), axis=-1)
            pieces = jnp.abs(jnp.sum((filtered * middle).reshape(bands, -1), axis=-1)) ** 2
            return total, loud, share, jnp.sum(pieces), jnp.mean(jnp.exp(likely - jnp.max(likely)))

        total, *others = jax.vmap(one)(masses, leans)
        return jax.nn.softmax(total), total, others

    return Built(
        evidence, (normal(samples), normal(templates), normal(templates, scale=0.3), normal(samples, scale=0.5))
    )


@program("spoken-commands-byte-weights-separable-network", GROUP)
def _spoken_commands(size: Size) -> Built:
    """This gives words that a depthwise separable network hears in cepstra, with weights of bytes around a zero point.

    Every weight is a byte with a scale for each channel, as files of small devices hold it; channels are normalised by running
    moments first, rectified with a bound of six, and averaged in the end with an attention over time.
    """
    b, times, cepstra, c, words = pick(size, (500, 49, 10, 276, 35), (12, 49, 10, 92, 35), (2, 9, 5, 7, 3))
    dtype, blocks = half(size), 4

    def real(p):
        return (p["bytes"].astype(dtype) - 128.0) * p["scale"].astype(dtype)

    def bounded(x, p):
        return jnp.clip(x * p["gain"].astype(dtype) + p["shift"].astype(dtype), 0.0, 6.0)

    def convolve(x, w, strides, groups=1):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups)

    def recognise(p, features):
        mean = jnp.mean(features, axis=1, keepdims=True)
        deviation = jnp.std(features, axis=1, keepdims=True)
        x = ((features - mean) / (deviation + 1e-3)).astype(dtype)[..., None]
        x = bounded(convolve(x, real(p["stem"]), (2, 1)), p["stem"])
        for one in p["blocks"]:
            x = bounded(convolve(x, real(one["depth"]), (1, 1), groups=c), one["depth"])
            x = bounded(x @ real(one["point"]), one["point"])
        x = jnp.mean(x, axis=2)
        looks = jnp.einsum("btc,c->bt", x, p["look"].astype(dtype)).astype(jnp.float32)
        attention = jax.nn.softmax(looks, axis=1)
        pooled = jnp.einsum("bt,btc->bc", attention.astype(dtype), x)
        logits = (pooled @ real(p["head"])).astype(jnp.float32) + p["head"]["shift"]
        known, word = lax.top_k(jax.nn.softmax(logits, axis=-1), 3)
        return jax.nn.log_softmax(logits, axis=-1), known, word, attention

    def quantised(*shape, inputs):
        outputs, step = shape[-1], inputs**-0.5 / 74.0
        scale = normal(outputs, scale=0.1 * step, offset=step)
        shifts = {"gain": normal(outputs, scale=0.1, offset=1.0), "shift": normal(outputs, scale=0.2, offset=0.3)}
        return {"bytes": _uint8(*shape), "scale": scale, **shifts}

    block = {"depth": quantised(3, 3, 1, c, inputs=9), "point": quantised(c, c, inputs=c)}
    params = {
        "stem": quantised(10, 4, 1, c, inputs=40),
        "blocks": [block] * blocks,
        "look": normal(c, scale=c**-0.5),
        "head": quantised(c, words, inputs=c),
    }
    return Built(recognise, (params, normal(b, times, cepstra)))


@program("semi-global-stereo-census-scans", GROUP)
def _stereo(size: Size) -> Built:
    """This gives the disparities of pairs of images by semi-global matching, with costs of census transforms.

    Each pixel's neighbours that are darker give bits; costs count the bits that differ and are gathered along four directions by
    scans, with a small penalty for a step of one and a large one for jumps; a softmin gives parts of a pixel and a confidence.
    """
    pairs, rows, columns, most = pick(size, (8, 180, 242, 64), (1, 75, 124, 32), (2, 7, 9, 4))
    small, large = 3.0, 12.0

    def census(image):
        padded, code = jnp.pad(image, ((0, 0), (2, 2), (2, 2)), mode="edge"), jnp.zeros(image.shape, jnp.uint32)
        for i in range(25):
            if i != 12:
                neighbour = padded[:, i // 5 : i // 5 + rows, i % 5 : i % 5 + columns]
                code = (code << 1) | (neighbour < image).astype(jnp.uint32)
        return code

    def costs(left, right):
        shifts = np.arange(columns)[:, None] - np.arange(most)[None, :]
        matched = right[:, :, np.maximum(shifts, 0)]
        differing = lax.population_count(left[..., None] ^ matched).astype(jnp.float32)
        return jnp.where(shifts >= 0, differing, 24.0)

    def gather(cost, edges, reverse):
        def advance(before, inputs):
            cost, edge = inputs
            least = jnp.min(before, axis=-1, keepdims=True)
            sides = jnp.pad(before, ((0, 0), (0, 0), (1, 1)), constant_values=1e4)
            step = jnp.minimum(sides[..., :-2], sides[..., 2:]) + small
            jump = least + jnp.maximum(large / (1.0 + edge[..., None]), small + 1.0)
            path = cost + jnp.minimum(jnp.minimum(before, step), jump) - least
            return path, path

        return lax.scan(advance, jnp.zeros_like(cost[0]), (cost, edges), reverse=reverse)[1]

    def match(left, right):
        left = left.astype(jnp.float32)
        cost = costs(census(left), census(right.astype(jnp.float32)))
        total = jnp.zeros_like(cost)
        for axis in (1, 2):
            edges = jnp.abs(jnp.diff(left, axis=axis, prepend=lax.slice_in_dim(left, 0, 1, axis=axis))) / 64.0
            moved, moved_edges = jnp.moveaxis(cost, axis, 0), jnp.moveaxis(edges, axis, 0)
            for reverse in (False, True):
                total = total + jnp.moveaxis(gather(moved, moved_edges, reverse), 0, axis)
        total = 0.25 * total
        share = jax.nn.softmax(-0.5 * total, axis=-1)
        disparity = jnp.sum(share * np.arange(most, dtype=np.float32), axis=-1)
        nearest = lax.top_k(-total, 2)[0]
        window = jnp.stack(
            [jnp.pad(disparity, ((0, 0), (1, 1), (0, 0)), mode="edge")[:, i : i + rows] for i in range(3)]
        )
        return jnp.sort(window, axis=0)[1], nearest[..., 0] - nearest[..., 1], jnp.max(share, axis=-1)

    image = Random((pairs, rows, columns), jnp.dtype(jnp.uint8), below=256)
    return Built(match, (image, image))
