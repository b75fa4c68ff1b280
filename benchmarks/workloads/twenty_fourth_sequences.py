"""Programs that read speech, words and DNA, the twenty-fourth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import gammaln

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fourth_parts import root_normed

GROUP = "twenty-fourth"


@program("one-set-of-speech-weights-read-thrice-at-four-frame-rates", GROUP)
def _rates(size: Size) -> Built:
    """This hears letters in speech by stacks at other frame rates, whose attention is read thrice, as Zipformer (Yao, 2023)."""
    b, t, mel, n, h, d, pieces = pick(
        size, (4, 1500, 80, 256, 4, 32, 500), (1, 237, 80, 96, 4, 16, 211), (2, 21, 6, 8, 2, 4, 7)
    )
    dtype, reach, rates = half(size), pick(size, 31, 15, 3), (1, 2, 4, 2)

    def swoosh(x, far=1.0):
        return jnp.logaddexp(x - far, jnp.zeros_like(x)) - 0.08 * x - (0.313261687 if far == 1.0 else 0.035)

    def bias_normed(q, x):
        y = x.astype(jnp.float32)
        power = jnp.mean((y - q["bias"]) ** 2, axis=-1, keepdims=True)
        return (y * lax.rsqrt(power + 1e-6) * jnp.exp(q["log"])).astype(x.dtype)

    def weights(q, x, alive):
        length = x.shape[1]
        query, key, place = jnp.split(x @ q["qkp"], [h * d, 2 * h * d], axis=-1)
        query, key = (z.reshape(b, length, h, d) for z in (query, key))
        place = place.reshape(b, length, h, 4)
        gap = jnp.arange(-(length - 1), length, dtype=jnp.float32)
        squeezed = jnp.arctan(gap / 16.0)[:, None] * jnp.arange(1, 25)
        waves = jnp.concatenate([jnp.cos(squeezed), jnp.sin(squeezed)], axis=-1).astype(dtype)
        far = (waves @ q["far"]).reshape(2 * length - 1, h, 4)
        near = jnp.einsum("bqhp,rhp->bhqr", place, far)
        near = jnp.pad(near, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(b, h, -1)[..., : length * (2 * length - 1)]
        near = near.reshape(b, h, length, 2 * length - 1)[..., length - 1 :]
        scores = (jnp.einsum("bqhd,bkhd->bhqk", query, key) * d**-0.5 + near).astype(jnp.float32)
        return jax.nn.softmax(jnp.where(alive[:, None, None], scores, -1e9), axis=-1).astype(dtype)

    def read(q, x, probs):
        value = (x @ q["value"]).reshape(b, x.shape[1], h, -1)
        return jnp.einsum("bhqk,bkhv->bqhv", probs, value).reshape(b, x.shape[1], -1) @ q["out"]

    def feed(q, x):
        return swoosh(x @ q["up"], 4.0) @ q["down"]

    def gated(q, x, probs):
        s, y, z = jnp.split(x @ q["in"], 3, axis=-1)
        return (jnp.einsum("bqk,bkc->bqc", probs[:, 0], y * jnp.tanh(s)) * z) @ q["leave"]

    def local(q, x, alive):
        y, gate = jnp.split(x @ q["in"], 2, axis=-1)
        y = jnp.where(alive[..., None], y * jax.nn.sigmoid(gate), 0)
        names = ("NWC", "WIO", "NWC")
        y = lax.conv_general_dilated(y, q["taps"], (1,), "SAME", dimension_numbers=names, feature_group_count=n)
        return swoosh(y) @ q["leave"]

    def layer(q, x, alive):
        start, probs = x, weights(q["weigh"], x, alive)
        x = x + feed(q["feeds"][0], x)
        x = x + gated(q["gated"], x, probs)
        x = x + read(q["reads"][0], x, probs)
        x = x + local(q["locals"][0], x, alive)
        x = x + feed(q["feeds"][1], x)
        x = start + (x - start) * q["bypass"][0]
        x = x + read(q["reads"][1], x, probs)
        x = x + local(q["locals"][1], x, alive)
        x = x + feed(q["feeds"][2], x)
        return start + (bias_normed(q["norm"], x) - start) * q["bypass"][1]

    def slowed(x, rate, shares):
        long = -(-x.shape[1] // rate) * rate
        x = jnp.pad(x, ((0, 0), (0, long - x.shape[1]), (0, 0)), mode="edge").reshape(b, -1, rate, x.shape[-1])
        return jnp.einsum("btrn,r->btn", x, jax.nn.softmax(shares).astype(x.dtype))

    def model(p, frames, cut):
        alive = jnp.arange(t) < (t - cut)[:, None]
        x = swoosh(frames.astype(dtype) @ p["enter"])
        x = bias_normed(p["norm"], x)
        powers = []
        for rate, q in zip(rates, p["stacks"], strict=True):
            y = x if rate == 1 else slowed(x, rate, q["shares"])
            y = layer(q["layer"], y, alive[:, ::rate])
            if rate > 1:
                y = jnp.repeat(y, rate, axis=1)[:, :t]
            x = x + (y - x) * q["mix"]
            powers.append(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1))
        x = slowed(x, 2, p["shares"])
        logp = jax.nn.log_softmax((x @ p["pieces"]).astype(jnp.float32), axis=-1)
        real = alive[:, ::2]
        best = jnp.where(real, jnp.max(logp[..., 1:], axis=-1), 0)
        return logp, jnp.sum(best, axis=1) / jnp.sum(real, axis=1), jnp.exp(logp[..., 0]), jnp.stack(powers)

    def norm():
        return {"bias": normal(n, scale=0.1), "log": normal(scale=0.1)}

    def made():
        q = {
            "weigh": {"qkp": weight(n, 2 * h * d + 4 * h, dtype=dtype), "far": weight(48, 4 * h, dtype=dtype)},
            "norm": norm(),
        }
        feeds = (
            {"up": weight(n, int(n * m), dtype=dtype), "down": weight(int(n * m), n, dtype=dtype)}
            for m in (1.5, 2, 2.5)
        )
        q["feeds"] = list(feeds)
        q["gated"] = {"in": weight(n, 3 * (3 * n // 4), dtype=dtype), "leave": weight(3 * n // 4, n, dtype=dtype)}
        q["reads"] = [
            {"value": weight(n, h * 12, dtype=dtype), "out": weight(h * 12, n, dtype=dtype)} for _ in range(2)
        ]
        taps = normal(reach, 1, n, dtype=dtype, scale=reach**-0.5)
        q["locals"] = [
            {"in": weight(n, 2 * n, dtype=dtype), "taps": taps, "leave": weight(n, n, dtype=dtype)} for _ in range(2)
        ]
        return q | {"bypass": normal(2, n, dtype=dtype, scale=0.1, offset=0.5)}

    p = {
        "enter": weight(mel, n, dtype=dtype),
        "norm": norm(),
        "shares": normal(2),
        "pieces": weight(n, pieces, dtype=dtype),
    }
    p["stacks"] = [
        {"layer": made(), "shares": normal(r), "mix": normal(n, dtype=dtype, scale=0.1, offset=0.5)} for r in rates
    ]
    return Built(model, (p, normal(b, t, mel), integers(b, below=t // 3)))


@program("gated-words-kept-in-states-of-doubling-spans-prefill", GROUP)
def _spans(size: Size) -> Built:
    """This reads words into states whose spans double with age, each weighed by the asking word (log-linear attention, 2025)."""
    b, chunks, c, n, h, s, d, words = pick(
        size, (2, 13, 64, 1024, 16, 64, 64, 32003), (1, 7, 16, 128, 4, 16, 32, 2003), (2, 3, 4, 8, 2, 3, 4, 11)
    )
    dtype, t, layers = half(size), chunks * c, 4
    inside, above = int(np.log2(c)) + 1, int(np.ceil(np.log2(chunks)))

    def level_of(count):
        i, j = np.indices((count, count))
        return np.where(i >= j, [[int(x ^ y).bit_length() for y in range(count)] for x in range(count)], -1)

    within, between = level_of(c), level_of(chunks)
    near = np.stack([within == k for k in range(inside)])
    far = np.stack([between == k for k in range(1, above + 1)]).astype(np.float32)

    def mixed(q, x):
        taken = root_normed(x, q["norm"]) @ q["in"]
        value, query, key, gate, raw = jnp.split(taken, np.cumsum([h * d, h * s, h * s, h * d]).tolist(), axis=-1)
        padded = jnp.pad(jnp.concatenate([value, query, key], axis=-1), ((0, 0), (3, 0), (0, 0)))
        local = jax.nn.silu(sum(padded[:, i : i + t] * q["taps"][i] for i in range(4)))
        value, query, key = jnp.split(local, [h * d, h * d + h * s], axis=-1)
        value = value.reshape(b, chunks, c, h, d)
        query, key = (z.reshape(b, chunks, c, h, s) for z in (query, key))
        raw = raw.astype(jnp.float32).reshape(b, chunks, c, h, -1)
        step = jax.nn.softplus(raw[..., 0] + q["shift"])
        weigh = jax.nn.softplus(raw[..., 1:])
        log = jnp.cumsum(-step * jnp.exp(q["rate"]), axis=2)
        put = (value.astype(jnp.float32) * step[..., None]).astype(dtype)
        gaps = jnp.moveaxis(log, 3, 2)
        keep = jnp.exp(jnp.minimum(gaps[..., :, None] - gaps[..., None, :], 0.0))
        levels = jnp.einsum("bzihk,kij->bzhij", weigh[..., :inside], near.astype(np.float32))
        scores = jnp.einsum("bzihs,bzjhs->bzhij", query, key, preferred_element_type=jnp.float32) * s**-0.5
        y = jnp.einsum("bzhij,bzjhd->bzihd", (scores * keep * levels).astype(dtype), put).astype(jnp.float32)
        rest = jnp.exp(log[:, :, -1:] - log)
        state = jnp.einsum("bzjhs,bzjhd->bzhsd", key * rest[..., None].astype(dtype), put).astype(jnp.float32)
        ends = jnp.cumsum(log[:, :, -1], axis=1)
        lag = (ends - log[:, :, -1])[:, :, None] - ends[:, None]
        old = jnp.exp(jnp.minimum(lag, 0.0))
        states = jnp.einsum("kij,bijh,bjhsd->bkihsd", far, old, state)
        ask = query.astype(jnp.float32) * jnp.exp(log)[..., None] * s**-0.5
        y = y + jnp.einsum("bzihs,bzihk,bkzhsd->bzihd", ask, weigh[..., inside:], states)
        y = (y + value.astype(jnp.float32) * q["skip"][:, None]).astype(dtype).reshape(b, t, h * d)
        return root_normed(y * jax.nn.silu(gate), q["norm2"]) @ q["out"], states[:, :, -1]

    def model(p, text):
        x = p["table"][text]
        kept = []
        for q in p["layers"]:
            y, state = mixed(q, x)
            x = x + y
            gate, up = jnp.split(root_normed(x, q["norm3"]) @ q["up"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ q["down"]
            kept.append(jnp.sqrt(jnp.mean(state**2, axis=(-1, -2))))
        last = root_normed(x[:, -1], p["norm"])
        return jax.nn.log_softmax((last @ p["head"]).astype(jnp.float32), axis=-1), x, jnp.stack(kept)

    m, width = 2 * n, 2 * h * d + 2 * h * s + h * (1 + inside + above)
    p = {"table": normal(words, n, dtype=dtype), "head": weight(n, words, dtype=dtype), "norm": gain(n, dtype)}
    p["layers"] = [
        {
            "norm": gain(n, dtype),
            "norm2": gain(h * d, dtype),
            "norm3": gain(n, dtype),
            "in": weight(n, width, dtype=dtype),
        }
        | {"taps": normal(4, h * (d + 2 * s), dtype=dtype, scale=0.5), "out": weight(h * d, n, dtype=dtype)}
        | {"shift": normal(h, offset=-2.0), "rate": normal(h, scale=0.5, offset=-1.0), "skip": normal(h)}
        | {"up": weight(n, 2 * m, dtype=dtype), "down": weight(m, n, dtype=dtype)}
        for _ in range(layers)
    ]
    return Built(model, (p, integers(b, t, below=words)))


@program("shapes-and-counts-of-proteins-bound-along-dna-both-strands-grad", GROUP)
def _bound(size: Size) -> Built:
    """This gives gradients of where and how much proteins bind along DNA, by filters that reach ever farther (BPNet, 2021).

    Shapes are chances over places, counts are sums in logs; both strands are read and their mean is counted, beside a control.
    """
    b, t, n, tasks, layers = pick(size, (32, 2114, 64, 3, 8), (3, 1514, 24, 3, 8), (2, 1130, 4, 2, 8))
    dtype, first, last = half(size), 21, 75
    reach = t - (first - 1) - 2 * sum(2**k for k in range(1, layers + 1))
    out = reach - (last - 1)

    def conv(x, taps, far=1):
        return lax.conv_general_dilated(
            x, taps, (1,), "VALID", rhs_dilation=(far,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    def net(p, letters, control):
        x = jax.nn.relu(conv(letters, p["first"]) + p["bias"])
        for k, q in enumerate(p["layers"]):
            y = jax.nn.relu(conv(x, q["taps"], 2 ** (k + 1)) + q["bias"])
            cut = 2 ** (k + 1)
            x = x[:, cut:-cut] + y
        shape = conv(x, p["last"]).reshape(b, out, tasks, 2).astype(jnp.float32)
        shape = shape + control[..., None, :] * p["beside"]
        total = jnp.log1p(jnp.sum(jax.nn.relu(control), axis=(1, 2)))
        many = jnp.mean(x.astype(jnp.float32), axis=1) @ p["many"] + total[:, None] * p["more"]
        return shape, many.reshape(b, tasks, 2)

    def loss(p, bases, control, counts):
        letters = jax.nn.one_hot(bases, 4, dtype=dtype)
        one, many = net(p, letters, control)
        two, more = net(p, letters[:, ::-1, ::-1], control[:, ::-1, ::-1])
        shape, many = 0.5 * (one + two[:, ::-1, :, ::-1]), 0.5 * (many + more[..., ::-1])
        logp = jax.nn.log_softmax(shape, axis=1)
        counts = jax.nn.relu(counts - 4).astype(jnp.float32)
        total = jnp.sum(counts, axis=1)
        ways = gammaln(total + 1) - jnp.sum(gammaln(counts + 1), axis=1)
        fit = -(ways + jnp.sum(counts * logp, axis=1))
        wrong = (many - jnp.log1p(total)) ** 2
        scale = jnp.mean(total) / 10
        right = jnp.sum(jnp.sqrt(jnp.exp(logp) * counts / jnp.maximum(total, 1.0)[:, None]), axis=1)
        return jnp.mean(fit) / out + scale * jnp.mean(wrong) / out, (fit, wrong, right, jnp.exp(logp))

    def taps(k, i, o):
        return normal(k, i, o, dtype=dtype, scale=(k * i) ** -0.5)

    p = {"first": taps(first, 4, n), "bias": normal(n, dtype=dtype, scale=0.1), "last": taps(last, n, 2 * tasks)}
    p["layers"] = [{"taps": taps(3, n, n), "bias": normal(n, dtype=dtype, scale=0.1)} for _ in range(layers)]
    p |= {"beside": normal(tasks, 2, scale=0.1), "many": weight(n, 2 * tasks), "more": normal(2 * tasks, scale=0.1)}
    inputs = (integers(b, t, below=4), normal(b, out, 2), integers(b, out, tasks, 2, below=9))
    return Built(jax.value_and_grad(loss, has_aux=True), (p, *inputs))
