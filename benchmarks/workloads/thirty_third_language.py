"""Threads of comments, widening layers, unlearned pages and steered words, the thirty-third set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, layer_norm, norm_of, rms_norm, rotary
from benchmarks.workloads.twenty_sixth_parts import drawn, is_random

GROUP = "thirty-third"


@program("comments-of-a-talk-attend-along-the-tree-of-who-answers-whom", GROUP)
def _talk(size: Size) -> Built:
    """This program ranks the comments of long talks and marks rude ones, with attention that knows who answers whom.

    Its attention is of its own kind: parents [batch, comments] give sets of ancestors by doubling, common ancestors give ways
    up and down between two comments, each pair of those has a bias per head, some heads see only one line, and scores that are
    far below the mean of a row are cut off before a softmax that leaves a share for nobody.
    """
    b, t, n, h, depth, far, votes = pick(
        size, (8, 640, 768, 12, 4, 12, 5), (2, 96, 128, 4, 2, 8, 5), (1, 7, 8, 4, 2, 3, 2)
    )
    dtype, d = half(size), n // h
    line, kin = h // 4, h // 2

    def tree(parent):
        """This gives ancestors [t, t], each comment among its own, and how deep comments are."""
        jump = parent
        above = jnp.eye(t, dtype=bool)
        for _ in range(int(np.ceil(np.log2(t)))):
            above = above | above[jump]
            jump = jump[jump]
        return above, jnp.sum(above, axis=1) - 1

    def layer(x, q, up, down, line_of, sibling, earlier):
        """This is one layer; how pairs stand in the tree is the same for all layers."""
        y = dense(q["qkv"], layer_norm(q["norm1"], x)).reshape(b, t, 3, h, d)
        query, key, value = y[:, :, 0], y[:, :, 1], y[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
        bias = q["ways"].astype(jnp.float32)[up, down]
        scores = scores + jnp.moveaxis(bias, -1, 1)
        head = jnp.arange(h)[:, None, None]
        seen = jnp.where(head < line, line_of[:, None], jnp.where(head < kin, sibling[:, None], earlier))
        many = jnp.sum(seen, axis=-1, keepdims=True)
        mean = jnp.sum(jnp.where(seen, scores, 0.0), axis=-1, keepdims=True) / jnp.maximum(many, 1)
        kept = seen & (scores > mean - 1.0)
        top = jnp.maximum(jnp.max(jnp.where(kept, scores, -1e9), axis=-1, keepdims=True), 0.0)
        mass = jnp.where(kept, jnp.exp(scores - top), 0.0)
        nobody = jnp.exp(q["nobody"].astype(jnp.float32)[:, None, None] - top)
        probs = (mass / (jnp.sum(mass, axis=-1, keepdims=True) + nobody)).astype(dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(b, t, n)
        x = x + dense(q["out"], out)
        return x + dense(q["last"], jax.nn.gelu(dense(q["first"], layer_norm(q["norm2"], x))))

    def run(p, comment, raw, minute, short):
        """This gives the worth of comments, chances of being rude, an order, and what whole branches are worth."""
        place = jnp.arange(t)
        parent = jnp.maximum(place - 1 - raw % jnp.maximum(jnp.minimum(place, 40), 1), 0)
        above, deep = jax.vmap(tree)(parent)
        line_up = above.astype(jnp.bfloat16)
        common = jnp.einsum("bqa,bka->bqk", line_up, line_up, preferred_element_type=jnp.float32).astype(jnp.int32)
        up = jnp.minimum(deep[:, :, None] + 1 - common, far - 1)
        down = jnp.minimum(deep[:, None] + 1 - common, far - 1)
        real = place < (t - short)[:, None]
        earlier = (place <= place[:, None]) & real[:, None, None]
        sibling = (parent[:, :, None] == parent[:, None]) & real[:, None] & (place <= place[:, None])
        line_of = above & real[:, None]
        age = jnp.log1p(jnp.cumsum(jnp.abs(minute), axis=1))
        waves = age[..., None] * 2.0 ** jnp.arange(-3, 5)
        clock = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1).astype(dtype)
        x = comment + dense(p["clock"], clock) + p["deep"][jnp.minimum(deep, far - 1)]
        x, _ = lax.scan(lambda x, q: (layer(x, q, up, down, line_of, sibling, earlier), None), x, p["layers"])
        x = layer_norm(p["norm"], x)
        vote = jax.nn.softmax(dense(p["vote"], x).astype(jnp.float32), axis=-1)
        worth = jnp.where(real, vote @ jnp.arange(votes, dtype=jnp.float32), -1.0)
        rude = jax.nn.sigmoid(dense(p["rude"], x).astype(jnp.float32)[..., 0])
        fade = 0.7 ** (deep[:, :, None] - deep[:, None]) * line_of
        branch = jnp.einsum("bka,bk->ba", fade, jnp.where(real, worth, 0.0))
        group = jnp.where(real & (rude < 0.9), branch, -jnp.inf)
        order = jnp.argsort(-group, axis=1)
        return worth, rude, order, branch, jnp.max(deep, axis=1)

    def stacked(i, o):
        w = normal(depth, i, o, dtype=dtype, scale=i**-0.5)
        return {"w": w, "b": normal(depth, o, dtype=dtype, scale=0.1)}

    def norms():
        scale = normal(depth, n, dtype=dtype, scale=0.1, offset=1.0)
        return {"scale": scale, "shift": normal(depth, n, dtype=dtype, scale=0.1)}

    def single(i, o):
        return {"w": normal(i, o, dtype=dtype, scale=i**-0.5), "b": normal(o, dtype=dtype, scale=0.1)}

    layers = {"norm1": norms(), "norm2": norms(), "qkv": stacked(n, 3 * n), "out": stacked(n, n)}
    layers |= {"first": stacked(n, 4 * n), "last": stacked(4 * n, n)}
    layers |= {"ways": normal(depth, far, far, h, dtype=dtype), "nobody": normal(depth, h, dtype=dtype)}
    p = {"layers": layers, "norm": norm_of(n, dtype), "clock": single(16, n), "deep": normal(far, n, dtype=dtype)}
    p |= {"vote": single(n, votes), "rude": single(n, 1)}
    inputs = normal(b, t, n, dtype=dtype), integers(b, t, below=40), normal(b, t), integers(b, below=max(1, t // 3))
    return Built(run, (p, *inputs))


@program("layers-that-grow-wider-from-bottom-to-top-prefill-nnx", GROUP)
def _wider(size: Size) -> Built:
    """This program reads prompts with a language model each of whose layers has its own numbers of heads and hidden units.

    It is OpenELM (Mehta, 2024; apple/corenet), with nnx: heads and widths grow from layer to layer, queries and keys have norms,
    keys and values are shared by groups of heads and kept, and the table of words is also the last layer.
    """
    from flax import nnx

    b, t, n, d, depth, words = pick(
        size, (4, 1024, 1280, 64, 10, 32000), (2, 96, 128, 16, 10, 2003), (1, 6, 16, 4, 10, 11)
    )
    dtype = half(size)
    least, most, share = n // d // 2 // 4 * 4 or 2, n // d // 4 * 4 or 4, 4 if n // d >= 8 else 2
    heads = [round((least + (most - least) * k / (depth - 1)) / share) * share for k in range(depth)]
    widths = [max(1, round((0.5 + 3.5 * k / (depth - 1)) * n / 16)) * 16 for k in range(depth)]

    def linear(i, o, rngs):
        return nnx.Linear(i, o, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)

    class Norm(nnx.Module):
        """This divides by the root of the mean square."""

        def __init__(self, n):
            self.scale = nnx.Param(jnp.ones(n, dtype))

        def __call__(self, x):
            return rms_norm(self.scale[...], x)

    class Layer(nnx.Module):
        """This is one layer with its own widths."""

        def __init__(self, many, wide, rngs):
            self.many = many
            self.norm1, self.norm2, self.q_norm, self.k_norm = Norm(n), Norm(n), Norm(d), Norm(d)
            self.qkv = linear(n, (many + 2 * (many // share)) * d, rngs)
            self.out = linear(many * d, n, rngs)
            self.up, self.down = linear(n, 2 * wide, rngs), linear(wide, n, rngs)

        def __call__(self, x, places, seen):
            groups = self.many // share
            y = self.qkv(self.norm1(x)).reshape(b, t, -1, d)
            query, key, value = jnp.split(y, [self.many, self.many + groups], axis=2)
            query, key = rotary(self.q_norm(query), places), rotary(self.k_norm(key), places)
            shared = query.reshape(b, t, groups, share, d)
            scores = jnp.einsum("bqgsd,bkgd->bgsqk", shared, key, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9), axis=-1).astype(dtype)
            x = x + self.out(jnp.einsum("bgsqk,bkgd->bqgsd", probs, value).reshape(b, t, -1))
            gate, up = jnp.split(self.up(self.norm2(x)), 2, axis=-1)
            return x + self.down(nnx.silu(gate) * up), (key, value)

    class Model(nnx.Module):
        """This is the whole model."""

        def __init__(self, rngs):
            self.table = nnx.Embed(words, n, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.layers = nnx.List([Layer(many, wide, rngs) for many, wide in zip(heads, widths, strict=True)])
            self.norm = Norm(n)

        def __call__(self, text, empty):
            places = jnp.maximum(jnp.arange(t) - empty[:, None], 0)
            seen = jnp.tril(jnp.ones((t, t), bool)) & (jnp.arange(t) >= empty[:, None])[:, None]
            x, kept = self.table(text), []
            for layer in self.layers:
                x, pair = layer(x, places, seen)
                kept.append(pair)
            return self.table.attend(self.norm(x)[:, -1]).astype(jnp.float32), kept

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def run(p, text, empty):
        """This gives the next words, how sure they are, and what layers keep."""
        scores, kept = nnx.merge(graph, p)(text, empty)
        logp = jax.nn.log_softmax(scores * n**0.5 / 8, axis=-1)
        return lax.top_k(logp, 8), -jnp.sum(jnp.exp(logp) * logp, axis=-1), kept

    return Built(run, (drawn(state), integers(b, t, below=words), integers(b, below=max(1, t // 2))))


def _layers_of(depth, n, h, dtype):
    """This describes layers of a plain decoder, stacked."""

    def stacked(*shape):
        return normal(depth, *shape, dtype=dtype, scale=shape[0] ** -0.5)

    ones = {"dtype": dtype, "scale": 0.1, "offset": 1.0}
    return {
        "norm1": normal(depth, n, **ones),
        "norm2": normal(depth, n, **ones),
        "qkv": stacked(n, 3 * h * (n // h)),
        "out": stacked(n, n),
        "up": stacked(n, 6 * n),
        "down": stacked(3 * n, n),
    }


def _decoder_of(depth, n, h, words, dtype):
    """This describes a plain decoder."""
    p = {"table": normal(words, n, dtype=dtype), "layers": _layers_of(depth, n, h, dtype), "norm": gain(n, dtype)}
    return p | {"head": normal(n, words, dtype=dtype, scale=2 * n**-0.5)}


def _fed(q, x):
    """This is the gated half of a layer."""
    gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ q["down"]


@program("pages-to-be-forgotten-while-the-rest-is-kept-loss-grad", GROUP)
def _forgotten(size: Size) -> Built:
    """This program gives the gradients that make a language model forget some pages while it goes on as before on others.

    It is negative preference optimisation (Zhang, 2024; locuslab/open-unlearning): whole pages become less likely than they were
    for a frozen copy, the weaker the more it is done, and all chances on pages to keep are pulled to those of the copy.
    """
    b, t, n, h, depth, words, beta = pick(
        size, (6, 512, 768, 12, 4, 16000, 0.1), (2, 48, 128, 4, 2, 1009, 0.1), (1, 5, 8, 2, 1, 11, 0.5)
    )
    dtype, d = half(size), n // h
    places, causal = jnp.arange(t), np.tril(np.ones((t, t), bool))

    def chances(p, text):
        """These are logarithms of chances [2 b, t, words]."""

        @jax.checkpoint
        def layer(x, q):
            query, key, value = jnp.split((rms_norm(q["norm1"], x) @ q["qkv"]).reshape(-1, t, 3 * h, d), 3, axis=2)
            query, key = rotary(query, places[None]), rotary(key, places[None])
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(dtype)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(x.shape) @ q["out"]
            return _fed(q, x), None

        x, _ = lax.scan(layer, p["table"][text], p["layers"])
        scores = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
        return jax.nn.log_softmax(scores, axis=-1)

    def grads(p, change, bad, good, bad_short, good_short):
        """This gives the loss, its parts, how much less likely pages are, and slopes with their length."""
        text = jnp.concatenate([bad, good])
        real = jnp.arange(1, t) < (t - jnp.concatenate([bad_short, good_short]))[:, None]
        frozen = lax.stop_gradient(chances(p, text))
        tuned = jax.tree.map(lambda a, c: a + c, p, change)

        def own(logp):
            """This is the mean chance of each page."""
            found = jnp.take_along_axis(logp[:b, :-1], bad[:, 1:, None], axis=-1)[..., 0]
            return jnp.sum(jnp.where(real[:b], found, 0.0), axis=1)

        def loss(p):
            logp = chances(p, text)
            ratio = own(logp) - own(frozen)
            forget = -2 / beta * jnp.mean(jax.nn.log_sigmoid(-beta * ratio))
            each = jnp.sum(jnp.exp(frozen[b:, :-1]) * (frozen[b:, :-1] - logp[b:, :-1]), axis=-1)
            keep = jnp.sum(jnp.where(real[b:], each, 0.0)) / jnp.sum(real[b:])
            return forget + keep, (jnp.stack([forget, keep]), ratio, jax.nn.sigmoid(beta * ratio))

        (value, told), g = jax.value_and_grad(loss, has_aux=True)(tuned)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(g)))
        scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        return value, told, norm, jax.tree.map(lambda a: (a * scale).astype(a.dtype), g)

    p = _decoder_of(depth, n, h, words, dtype)
    change = jax.tree.map(lambda r: normal(*r.shape, dtype=dtype, scale=0.002), p, is_leaf=is_random)
    pages = integers(b, t, below=words), integers(b, t, below=words)
    short = integers(b, below=max(1, t // 2)), integers(b, below=max(1, t // 2))
    return Built(grads, (p, change, *pages, *short))


@program("words-of-a-large-model-steered-by-two-small-ones-decode", GROUP)
def _guided(size: Size) -> Built:
    """This program writes words with a large model whose chances are moved by how a small tuned model differs from a plain one.

    It is proxy tuning (Liu, 2024; alisawuffles/proxy-tuning) with a bar for plausible words: three models with caches go on
    word by word, differences of scores are added, and words are drawn from those that the large model does not rule out.
    """
    b, t, new, words, large, small, heads = pick(
        size,
        (8, 1024, 6, 32000, (12, 2048), (4, 768), (16, 12)),
        (2, 64, 4, 2003, (3, 192), (2, 96), (6, 4)),
        (1, 6, 2, 13, (2, 8), (1, 4), (2, 2)),
    )
    dtype, long = half(size), t + new

    def stepped(p, h, kept, word, empty, at):
        """This is one step of one model for words [b]; keys and values lie in caches [depth, 2, b, heads, long, width]."""
        x = p["table"][word]
        n = x.shape[-1]
        d = n // h
        seen = (jnp.arange(long) <= at) & (jnp.arange(long) >= empty[:, None])

        def layer(x, now):
            q, kept = now
            y = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, 1, 3 * h, d)
            query, key, value = (z[:, 0] for z in jnp.split(y, 3, axis=2))
            place = (at - empty)[:, None]
            query, key = rotary(query[:, None], place)[:, 0], rotary(key[:, None], place)[:, 0]
            kept = lax.dynamic_update_slice(kept, jnp.stack([key, value])[:, :, :, None], (0, 0, 0, at, 0))
            scores = jnp.einsum("bhd,bhkd->bhk", query, kept[0], preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), axis=-1).astype(dtype)
            x = x + jnp.einsum("bhk,bhkd->bhd", probs, kept[1]).reshape(b, n) @ q["out"]
            return _fed(q, x), kept

        x, kept = lax.scan(layer, x, (p["layers"], kept))
        return (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), kept

    def run(models, caches, word, empty, strength, seed):
        """This gives words, their chances under all three models, how far chances moved, and the caches."""
        share = jax.nn.softplus(strength)[:, None]

        def one(carry, now):
            caches, word = carry
            k, key = now
            found = [stepped(p, h, c, word, empty, t + k) for p, h, c in zip(models, all_heads, caches, strict=True)]
            big, tuned, plain = (jax.nn.log_softmax(s, axis=-1) for s, _ in found)
            may = big >= jnp.max(big, axis=-1, keepdims=True) + np.log(0.02)
            mixed = jnp.where(may, big + share * (tuned - plain), -1e9)
            mixed = jax.nn.log_softmax(mixed / 0.8, axis=-1)
            word = jnp.argmax(mixed + jax.random.gumbel(key, mixed.shape), axis=-1).astype(jnp.int32)
            told = [jnp.take_along_axis(z, word[:, None], axis=1)[:, 0] for z in (mixed, big, tuned, plain)]
            moved = jnp.sum(jnp.exp(mixed) * (mixed - big), axis=-1)
            return (tuple(c for _, c in found), word), (word, jnp.stack(told), moved, jnp.sum(may, axis=-1))

        keys = jax.random.split(jax.random.key(seed), new)
        (caches, _), told = lax.scan(one, (caches, word), (jnp.arange(new), keys))
        return told, caches

    all_heads = (heads[0], heads[1], heads[1])
    shapes = (large, small, small)
    models = tuple(_decoder_of(k, n, h, words, dtype) for (k, n), h in zip(shapes, all_heads, strict=True))
    caches = tuple(normal(k, 2, b, h, long, n // h, dtype=dtype) for (k, n), h in zip(shapes, all_heads, strict=True))
    inputs = integers(b, below=words), integers(b, below=t // 2), normal(b), integers(below=1000)
    return Built(run, (models, caches, *inputs))
