"""Losses with their gradients and whole training steps, the twenty-fifth set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import (
    attention,
    conv,
    dense,
    dense_of,
    kernel_of,
    layer_norm,
    norm_of,
)

GROUP = "twenty-fifth"


@program("pictures-packed-into-few-bits-by-spreads-told-aside-grad", GROUP)
def _packed(size: Size) -> Built:
    """This gives the gradients of a network that learns to pack pictures into few bits without losing much of them.

    It is the scale hyperprior (Ballé, 2018): channels divide each other (GDN), rounding is noise in training, and a second, smaller
    code tells the spread of each number of the first.
    """
    b, rows, columns, w, last = pick(size, (5, 192, 320, 96, 144), (1, 128, 192, 24, 36), (2, 64, 64, 3, 5))
    dtype, widths = half(size), (1, 3, 3, 1)

    def grown(x, kernel, stride=2):
        return lax.conv_transpose(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def divided(q, x, inverse=False):
        """This divides (or multiplies) each channel by the root of a positive mix of the squares of all."""
        y = x.astype(jnp.float32)
        power = jnp.square(y) @ jnp.square(q["mix"]) + jnp.square(q["floor"]) + 1e-6
        return (y * (jnp.sqrt(power) if inverse else lax.rsqrt(power))).astype(dtype)

    def below(p, x):
        """This is the log-odds that a number of a channel lies below x [channels, 1, count], by a small rising network."""
        for k, (matrix, bias, bend) in enumerate(p):
            x = jax.nn.softplus(matrix) @ x + bias
            if k + 1 < len(p):
                x = x + jnp.tanh(bend) * jnp.tanh(x)
        return x

    def bits_aside(p, z):
        x = jnp.moveaxis(z, -1, 0).reshape(w, 1, -1)
        low, high = below(p, x - 0.5), below(p, x + 0.5)
        sign = -lax.stop_gradient(jnp.sign(low + high))
        chance = jnp.abs(jax.nn.sigmoid(sign * high) - jax.nn.sigmoid(sign * low))
        return -jnp.sum(jnp.log2(jnp.maximum(chance, 1e-9)).reshape(w, b, -1), axis=(0, 2))

    def bits_main(y, spread):
        far = jnp.abs(y)
        chance = ndtr((0.5 - far) / spread) - ndtr((-0.5 - far) / spread)
        return -jnp.log2(jnp.maximum(chance, 1e-9))

    def loss(p, pictures, seed):
        one, two = jax.random.split(jax.random.key(seed))
        x = (pictures / 255.0).astype(dtype)
        y = x
        for k, q in enumerate(p["pack"]):
            y = conv(y, q["w"], 2) + q["b"]
            y = divided(q, y) if k < 3 else y
        z = jax.nn.relu(conv(jnp.abs(y), p["aside"][0]))
        z = conv(jax.nn.relu(conv(z, p["aside"][1], 2)), p["aside"][2], 2).astype(jnp.float32)
        z = z + jax.random.uniform(one, z.shape, minval=-0.5, maxval=0.5)
        spread = jax.nn.relu(grown(z.astype(dtype), p["tell"][0]))
        spread = conv(jax.nn.relu(grown(spread, p["tell"][1])), p["tell"][2])
        spread = jnp.maximum(jax.nn.softplus(spread.astype(jnp.float32)), 0.11)
        y = y.astype(jnp.float32) + jax.random.uniform(two, y.shape, minval=-0.5, maxval=0.5)
        bits = bits_main(y, spread)
        out = y.astype(dtype)
        for k, q in enumerate(p["unpack"]):
            out = grown(out, q["w"]) + q["b"]
            out = divided(q, out, inverse=True) if k < 3 else out
        wrong = jnp.mean(jnp.square(out.astype(jnp.float32) - x.astype(jnp.float32)), axis=(1, 2, 3))
        rate = (jnp.sum(bits, axis=(1, 2, 3)) + bits_aside(p["below"], z)) / (rows * columns)
        value = jnp.mean(rate) + 0.013 * 255**2 * jnp.mean(wrong)
        return value, (rate, -10 * jnp.log10(wrong + 1e-9), jnp.mean(bits, axis=-1))

    def level(i, o, divides=True):
        q = {"w": kernel_of(5, i, o, dtype), "b": normal(o, dtype=dtype, scale=0.02)}
        return q | ({"mix": normal(o, o, scale=0.1), "floor": normal(o, scale=0.05, offset=1.0)} if divides else {})

    p = {"pack": [level(3, w), level(w, w), level(w, w), level(w, last, False)]}
    p["unpack"] = [level(last, w), level(w, w), level(w, w), level(w, 3, False)]
    p["aside"] = [kernel_of(3, last, w, dtype), kernel_of(5, w, w, dtype), kernel_of(5, w, w, dtype)]
    p["tell"] = [kernel_of(5, w, w, dtype), kernel_of(5, w, w, dtype), kernel_of(3, w, last, dtype)]
    p["below"] = [
        (normal(w, o, i, scale=0.3), normal(w, o, 1, scale=0.3), normal(w, o, 1, scale=0.1))
        for i, o in itertools.pairwise(widths)
    ]
    grad = jax.value_and_grad(loss, has_aux=True)
    return Built(grad, (p, integers(b, rows, columns, 3, below=256), integers(below=1000)))


@program("round-trips-through-cities-drawn-from-every-start-reward-grad", GROUP)
def _round_trips(size: Size) -> Built:
    """This gives the gradients of a network that learns short round trips through cities by trying one from every city.

    It is POMO (Kwon, 2020): trips of one map are each other's yardstick, a trip is drawn city by city, and maps are also read
    turned over the diagonal.
    """
    b, cities, n, h, wide = pick(size, (64, 21, 128, 8, 512), (12, 21, 96, 8, 256), (2, 5, 8, 2, 12))
    starts, depth, maps = cities, 3, 2 * b

    def heads(x):
        return x.reshape(*x.shape[:-1], h, n // h)

    def over_cities(q, x):
        """This takes mean and spread of every feature over the cities of a map."""
        y = x - jnp.mean(x, axis=1, keepdims=True)
        return y * lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + 1e-5) * q["scale"] + q["shift"]

    def encoded(p, x):
        x = dense(p["enter"], x)
        for q in p["layers"]:
            y = attention(heads(x @ q["q"]), heads(x @ q["k"]), heads(x @ q["v"])).reshape(x.shape)
            x = over_cities(q["norm1"], x + dense(q["o"], y))
            x = over_cities(q["norm2"], x + dense(q["down"], jax.nn.relu(dense(q["up"], x))))
        return x

    def trips(p, x, seed):
        key, value = heads(x @ p["key"]), heads(x @ p["value"])
        first, latest = x @ p["first"], x @ p["latest"]
        begin = jnp.broadcast_to(jnp.arange(starts), (maps, starts))

        def step(carry, noise_key):
            now, seen = carry
            query = heads(first + jnp.take_along_axis(latest, now[..., None], axis=1))
            y = attention(query, key, value, ~seen[:, None]).reshape(maps, starts, n)
            like = jnp.einsum("msn,mcn->msc", dense(p["mix"], y), x) * n**-0.5
            logp = jax.nn.log_softmax(jnp.where(seen, -1e9, 10 * jnp.tanh(like)), axis=-1)
            drawn = jnp.argmax(lax.stop_gradient(logp) + jax.random.gumbel(noise_key, logp.shape), axis=-1)
            own = jnp.take_along_axis(logp, drawn[..., None], axis=-1)[..., 0]
            return (drawn, seen | jax.nn.one_hot(drawn, cities, dtype=bool)), (drawn, own)

        keys = jax.random.split(jax.random.key(seed), cities - 1)
        _, (drawn, own) = lax.scan(step, (begin, jax.nn.one_hot(begin, cities, dtype=bool)), keys)
        return jnp.concatenate([begin[None], drawn]), jnp.sum(own, axis=0)

    def loss(p, raw, seed):
        where = jax.nn.sigmoid(1.7 * raw)
        where = jnp.concatenate([where, where[..., ::-1]])
        trip, logp = trips(p, encoded(p, where), seed)
        visited = jnp.take_along_axis(where[None], trip[..., None], axis=2)
        leg = visited - jnp.roll(visited, 1, axis=0)
        length = jnp.sum(jnp.sqrt(jnp.sum(leg * leg, axis=-1) + 1e-9), axis=0)
        ahead = length - jnp.mean(length, axis=1, keepdims=True)
        best = jnp.minimum(*jnp.split(jnp.min(length, axis=1), 2))
        return jnp.mean(ahead * logp), (jnp.mean(length), best, jnp.mean(logp, axis=1))

    def layer():
        q = {k: weight(n, n) for k in "qkv"} | {"o": dense_of(n, n), "norm1": norm_of(n), "norm2": norm_of(n)}
        return q | {"up": dense_of(n, wide), "down": dense_of(wide, n)}

    p = {"enter": dense_of(2, n), "layers": [layer() for _ in range(depth)], "mix": dense_of(n, n)}
    p |= {k: weight(n, n) for k in ("key", "value", "first", "latest")}
    grad = jax.value_and_grad(loss, has_aux=True)
    return Built(grad, (p, normal(b, cities, 2), integers(below=1000)))


@program("one-layer-solved-until-it-rests-then-its-implicit-step", GROUP)
def _rests(size: Size) -> Built:
    """This trains a picture classifier of a single layer that is repeated until its output no longer changes.

    It is a deep equilibrium model (Bai, 2019): Anderson's steps find the resting point, the gradient solves a second resting
    point instead of going back through the steps, and Nesterov's momentum updates the weights.
    """
    b, side, w, inner, kept = pick(size, (32, 32, 48, 64, 4), (2, 32, 16, 24, 4), (2, 8, 4, 6, 4))
    groups, most, classes = pick(size, 8, 8, 2), 7, 10

    def group_norm(q, x):
        y = x.reshape(*x.shape[:3], groups, -1)
        y = y - jnp.mean(y, axis=(1, 2, 4), keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=(1, 2, 4), keepdims=True) + 1e-5)
        return y.reshape(x.shape) * q["scale"] + q["shift"]

    def cell(q, z, x):
        y = group_norm(q["norm1"], jax.nn.relu(conv(z, q["up"])))
        return group_norm(q["norm3"], jax.nn.relu(z + group_norm(q["norm2"], x + conv(y, q["down"]))))

    def resting(f, start):
        """This solves z = f(z) by mixing the latest tries so that their changes cancel best (Anderson, 1965)."""
        tries = jnp.zeros((b, kept, start[0].size)).at[:, 0].set(start.reshape(b, -1))
        after = jnp.zeros_like(tries).at[:, 0].set(f(start).reshape(b, -1))

        def going(carry):
            k, _, _, change = carry
            return (k < most) & (change > 1e-4)

        def step(carry):
            k, tries, after, _ = carry
            real = (jnp.arange(kept) < k).astype(jnp.float32)
            gap = (after - tries) * real[:, None]
            inside = jnp.einsum("bid,bjd->bij", gap, gap) / gap.shape[-1] + 1e-4 * jnp.eye(kept)
            upper = jnp.concatenate([jnp.zeros(1), real])
            system = jnp.zeros((b, kept + 1, kept + 1)).at[:, 1:, 1:].set(inside)
            system = system.at[:, 0].set(upper).at[:, :, 0].set(upper)
            goal = jnp.zeros((b, kept + 1, 1)).at[:, 0].set(1.0)
            share = jnp.linalg.solve(system, goal)[:, 1:, 0] * real
            fresh = jnp.einsum("bi,bid->bd", share, after)
            result = f(fresh.reshape(start.shape)).reshape(b, -1)
            change = jnp.linalg.norm(result - fresh) / (jnp.linalg.norm(result) + 1e-5)
            return k + 1, tries.at[:, k % kept].set(fresh), after.at[:, k % kept].set(result), change

        k, tries, after, change = lax.while_loop(going, step, (1, tries, after, jnp.float32(jnp.inf)))
        return after[:, (k - 1) % kept].reshape(start.shape), (k, change)

    @jax.custom_vjp
    def layer(q, x):
        return resting(lambda z: cell(q, z, x), jnp.zeros_like(x))

    def forward(q, x):
        z, told = layer(q, x)
        return (z, told), (q, x, z)

    def backward(saved, slopes):
        q, x, z = saved
        slope = slopes[0]
        _, pull = jax.vjp(lambda z: cell(q, z, x), z)
        whole, _ = resting(lambda u: pull(u)[0] + slope, slope)
        _, pull_rest = jax.vjp(lambda q, x: cell(q, z, x), q, x)
        return pull_rest(whole)

    layer.defvjp(forward, backward)

    def loss(p, pictures, labels):
        x = group_norm(p["norm1"], conv(pictures, p["enter"]))
        z, (k, change) = layer(p["cell"], x)
        z = group_norm(p["norm2"], z)
        z = jnp.mean(z.reshape(b, 4, side // 4, 4, side // 4, w), axis=(2, 4)).reshape(b, -1)
        logp = jax.nn.log_softmax(dense(p["leave"], z), axis=-1)
        own = jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0]
        right = jnp.mean((jnp.argmax(logp, axis=-1) == labels).astype(jnp.float32))
        return -jnp.mean(own), (right, k, change)

    def step(p, speed, pictures, labels):
        pictures = pictures / 127.5 - 1
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(p, pictures, labels)
        size_of = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g, v: g * jnp.minimum(1.0, 1 / (size_of + 1e-6)) + 5e-4 * v, grads, p)
        speed = jax.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
        p = jax.tree.map(lambda v, g, s: v - 0.01 * (g + 0.9 * s), p, grads, speed)
        return p, speed, value, extra, size_of, grads

    def tree(share=1.0):
        def one(*shape, scale=0.1):
            return normal(*shape, scale=share * scale)

        def norm(c):
            return {"scale": normal(c, scale=0.1 * share, offset=float(share == 1.0)), "shift": one(c)}

        q = {"up": one(3, 3, w, inner, scale=0.01), "down": one(3, 3, inner, w, scale=0.01)}
        q |= {"norm1": norm(inner), "norm2": norm(w), "norm3": norm(w)}
        p = {"cell": q, "enter": one(3, 3, 3, w, scale=0.2), "norm1": norm(w), "norm2": norm(w)}
        leave = {"w": one(16 * w, classes, scale=(16 * w) ** -0.5), "b": one(classes)}
        return p | {"leave": leave}

    inputs = (integers(b, side, side, 3, below=256), integers(b, below=classes))
    return Built(step, (tree(), tree(1e-3), *inputs))


@program("words-guessed-in-shuffled-orders-by-two-streams-grad", GROUP)
def _shuffled_orders(size: Size) -> Built:
    """This gives the gradients of a language model that guesses the words of a sentence in a random order.

    It is XLNet (Yang, 2019): one stream knows each word and its place, a second one only the place of the word to guess, and both
    share weights and sums of relative places; only the last words of each order are guessed.
    """
    b, t, goals, n, h, wide, words = pick(
        size, (6, 241, 41, 768, 12, 3072, 32003), (3, 101, 17, 132, 6, 512, 5003), (2, 9, 3, 8, 2, 12, 13)
    )
    dtype, d, depth = half(size), n // h, 3
    gaps = np.arange(t - 1, -t, -1, dtype=np.float32)
    angles = gaps[:, None] / 10000 ** (np.arange(n // 2) / (n // 2))
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    def heads(x):
        return x.reshape(*x.shape[:-1], h, d)

    def look(q, asks, seen, places, mask):
        """This attends from words at places [b, asks] to all words, by content and by distance."""
        query, key, value = heads(asks @ q["q"]), heads(seen @ q["k"]), heads(seen @ q["v"])
        far = heads(jnp.asarray(waves, dtype) @ q["r"])
        content = jnp.einsum("bqhd,bkhd->bhqk", query + q["by_word"], key, preferred_element_type=jnp.float32)
        distance = jnp.einsum("bqhd,rhd->bhqr", query + q["by_place"], far, preferred_element_type=jnp.float32)
        at = t - 1 - places[:, :, None] + jnp.arange(t)
        distance = jnp.take_along_axis(distance, at[:, None], axis=-1)
        scores = jnp.where(mask[:, None], (content + distance) * d**-0.5, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(dtype), value)
        return layer_norm(q["norm1"], asks + y.reshape(asks.shape) @ q["o"])

    def feed(q, x):
        return layer_norm(q["norm2"], x + dense(q["down"], jax.nn.gelu(dense(q["up"], x))))

    def loss(p, text, noise):
        order = jnp.argsort(noise, axis=-1)
        rank = jnp.argsort(order, axis=-1)
        aims = order[:, t - goals :]
        places = jnp.broadcast_to(jnp.arange(t), (b, t))
        own_rank = jnp.take_along_axis(rank, aims, axis=1)
        know = rank[:, None] <= rank[:, :, None]
        guess = rank[:, None] < own_rank[:, :, None]
        x = p["table"][text]
        y = jnp.broadcast_to(p["unknown"], (b, goals, n))
        for q in p["layers"]:
            y = feed(q, look(q, y, x, aims, guess))
            x = feed(q, look(q, x, x, places, know))
        logits = (y @ p["table"].T).astype(jnp.float32) + p["bias"]
        aim = jnp.take_along_axis(text, aims, axis=1)
        own = jnp.take_along_axis(logits, aim[..., None], axis=-1)[..., 0]
        logp = own - jax.nn.logsumexp(logits, axis=-1)
        return -jnp.mean(logp), (logp, jnp.mean((jnp.argmax(logits, axis=-1) == aim).astype(jnp.float32)))

    def layer():
        q = {k: weight(n, n, dtype=dtype) for k in "qkvro"}
        q |= {k: normal(h, d, dtype=dtype, scale=0.1) for k in ("by_word", "by_place")}
        q |= {"norm1": norm_of(n, dtype), "norm2": norm_of(n, dtype)}
        return q | {"up": dense_of(n, wide, dtype), "down": dense_of(wide, n, dtype)}

    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "unknown": normal(n, dtype=dtype, scale=0.1)}
    p |= {"layers": [layer() for _ in range(depth)], "bias": normal(words, scale=0.1)}
    grad = jax.value_and_grad(loss, has_aux=True)
    return Built(grad, (p, integers(b, t, below=words), normal(b, t)))
