"""Pooled queries, latents and spoken frames, the thirty-fifth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-fifth"


@program("queries-and-keys-pooled-by-filters-with-places-told-per-side-linen", GROUP)
def _pooled(size: Size) -> Built:
    """This program classifies photographs with attention whose queries, keys and values are pooled by filters per head.

    It is MViTv2 (Li, 2022; facebookresearch/mvit), with linen: stages double the width inside attention, keys are pooled more where
    maps are large, biases of rows and columns are products of queries with tables, and pooled queries are added to what comes out.
    """
    from flax import linen as nn

    b, side, width, depths, classes = pick(
        size, (16, 224, 96, (1, 2, 5, 2), 1000), (1, 128, 32, (1, 1, 2, 1), 100), (1, 32, 4, (1, 1, 1, 1), 5)
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Attention(nn.Module):
        """This is attention of pooled queries over pooled keys and values."""

        heads: int
        out: int
        stride_q: int
        stride_kv: int

        @nn.compact
        def __call__(self, x):
            b, high, wide, _ = x.shape
            d = self.out // self.heads
            qkv = nn.Dense(3 * self.out, name="qkv", **how)(x).reshape(b, high, wide, 3, self.heads, d)
            qkv = qkv.transpose(3, 0, 4, 1, 2, 5).reshape(3, b * self.heads, high, wide, d)

            def pool(x, stride, name):
                """This filters each channel of a head, and norms it."""
                x = nn.Conv(
                    d, (3, 3), (stride, stride), padding=1, feature_group_count=d, use_bias=False, name=name, **how
                )(x)
                return nn.LayerNorm(name=name + "_norm", **how)(x).reshape(b, self.heads, *x.shape[1:])

            q = pool(qkv[0], self.stride_q, "pool_q")
            k = pool(qkv[1], self.stride_kv, "pool_k")
            v = pool(qkv[2], self.stride_kv, "pool_v")

            def told(name, many_q, many_k):
                """This gives a table's rows [queries, keys, d] for distances along one side."""
                table = self.param(name, nn.initializers.normal(0.02), (2 * max(many_q, many_k) - 1, d), dtype)
                step_q, step_k = max(many_k / many_q, 1.0), max(many_q / many_k, 1.0)
                far = np.arange(many_q)[:, None] * step_q - np.arange(many_k) * step_k + (many_k - 1) * step_k
                return table[far.astype(np.int32)]

            qh, qw, kh, kw = *q.shape[2:4], *k.shape[2:4]
            scores = jnp.einsum("bnhwd,bnyxd->bnhwyx", q * d**-0.5, k)
            rows = jnp.einsum("bnhwd,hyd->bnhwy", q, told("rel_h", qh, kh))
            columns = jnp.einsum("bnhwd,wxd->bnhwx", q, told("rel_w", qw, kw))
            scores = scores + rows[..., :, None] + columns[..., None, :]
            probs = nn.softmax(scores.reshape(b, self.heads, qh * qw, kh * kw).astype(jnp.float32)).astype(dtype)
            out = probs @ v.reshape(b, self.heads, kh * kw, d) + q.reshape(b, self.heads, qh * qw, d)
            out = out.transpose(0, 2, 1, 3).reshape(b, qh, qw, self.out)
            return nn.Dense(self.out, name="proj", **how)(out)

    class Block(nn.Module):
        """This is attention and a wide layer, where the shortcut is pooled by largest values."""

        heads: int
        out: int
        stride_q: int
        stride_kv: int

        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(**how)(x)
            skip = nn.Dense(self.out, name="skip", **how)(y) if x.shape[-1] != self.out else x
            if self.stride_q > 1:
                skip = nn.max_pool(skip, (3, 3), (2, 2), ((1, 1), (1, 1)))
            x = skip + Attention(self.heads, self.out, self.stride_q, self.stride_kv)(y)
            y = nn.Dense(4 * self.out, **how)(nn.LayerNorm(**how)(x))
            return x + nn.Dense(self.out, **how)(nn.gelu(y, approximate=False))

    class Net(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, x):
            x = nn.Conv(width, (7, 7), (4, 4), padding=3, **how)(x)
            for stage, depth in enumerate(depths):
                for k in range(depth):
                    first = stage > 0 and k == 0
                    x = Block(2**stage, width * 2**stage, 2 if first else 1, max(4 // 2**stage, 1))(x)
            x = jnp.mean(nn.LayerNorm(**how)(x), axis=(1, 2))
            return nn.Dense(classes, **how)(x), x

    model = Net()

    def run(p, photo, label):
        """This gives chances of classes, surprise with smoothed labels, and features."""
        scores, feature = model.apply(p, photo)
        logp = jax.nn.log_softmax(scores.astype(jnp.float32))
        target = 0.9 * jax.nn.one_hot(label, classes) + 0.1 / classes
        return jnp.exp(logp), -jnp.sum(target * logp, axis=-1), feature

    photo = normal(b, side, side, 3, dtype=dtype)
    p = drawn(jax.eval_shape(model.init, jax.random.key(0), photo.struct))
    return Built(run, (p, photo, integers(b, below=classes)))


@program("photographs-unfolded-from-latents-of-an-autoencoder-nnx", GROUP)
def _unfolded(size: Size) -> Built:
    """This program makes photographs of drawn latents, as the last step of a latent diffusion model does.

    It is the decoder of AutoencoderKL (Rombach, 2022; diffusers), with nnx: residual blocks with norms of groups, one attention in
    the middle, and maps doubled by repeating pixels before a filter.
    """
    from flax import nnx

    b, side, base, many, groups = pick(
        size, (1, 64, 64, (1, 2, 4, 4), 32), (1, 12, 16, (1, 2, 4, 4), 8), (1, 3, 4, (1, 2), 2)
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    def conv(i, o, k, rngs):
        """This is a square filter."""
        return nnx.Conv(i, o, (k, k), padding="SAME", rngs=rngs, **how)

    def norm(c, rngs):
        """This is a norm of groups of channels."""
        return nnx.GroupNorm(c, num_groups=groups, epsilon=1e-6, rngs=rngs, **how)

    class ResnetBlock(nnx.Module):
        """This is a residual block."""

        def __init__(self, i, o, rngs):
            self.norm1, self.conv1 = norm(i, rngs), conv(i, o, 3, rngs)
            self.norm2, self.conv2 = norm(o, rngs), conv(o, o, 3, rngs)
            self.short = conv(i, o, 1, rngs) if i != o else None

        def __call__(self, x):
            y = self.conv1(nnx.silu(self.norm1(x)))
            y = self.conv2(nnx.silu(self.norm2(y)))
            return y + (x if self.short is None else self.short(x))

    class AttentionBlock(nnx.Module):
        """This is attention with one head over all cells."""

        def __init__(self, c, rngs):
            self.norm = norm(c, rngs)
            self.query, self.key, self.value, self.proj = (nnx.Linear(c, c, rngs=rngs, **how) for _ in range(4))

        def __call__(self, x):
            b, h, w, c = x.shape
            y = self.norm(x).reshape(b, h * w, c)
            scores = jnp.einsum("bqc,bkc->bqk", self.query(y), self.key(y)) * c**-0.5
            probs = nnx.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
            return x + self.proj(jnp.einsum("bqk,bkc->bqc", probs, self.value(y))).reshape(b, h, w, c)

    class Decoder(nnx.Module):
        """This is the whole decoder."""

        def __init__(self, rngs):
            top = base * many[-1]
            self.quant, self.first = conv(4, 4, 1, rngs), conv(4, top, 3, rngs)
            self.middle = nnx.List(
                [ResnetBlock(top, top, rngs), AttentionBlock(top, rngs), ResnetBlock(top, top, rngs)]
            )
            self.up, self.grow, i = nnx.List([]), nnx.List([]), top
            for level, k in enumerate(reversed(many)):
                o = base * k
                self.up.append(nnx.List([ResnetBlock(i if n == 0 else o, o, rngs) for n in range(3)]))
                if level < len(many) - 1:
                    self.grow.append(conv(o, o, 3, rngs))
                i = o
            self.norm, self.last = norm(i, rngs), conv(i, 3, 3, rngs)

        def __call__(self, z):
            x = self.first(self.quant(z))
            for block in self.middle:
                x = block(x)
            for level, blocks in enumerate(self.up):
                for block in blocks:
                    x = block(x)
                if level < len(self.grow):
                    b, h, w, c = x.shape
                    x = self.grow[level](jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
            return self.last(nnx.silu(self.norm(x)))

    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))

    def run(p, latent):
        """This gives photographs with values from nought to one."""
        x = nnx.merge(graph, p)(latent / 0.18215)
        return jnp.clip(x.astype(jnp.float32) / 2 + 0.5, 0, 1)

    return Built(run, (drawn(state), normal(b, side, side, 4, dtype=dtype, scale=0.18)))


@program("frames-of-speech-fed-back-through-caches-while-text-is-heard-nnx", GROUP)
def _spoken(size: Size) -> Built:
    """This program makes the next frames of speech from read text, two at a time, with each pair fed back.

    It is the decoder of Transformer TTS (Li, 2019) and SpeechT5, with nnx.MultiHeadAttention in `decode=True`: a small network
    reads the last frame, layers attend to a cache and to the text, and heads give two frames and whether speech ends.
    """
    from flax import nnx

    b, t, heard, words, n, h, depth, mels, new = pick(
        size, (16, 1024, 600, 192, 768, 12, 6, 80, 4), (4, 192, 100, 48, 192, 6, 3, 80, 4), (1, 8, 3, 4, 8, 2, 2, 3, 2)
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Layer(nnx.Module):
        """This is a layer of the decoder, which reads one frame."""

        def __init__(self, rngs):
            self.own = nnx.MultiHeadAttention(h, n, decode=True, rngs=rngs, **how)
            self.cross = nnx.MultiHeadAttention(h, n, decode=False, rngs=rngs, **how)
            self.one, self.two = nnx.Linear(n, 4 * n, rngs=rngs, **how), nnx.Linear(4 * n, n, rngs=rngs, **how)
            self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs, **how) for _ in range(3)])

        def __call__(self, x, text, mask):
            x = self.norms[0](x + self.own(x))
            x = self.norms[1](x + self.cross(x, text, mask=mask))
            return self.norms[2](x + self.two(nnx.gelu(self.one(x))))

    class Speaker(nnx.Module):
        """This is the whole decoder."""

        def __init__(self, rngs):
            self.pre = nnx.List([nnx.Linear(mels, n, rngs=rngs, **how), nnx.Linear(n, n, rngs=rngs, **how)])
            self.layers = nnx.List([Layer(rngs) for _ in range(depth)])
            self.frames, self.stop = nnx.Linear(n, 2 * mels, rngs=rngs, **how), nnx.Linear(n, 2, rngs=rngs, **how)
            self.alpha = nnx.Param(jnp.ones((1,), dtype))
            for layer in self.layers:
                layer.own.init_cache((b, t, n), dtype=dtype)

        def __call__(self, frame, at, text, mask):
            x = frame
            for dense in self.pre:
                x = nnx.relu(dense(x))
            angle = at * 10000.0 ** (-jnp.arange(n // 2) * 2.0 / n)
            place = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)]).astype(dtype)
            x = x[:, None] + self.alpha[...] * place
            for layer in self.layers:
                x = layer(x, text, mask)
            return self.frames(x[:, 0]).reshape(b, 2, mels), self.stop(x[:, 0])

    graph, params, cache, rest = nnx.split(nnx.eval_shape(lambda: Speaker(nnx.Rngs(0))), nnx.Param, nnx.Cache, ...)
    assert not jax.tree.leaves(rest)

    def run(p, cache, frame, text, short):
        """This gives frames and chances of an end, and what caches hold of these frames."""
        mask = (jnp.arange(words) < words - short[:, None])[:, None, None]

        def of(x):
            """This sets the places at which caches go on."""
            return jnp.full(x.shape, heard, x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x

        def step(carry, at):
            """This makes two frames and reads the second."""
            cache, frame = carry
            speaker = nnx.merge(graph, p, cache, rest)
            frames, stop = speaker(frame, at, text, mask)
            return (nnx.state(speaker, nnx.Cache), jnp.tanh(frames[:, 1])), (frames, jax.nn.sigmoid(stop))

        (cache, _), (frames, stop) = lax.scan(step, (jax.tree.map(of, cache), frame), jnp.arange(heard, heard + new))
        first = [layer.own.cached_key[:, heard : heard + new] for layer in nnx.merge(graph, p, cache, rest).layers]
        frames = frames.transpose(1, 0, 2, 3).reshape(b, 2 * new, mels)
        return frames, stop.transpose(1, 0, 2).reshape(b, 2 * new), first[0], first[-1]

    def kept(s):
        """This describes what caches hold."""
        whole = jnp.issubdtype(s.dtype, jnp.integer)
        return Random(tuple(s.shape), jnp.dtype(s.dtype), below=1) if whole else normal(*s.shape, dtype=s.dtype)

    inputs = normal(b, mels, dtype=dtype), normal(b, words, n, dtype=dtype), integers(b, below=words // 2)
    return Built(run, (drawn(params), jax.tree.map(kept, cache), *inputs))
