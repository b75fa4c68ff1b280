"""Language models as public repositories have them, the fourteenth set: its author had seen no plan and no compiler."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight

GROUP = "fourteenth"


@program("command-r-parallel-int8-rows-decode", GROUP)
def _command(size: Size) -> Built:
    """This gives one decoding step of layers like Command R's, whose weights are bytes with a scale per output.

    Attention and the gated layer read the same norm without bias and are added together; the logits come from the embedding table
    and are multiplied by a constant.
    """
    layers, b, s, n, h, groups, d, wide, words = pick(
        size,
        (3, 5, 2100, 2048, 32, 8, 64, 5632, 64000),
        (3, 3, 300, 384, 12, 4, 32, 1000, 5003),
        (3, 2, 9, 8, 4, 2, 4, 12, 13),
    )
    dtype = half(size)

    def norm(x, scale):
        y = x.astype(jnp.float32)
        mean = jnp.mean(y, axis=-1, keepdims=True)
        var = jnp.mean(jnp.square(y - mean), axis=-1, keepdims=True)
        return ((y - mean) * lax.rsqrt(var + 1e-5) * scale.astype(jnp.float32)).astype(dtype)

    def product(x, p):
        return (x @ p["bytes"].astype(dtype)) * p["scale"].astype(dtype)

    def rotate(x, positions):
        angles = positions[:, None] / 8000000.0 ** (jnp.arange(0, d, 2) / d)
        cos, sin = (jnp.repeat(f(angles), 2, axis=-1)[:, None] for f in (jnp.cos, jnp.sin))
        y = x.astype(jnp.float32)
        turned = jnp.stack([-y[..., 1::2], y[..., ::2]], axis=-1).reshape(y.shape)
        return (y * cos + turned * sin).astype(dtype)

    def step(params, caches, tokens, lengths):
        x = jnp.take(params["embed"], tokens, axis=0)
        rows = jnp.arange(b)
        seen = jnp.arange(s)[None, :] <= lengths[:, None]
        new = []
        for p, cache in zip(params["layers"], caches, strict=True):
            y = norm(x, p["norm"])
            q = rotate(product(y, p["q"]).reshape(b, h, d), lengths).reshape(b, groups, h // groups, d)
            k = rotate(product(y, p["k"]).reshape(b, groups, d), lengths)
            v = product(y, p["v"]).reshape(b, groups, d)
            keys, values = cache["k"].at[rows, :, lengths].set(k), cache["v"].at[rows, :, lengths].set(v)
            scores = jnp.einsum("bgrd,bgsd->bgrs", q, keys, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9), axis=-1).astype(dtype)
            out = product(jnp.einsum("bgrs,bgsd->bgrd", probs, values).reshape(b, h * d), p["o"])
            x = x + out + product(jax.nn.silu(product(y, p["gate"])) * product(y, p["up"]), p["down"])
            new.append({"k": keys, "v": values})
        logits = 0.0625 * jnp.einsum("bn,wn->bw", norm(x, params["norm"]), params["embed"]).astype(jnp.float32)
        return logits, jnp.argmax(logits, axis=-1), new

    def bytes_of(i, o):
        return {
            "bytes": Random((i, o), jnp.dtype(jnp.int8), below=255),
            "scale": normal(o, scale=1e-5, offset=0.013 * i**-0.5),
        }

    shapes = {"q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d), "o": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    every = [
        {name: bytes_of(*shape) for name, shape in shapes.items()} | {"norm": gain(n, dtype)} for _ in range(layers)
    ]
    caches = [{name: normal(b, groups, s, d, dtype=dtype) for name in ("k", "v")} for _ in range(layers)]
    params = {"layers": every, "embed": normal(words, n, dtype=dtype, scale=0.5), "norm": gain(n, dtype)}
    return Built(step, (params, caches, integers(b, below=words), integers(b, below=s)))


@program("glm4-sandwich-norms-half-rotary-prefill-nnx", GROUP)
def _glm(size: Size) -> Built:
    """This gives the features of padded prompts by layers like GLM-4's, with a norm on both sides of every branch."""
    from flax import nnx

    b, t, n, h, groups, d, wide, layers = pick(
        size, (2, 777, 1536, 24, 2, 64, 4096, 2), (2, 93, 256, 8, 2, 32, 688, 2), (2, 7, 16, 4, 2, 8, 20, 2)
    )
    dtype, turned = half(size), d // 2
    kinds = {"dtype": dtype, "param_dtype": dtype}

    def rotate(x, cos, sin):
        y, kept = x[..., :turned].astype(jnp.float32), x[..., turned:]
        y = y.reshape(*y.shape[:-1], turned // 2, 2)
        even, odd = y[..., 0], y[..., 1]
        pairs = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
        return jnp.concatenate([pairs.reshape(*x.shape[:-1], turned).astype(x.dtype), kept], axis=-1)

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norms = nnx.List([nnx.RMSNorm(n, epsilon=1e-5, rngs=rngs, **kinds) for _ in range(4)])
            self.qkv = nnx.Linear(n, (h + 2 * groups) * d, rngs=rngs, **kinds)
            self.out = nnx.Linear(h * d, n, use_bias=False, rngs=rngs, **kinds)
            self.up = nnx.Linear(n, 2 * wide, use_bias=False, rngs=rngs, **kinds)
            self.down = nnx.Linear(wide, n, use_bias=False, rngs=rngs, **kinds)

        def attend(self, x, cos, sin, mask):
            q, k, v = jnp.split(self.qkv(x), [h * d, (h + groups) * d], axis=-1)
            q = rotate(q.reshape(b, t, h, d), cos, sin)
            k, v = rotate(k.reshape(b, t, groups, d), cos, sin), v.reshape(b, t, groups, d)
            return self.out(jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(b, t, h * d))

        def __call__(self, x, cos, sin, mask):
            x = x + self.norms[1](self.attend(self.norms[0](x), cos, sin, mask))
            gate, up = jnp.split(self.up(self.norms[2](x)), 2, axis=-1)
            return x + self.norms[3](self.down(nnx.silu(gate) * up))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
            self.norm = nnx.RMSNorm(n, epsilon=1e-5, rngs=rngs, **kinds)

        def __call__(self, x, valid):
            places = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
            angles = places[..., None] * 10000.0 ** -(jnp.arange(0, turned, 2) / turned)
            cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
            mask = nnx.combine_masks(nnx.make_causal_mask(valid), valid[:, None, None, :]).astype(bool)
            mask = mask | jnp.eye(t, dtype=bool)
            for layer in self.layers:
                x = layer(x, cos, sin, mask)
            return self.norm(x) * valid[..., None].astype(dtype)

    graph, state = nnx.split(nnx.eval_shape(lambda: Stack(nnx.Rngs(0))))

    def prefill(state, x, padding):
        return nnx.merge(graph, state)(x, jnp.arange(t)[None] >= padding[:, None])

    return Built(prefill, (module_weights(state, dtype), normal(b, t, n, dtype=dtype), integers(b, below=t // 2)))


@program("reformer-hashed-buckets-sorted-chunks", GROUP)
def _reformer(size: Size) -> Built:
    """This gives the attention of Reformer: tokens of like hashes are sorted into chunks that see themselves and the one before."""
    b, h, t, d, rounds, buckets, chunk = pick(
        size, (2, 8, 4032, 64, 4, 64, 63), (2, 4, 960, 32, 2, 32, 30), (2, 2, 12, 4, 2, 4, 3)
    )
    dtype, chunks = half(size), t // chunk

    def one_round(qk, v, rotation):
        turned = jnp.einsum("td,dr->tr", qk.astype(jnp.float32), rotation)
        hashes = jnp.argmax(jnp.concatenate([turned, -turned], axis=-1), axis=-1)
        order = jnp.argsort(hashes * t + jnp.arange(t))
        back = jnp.argsort(order)
        q = qk[order].reshape(chunks, chunk, d)
        values, bucket = v[order].reshape(chunks, chunk, d), hashes[order].reshape(chunks, chunk)
        places = order.reshape(chunks, chunk)
        k = q.astype(jnp.float32)
        k = (k * lax.rsqrt(jnp.mean(k**2, axis=-1, keepdims=True) + 1e-6)).astype(dtype)

        def with_last(x):
            return jnp.concatenate([jnp.roll(x, 1, axis=0), x], axis=1)

        k, values, bucket_k, places_k = (with_last(x) for x in (k, values, bucket, places))
        dots = jnp.einsum("cqd,ckd->cqk", q, k).astype(jnp.float32) * d**-0.5
        dots = jnp.where(places[:, :, None] < places_k[:, None, :], -1e9, dots)
        dots = jnp.where(bucket[:, :, None] != bucket_k[:, None, :], -1e7, dots)
        dots = jnp.where(places[:, :, None] == places_k[:, None, :], -1e5, dots)
        total = jax.nn.logsumexp(dots, axis=-1, keepdims=True)
        out = jnp.einsum("cqk,ckd->cqd", jnp.exp(dots - total).astype(dtype), values)
        return out.reshape(t, d)[back], total.reshape(t)[back]

    def attention(x, wqk, wv, wo, rotations):
        qk = (x @ wqk).reshape(b, t, h, d).swapaxes(1, 2)
        v = (x @ wv).reshape(b, t, h, d).swapaxes(1, 2)
        over = jax.vmap(one_round, in_axes=(None, None, 0))
        outs, totals = jax.vmap(jax.vmap(over, in_axes=(0, 0, None)), in_axes=(0, 0, None))(qk, v, rotations)
        shares = jnp.exp(totals - jax.nn.logsumexp(totals, axis=2, keepdims=True))
        mixed = jnp.sum(outs * shares[..., None].astype(dtype), axis=2)
        return mixed.swapaxes(1, 2).reshape(b, t, h * d) @ wo

    n = h * d
    weights = [weight(n, n, dtype=dtype) for _ in range(3)]
    return Built(attention, (normal(b, t, n, dtype=dtype), *weights, normal(rounds, d, buckets // 2)))


@program("fnet-fourier-mixing-masked-words-grad-linen", GROUP)
def _fnet(size: Size) -> Built:
    """This gives the loss and gradient of masked words by a network like FNet, which mixes tokens by a Fourier transform."""
    import flax.linen as nn

    b, t, hidden, n, layers, words = pick(
        size, (8, 384, 58, 768, 2, 32000), (2, 96, 15, 160, 2, 4001), (2, 6, 2, 8, 2, 11)
    )
    dtype = half(size)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            mixed = jnp.fft.fft2(x.astype(jnp.float32), axes=(-2, -1)).real.astype(dtype) * (t * n) ** -0.5
            x = nn.LayerNorm(epsilon=1e-12, dtype=dtype)(x + mixed)
            y = nn.Dense(4 * n, dtype=dtype)(x)
            y = nn.Dense(n, dtype=dtype)(nn.gelu(y))
            return nn.LayerNorm(epsilon=1e-12, dtype=dtype)(x + y)

    class Words(nn.Module):
        @nn.compact
        def __call__(self, tokens, kinds, places):
            embed = nn.Embed(words, n, dtype=dtype)
            x = embed(tokens) + nn.Embed(2, n, dtype=dtype)(kinds)
            x = x + self.param("places", nn.initializers.normal(0.02), (t, n)).astype(dtype)
            x = nn.Dense(n, dtype=dtype)(nn.LayerNorm(epsilon=1e-12, dtype=dtype)(x))
            for _ in range(layers):
                x = Block()(x)
            chosen = jnp.take_along_axis(x, places[..., None], axis=1)
            chosen = nn.LayerNorm(epsilon=1e-12, dtype=dtype)(nn.gelu(nn.Dense(n, dtype=dtype)(chosen)))
            logits = embed.attend(chosen) + self.param("bias", nn.initializers.zeros, (words,)).astype(dtype)
            return nn.log_softmax(logits.astype(jnp.float32))

    module = Words()

    def loss(p, tokens, kinds, places, labels, shares):
        log_probs = module.apply(p, tokens, kinds, places)
        picked = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        weights = jax.nn.sigmoid(shares)
        hits = jnp.sum(weights * (jnp.argmax(log_probs, axis=-1) == labels))
        return -jnp.sum(weights * picked) / (jnp.sum(weights) + 1e-5), hits

    inputs = (integers(b, t, below=words), integers(b, t, below=2), integers(b, hidden, below=t))
    structs = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs), *(r.struct for r in inputs))
    rest = (integers(b, hidden, below=words), normal(b, hidden))
    return Built(jax.value_and_grad(loss, has_aux=True), (module_weights(structs, jnp.float32), *inputs, *rest))


@program("charformer-soft-subwords-of-bytes-haiku", GROUP)
def _charformer(size: Size) -> Built:
    """This gives the features of byte strings by Charformer: blocks of several lengths are pooled, weighted and shortened."""
    import haiku as hk

    b, t, n, h, largest, shorter, wide = pick(
        size, (8, 1020, 512, 8, 4, 2, 1365), (4, 228, 128, 4, 4, 2, 341), (2, 12, 8, 2, 3, 2, 10)
    )
    d = n // h

    def norm(x):
        return hk.RMSNorm(axis=-1, eps=1e-6)(x)

    def subwords(x):
        x = hk.DepthwiseConv1D(1, 5, padding="SAME")(x)
        x = hk.Linear(n)(x)
        candidates = []
        for length in range(1, largest + 1):
            missing = -t % length
            padded = jnp.pad(x, ((0, 0), (0, missing), (0, 0)))
            pooled = jnp.mean(padded.reshape(b, -1, length, n), axis=2)
            candidates.append(jnp.repeat(pooled, length, axis=1)[:, :t])
        stack = jnp.stack(candidates, axis=2)
        shares = jax.nn.softmax(hk.Linear(1, with_bias=False)(stack)[..., 0], axis=-1)
        calibrated = jax.nn.softmax(jnp.einsum("btk,bsk->bts", shares, shares), axis=-1) @ shares
        mixed = jnp.einsum("btkn,btk->btn", stack, calibrated)
        return jnp.mean(mixed.reshape(b, t // shorter, shorter, n), axis=2)

    def layer(x, valid):
        y = norm(x)
        q, k, v = (hk.Linear(n, with_bias=False)(y).reshape(b, -1, h, d) for _ in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = jnp.where(valid[:, None, None], scores * d**-0.5, -1e10)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v).reshape(b, -1, n)
        x = x + hk.Linear(n, with_bias=False)(out)
        y = norm(x)
        gated = jax.nn.gelu(hk.Linear(wide, with_bias=False)(y)) * hk.Linear(wide, with_bias=False)(y)
        return x + hk.Linear(n, with_bias=False)(gated)

    def model(text, lengths):
        x = hk.Embed(256, n)(text) * jnp.sqrt(n)
        valid = jnp.arange(t)[None] <= lengths[:, None]
        x = subwords(jnp.where(valid[..., None], x, 0.0))
        valid = jnp.any(valid.reshape(b, -1, shorter), axis=-1)
        x = layer(layer(x, valid), valid)
        kept = valid[..., None].astype(x.dtype)
        return norm(x) * kept, jnp.sum(x * kept, axis=1) / jnp.sum(kept, axis=1)

    inputs = (integers(b, t, below=256), integers(b, below=t))
    pure = hk.without_apply_rng(hk.transform(model))
    structs = jax.eval_shape(lambda *xs: pure.init(jax.random.key(0), *xs), *(r.struct for r in inputs))
    return Built(pure.apply, (module_weights(structs, jnp.float32), *inputs))


@program("bitnet-ternary-weights-byte-rows-layer-grad", GROUP)
def _bitnet(size: Size) -> Built:
    """This gives the loss and gradient of a layer like BitNet's, whose weights are rounded to three values and inputs to bytes."""
    b, t, n, h, groups, d, wide, words = pick(
        size, (4, 500, 1024, 16, 4, 64, 2752, 8000), (2, 75, 192, 6, 2, 32, 520, 1999), (2, 5, 8, 4, 2, 4, 12, 11)
    )
    dtype = half(size)

    def rms(x, scale):
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale.astype(x.dtype)

    def linear(x, w):
        size_of_row = 127.0 / jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-5)
        rounded = jnp.clip(jnp.round(x * size_of_row), -128, 127) / size_of_row
        x = x + lax.stop_gradient(rounded - x)
        level = jnp.maximum(jnp.mean(jnp.abs(w)), 1e-5)
        ternary = jnp.clip(jnp.round(w / level), -1, 1) * level
        w = w + lax.stop_gradient(ternary - w)
        return x @ w.astype(dtype)

    def rotate(x):
        angles = jnp.arange(t)[:, None] * 500000.0 ** -(jnp.arange(d // 2) / (d // 2))
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        one, two = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1).astype(x.dtype)

    def loss(p, tokens):
        x = p["embed"].astype(dtype)[tokens]
        y = rms(x, p["norm1"])
        q = rotate(linear(y, p["q"]).reshape(b, t, h, d)).reshape(b, t, groups, h // groups, d)
        k = rotate(linear(y, p["k"]).reshape(b, t, groups, d))
        v = linear(y, p["v"]).reshape(b, t, groups, d)
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k).astype(jnp.float32) * d**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        out = jnp.einsum("bgrqk,bkgd->bqgrd", jax.nn.softmax(scores, axis=-1).astype(dtype), v).reshape(b, t, h * d)
        x = x + linear(rms(out, p["inner1"]), p["o"])
        y = rms(x, p["norm2"])
        y = jnp.square(jax.nn.relu(linear(y, p["gate"]))) * linear(y, p["up"])
        x = x + linear(rms(y, p["inner2"]), p["down"])
        logits = (rms(x, p["norm"])[:, :-1] @ p["embed"].T.astype(dtype)).astype(jnp.float32)
        labels = tokens[:, 1:]
        at_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_label)

    shapes = {"q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d), "o": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    params = {name: weight(*shape) for name, shape in shapes.items()}
    norms = {"norm1": n, "inner1": h * d, "norm2": n, "inner2": wide, "norm": n}
    params |= {name: gain(width) for name, width in norms.items()}
    params |= {"embed": normal(words, n, scale=n**-0.5)}
    return Built(jax.value_and_grad(loss), (params, integers(b, t, below=words)))


@program("mixture-of-depths-chosen-tokens-equinox", GROUP)
def _depths(size: Size) -> Built:
    """This gives the features of a stack where every second layer handles only the tokens that a router chooses."""
    import equinox as eqx

    b, t, chosen, n, h, wide, layers = pick(
        size, (4, 900, 113, 768, 12, 3072, 4), (2, 120, 15, 128, 4, 512, 4), (2, 9, 3, 8, 2, 12, 2)
    )
    dtype = half(size)

    class Block(eqx.Module):
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            k1, k2, k3 = jax.random.split(key, 3)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(n, use_bias=False), eqx.nn.LayerNorm(n, use_bias=False)
            self.attention = eqx.nn.MultiheadAttention(h, n, key=k1)
            self.up, self.down = eqx.nn.Linear(n, wide, key=k2), eqx.nn.Linear(wide, n, key=k3)

        def __call__(self, x, places):
            mask = places[:, None] >= places[None, :]
            y = jax.vmap(self.norm1)(x)
            first = x + self.attention(y, y, y, mask)
            y = jax.vmap(self.norm2)(first)
            branch = jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(row))))(y)
            return (first - x) + branch

    class Stack(eqx.Module):
        blocks: list
        routers: list
        norm: eqx.nn.RMSNorm

        def __init__(self, key):
            keys = jax.random.split(key, 2 * layers)
            self.blocks = [Block(k) for k in keys[:layers]]
            self.routers = [eqx.nn.Linear(n, "scalar", use_bias=False, key=k) for k in keys[layers::2]]
            self.norm = eqx.nn.RMSNorm(n, use_bias=False)

        def __call__(self, x):
            for i, block in enumerate(self.blocks):
                if i % 2 == 0:
                    x = x + block(x, jnp.arange(t))
                    continue
                scores = jax.vmap(self.routers[i // 2])(x).astype(jnp.float32)
                _, index = lax.top_k(scores, chosen)
                index = jnp.sort(index)
                share = jax.nn.sigmoid(scores[index])[:, None].astype(x.dtype)
                x = x.at[index].add(share * block(x[index], index), unique_indices=True, indices_are_sorted=True)
            return jax.vmap(self.norm)(x)

    module = eqx.filter_eval_shape(Stack, jax.random.key(0))
    structs, rest = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def model(arrays, x):
        return jax.vmap(eqx.combine(arrays, rest))(x)

    return Built(model, (module_weights(structs, dtype), normal(b, t, n, dtype=dtype)))
