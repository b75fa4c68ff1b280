"""Answers in long texts, tables that look at their neighbours and graphs that shrink: their author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-ninth"


@program("xlm-roberta-extractive-question-answering-over-overlapping-windows-transformers", GROUP)
def _answers(size: Size) -> Built:
    """This program finds the words of long documents that answer questions, or tells that there is no answer.

    It is extractive question answering with FlaxXLMRobertaForQuestionAnswering of transformers (Conneau, 2020), as for SQuAD 2:
    documents are cut into overlapping windows, a word counts only in the window that shows most around it, and the best pairs of a
    start and an end are compared with the score of no answer.
    """
    transformers = library()
    b, long, asked, t, stride, words, n, heads, best, longest, depth = pick(
        size,
        (4, 1190, 32, 384, 128, 250002, 768, 12, 20, 30, 4),
        (1, 225, 12, 96, 48, 8000, 192, 6, 10, 12, 4),
        (2, 9, 2, 10, 2, 20, 8, 2, 3, 3, 4),
    )
    dtype, room = half(size), t - asked - 4
    windows = -(-max(long - room, 0) // stride) + 1
    how = {"vocab_size": words, "hidden_size": n, "num_hidden_layers": depth, "num_attention_heads": heads}
    how |= {"intermediate_size": 4 * n, "max_position_embeddings": t + 2, "type_vocab_size": 1}
    config = transformers.XLMRobertaConfig(pad_token_id=1, bos_token_id=0, eos_token_id=2, **how)
    model = transformers.FlaxXLMRobertaForQuestionAnswering(config, input_shape=(1, t), _do_init=False, dtype=dtype)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, t)))

    def run(p, question, document, short, true):
        """This gives best spans with probabilities, how much better than no answer they are, exact hits and overlaps."""
        length = long - short
        place = jnp.arange(windows)[:, None] * stride + jnp.arange(room)
        real = place < length[:, None, None]
        part = jnp.where(real, document[:, jnp.minimum(place, long - 1)], 1)
        mark = jnp.full((b, windows, 1), 2)
        ask = jnp.broadcast_to(question[:, None], (b, windows, asked))
        ids = jnp.concatenate([0 * mark, ask, mark, mark, part, mark], axis=-1).reshape(b * windows, t)
        out = model(ids, attention_mask=(ids != 1).astype(jnp.int32), params=p)
        start, end = (x.astype(jnp.float32).reshape(b, windows, t) for x in (out.start_logits, out.end_logits))
        nothing = jnp.min(start[..., 0] + end[..., 0], axis=1)
        start, end = start[..., asked + 3 : -1], end[..., asked + 3 : -1]

        last = jnp.minimum((jnp.arange(windows) + 1)[:, None] * stride - stride + room, length[:, None, None])
        shown = jnp.minimum(place - place[:, :1], last - 1 - place) + 0.01 * (last - place[:, :1])
        shown = jnp.where(real, shown, -1.0)
        flat = jnp.broadcast_to(place, shown.shape).reshape(b, -1)
        row = jnp.arange(b)[:, None]
        most = jnp.full((b, windows * stride + room), -1.0).at[row, flat].max(shown.reshape(b, -1))
        mine = real & (shown >= most[row, flat].reshape(shown.shape))
        first, at_first = lax.top_k(jnp.where(mine, start, -1e9), best)
        final, at_final = lax.top_k(jnp.where(real, end, -1e9), best)
        span = at_final[..., None, :] - at_first[..., None]
        score = jnp.where((span >= 0) & (span < longest), first[..., None] + final[..., None, :], -1e9)
        value, which = lax.top_k(score.reshape(b, -1), best)
        window, rest = which // (best * best), which % (best * best)
        base = window * stride
        left = base + at_first[row, window, rest // best]
        right = base + at_final[row, window, rest % best]
        probs = jax.nn.softmax(jnp.concatenate([value, nothing[:, None]], axis=-1), axis=-1)
        common = jnp.minimum(right[:, 0], true[:, 1]) - jnp.maximum(left[:, 0], true[:, 0]) + 1
        total = right[:, 0] - left[:, 0] + 1 + jnp.abs(true[:, 1] - true[:, 0]) + 1
        overlap = 2.0 * jnp.maximum(common, 0) / jnp.maximum(total, 1)
        exact = (left[:, 0] == true[:, 0]) & (right[:, 0] == true[:, 1])
        return jnp.stack([left, right], axis=-1), probs, value[:, 0] - nothing, jnp.mean(exact), overlap

    def weights(path, r):
        """This lets tables of words and places have values of one size."""
        table = any(getattr(k, "key", "") == "embedding" for k in path)
        return normal(*r.shape, dtype=dtype, scale=0.3) if table else r

    p = jax.tree_util.tree_map_with_path(weights, drawn(structs, dtype), is_leaf=lambda r: hasattr(r, "offset"))
    inputs = integers(b, asked, below=words), integers(b, long, below=words), integers(b, below=long // 2)
    return Built(run, (p, *inputs, integers(b, 2, below=long // 2)))


@program("tabr-retrieved-neighbours-with-labels-tabular-classifier-grad-equinox", GROUP)
def _tabr(size: Size) -> Built:
    """This program gives slopes of a classifier of table rows that looks up the nearest other rows and their labels.

    It is TabR (Gorishniy, 2024; yandex-research/tabular-dl-tabr), with equinox: numbers become waves of learned lengths, keys of
    all rows are compared, and each neighbour adds its label's vector and a correction made of the difference of keys.
    """
    import equinox as eqx
    import optax

    b, rows, numbers, kinds, levels, waves, each, n, near, classes = pick(
        size,
        (512, 12288, 28, 6, 12, 24, 16, 264, 96, 7),
        (64, 1800, 10, 3, 7, 8, 8, 72, 24, 5),
        (3, 8, 2, 2, 3, 2, 2, 6, 3, 3),
    )

    class Block(eqx.Module):
        """This is a residual block of rows."""

        norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.norm = eqx.nn.LayerNorm(n)
            self.up, self.down = eqx.nn.Linear(n, 2 * n, key=keys[0]), eqx.nn.Linear(2 * n, n, key=keys[1])

        def __call__(self, x):
            return x + self.down(jax.nn.relu(self.up(self.norm(x))))

    class TabR(eqx.Module):
        """This is the whole classifier."""

        lengths: jax.Array
        periodic: jax.Array
        shift: jax.Array
        enter: eqx.nn.Linear
        encoder: Block
        norm: eqx.nn.LayerNorm
        key_of: eqx.nn.Linear
        labels: eqx.nn.Embedding
        corrections: list
        predictor: Block
        last: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 8)
            self.lengths = jnp.zeros((numbers, waves))
            self.periodic, self.shift = jnp.zeros((numbers, 2 * waves, each)), jnp.zeros((numbers, each))
            self.enter = eqx.nn.Linear(numbers * each + kinds * levels, n, key=keys[0])
            self.encoder, self.predictor = Block(keys[1]), Block(keys[2])
            self.norm, self.last = eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(n)
            self.key_of, self.labels = eqx.nn.Linear(n, n, key=keys[3]), eqx.nn.Embedding(classes, n, key=keys[4])
            second = eqx.nn.Linear(2 * n, n, use_bias=False, key=keys[6])
            self.corrections = [eqx.nn.Linear(n, 2 * n, key=keys[5]), second]
            self.head = eqx.nn.Linear(n, classes, key=keys[7])

        def encode(self, number, kind):
            """This encodes one row, and gives its key."""
            angle = 2 * jnp.pi * self.lengths * number[:, None]
            wave = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
            wave = jax.nn.relu(jnp.einsum("fw,fwe->fe", wave, self.periodic) + self.shift)
            x = self.enter(jnp.concatenate([wave.reshape(-1), jax.nn.one_hot(kind, levels).reshape(-1)]))
            x = self.encoder(x)
            return x, self.key_of(self.norm(x))

        def predict(self, x, key, keys, labels):
            """This mixes one row with its neighbours [near, n], and gives scores of classes and shares of neighbours."""
            away = jnp.sum((key - keys) ** 2, axis=-1) * n**-0.5
            share = jax.nn.softmax(-away)
            one, two = self.corrections
            value = jax.vmap(self.labels)(labels) + jax.vmap(lambda z: two(jax.nn.relu(one(z))))(key - keys)
            x = self.predictor(x + share @ value)
            return self.head(jax.nn.relu(self.last(x))), share

    shapes = eqx.filter_eval_shape(TabR, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, number, kind, label, chosen):
        """This gives the loss, slopes, probabilities, neighbours, and how many of them have the true label."""

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(model):
            """This is the mean surprise of the labels of a batch of rows, which are hidden from themselves."""
            _, keys = jax.vmap(model.encode)(number, kind)
            x, key = jax.vmap(model.encode)(number[chosen], kind[chosen])
            fixed, asked = lax.stop_gradient(keys), lax.stop_gradient(key)
            away = jnp.sum(asked**2, axis=1)[:, None] - 2 * asked @ fixed.T + jnp.sum(fixed**2, axis=1)
            away = jnp.where(chosen[:, None] == jnp.arange(rows), jnp.inf, away)
            _, found = lax.top_k(-away, near)
            scores, share = jax.vmap(model.predict)(x, key, keys[found], label[found])
            true = label[chosen]
            alike = jnp.sum(share * (label[found] == true[:, None]), axis=1)
            surprise = optax.softmax_cross_entropy_with_integer_labels(scores, true)
            return jnp.mean(surprise), (jax.nn.softmax(scores), found, alike)

        (value, (probs, found, alike)), slopes = loss(eqx.combine(p, rest))
        return value, jax.tree.leaves(eqx.filter(slopes, eqx.is_array)), probs, found, alike

    def weights(path, s):
        """This describes matrices [outputs, inputs], lengths of waves, gains and biases."""
        name = getattr(path[-1], "name", "")
        if name == "lengths":
            return normal(*s.shape, scale=0.1)
        if len(s.shape) == 1:
            return normal(*s.shape, scale=0.1, offset=1.0 if name == "weight" else 0.0)
        return normal(*s.shape, scale=s.shape[1] ** -0.5)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    inputs = normal(rows, numbers), integers(rows, kinds, below=levels), integers(rows, below=classes)
    return Built(run, (p, *inputs, integers(b, below=rows, distinct=True)))


@program("graph-u-net-top-k-pooled-and-unpooled-graphs-classifier-grad-haiku", GROUP)
def _graph_u_net(size: Size) -> Built:
    """This program gives slopes of a classifier of graphs that keeps fewer and fewer nodes and then puts them back.

    It is the graph U-Net (Gao, 2019; HongyangGao/Graph-U-Nets), with haiku: a learned direction scores nodes, the best stay, two
    steps join them, and on the way up nodes return to their old places beside what was there before.
    """
    import haiku as hk
    import optax

    b, nodes, edges, kinds, n, wide, classes = pick(
        size, (128, 180, 540, 32, 96, 256, 10), (24, 90, 220, 16, 56, 64, 6), (2, 8, 12, 3, 4, 6, 3)
    )
    dtype, ratios = half(size), (0.9, 0.7, 0.5)

    def gathered(x, at):
        """This takes nodes [b, nodes, n] at places [b, kept]."""
        return jnp.take_along_axis(x, at[..., None], axis=1)

    def normalised(joined):
        """This adds each node to its own neighbours twice and divides by the roots of degrees."""
        joined = joined.astype(jnp.float32) + 2 * jnp.eye(joined.shape[-1])
        root = lax.rsqrt(jnp.sum(joined, axis=-1))
        return (joined * root[:, None] * root[..., None]).astype(dtype)

    def convolved(x, joined, real, name):
        """This is one graph convolution."""
        x = hk.Linear(n, name=name)(normalised(joined) @ x)
        return jax.nn.elu(x) * real[..., None].astype(x.dtype)

    def net(kind, joined, real):
        """This gives scores of classes and which nodes the last pooling kept."""
        x = hk.Linear(n, name="enter")(jax.nn.one_hot(kind, kinds, dtype=dtype)) * real[..., None].astype(dtype)
        x = first = convolved(x, joined, real, "first")
        kept, down = None, []
        for level, ratio in enumerate(ratios):
            x = convolved(x, joined, real, f"down_{level}")
            way = hk.get_parameter(f"way_{level}", (n,), dtype, hk.initializers.RandomNormal())
            score = (x @ way).astype(jnp.float32) / jnp.linalg.norm(way.astype(jnp.float32))
            down.append((x, joined, real))
            _, at = lax.top_k(jnp.where(real, score, -1e9), max(int(nodes * ratio), 2))
            gate = jax.nn.sigmoid(jnp.take_along_axis(score, at, axis=1))
            real = jnp.take_along_axis(real, at, axis=1)
            x = gathered(x, at) * (gate * real)[..., None].astype(dtype)
            near = joined.astype(dtype)
            two = (near @ near + near) > 0
            joined = jnp.take_along_axis(gathered(two, at), at[:, None], axis=2)
            down[-1] += (at,)
            kept = at
        x = convolved(x, joined, real, "bottom")
        shown = [jnp.max(jnp.where(real[..., None], x, -1e4), axis=1)]
        for level, (before, joined, real, at) in reversed(list(enumerate(down))):
            back = jnp.zeros((b, before.shape[1], n), dtype).at[jnp.arange(b)[:, None], at].set(x)
            x = convolved(back + before, joined, real, f"up_{level}")
            many = jnp.maximum(jnp.sum(real, axis=1), 1)[:, None]
            shown.append((jnp.sum(x.astype(jnp.float32), axis=1) / many).astype(dtype))
        shown.append(jnp.max(jnp.where(real[..., None], x + first, -1e4), axis=1))
        y = jax.nn.elu(hk.Linear(wide, name="hidden")(jnp.concatenate(shown, axis=-1)))
        return hk.Linear(classes, name="head")(y).astype(jnp.float32), kept

    model = hk.without_apply_rng(hk.transform(net))
    shapes = jax.ShapeDtypeStruct((b, nodes), jnp.int32), jax.ShapeDtypeStruct((b, nodes, nodes), bool)
    structs = jax.eval_shape(model.init, jax.random.key(0), *shapes, jax.ShapeDtypeStruct((b, nodes), bool))

    def run(p, kind, ends, used, short, label):
        """This gives the loss, slopes and their length, right answers, and the nodes that stay longest."""
        real = jnp.arange(nodes) < nodes - short[:, None]
        one, two = ends[..., 0], ends[..., 1]
        row = jnp.arange(b)[:, None]
        good = used & real[row, one] & real[row, two] & (one != two)
        joined = jnp.zeros((b, nodes, nodes), bool).at[row, one, two].max(good).at[row, two, one].max(good)

        def loss(p):
            """This is the mean surprise of labels."""
            scores, kept = model.apply(p, kind, joined, real)
            surprise = optax.softmax_cross_entropy_with_integer_labels(scores, label)
            return jnp.mean(surprise), (jnp.mean(jnp.argmax(scores, axis=-1) == label), kept)

        (value, (right, kept)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        return value, slopes, optax.tree.norm(slopes), right, kept

    def weights(path, s):
        """This describes matrices, directions and biases."""
        near_zero = getattr(path[-1], "key", "") == "b"
        scale = 0.1 if near_zero else s.shape[0] ** -0.5
        return normal(*s.shape, dtype=dtype, scale=scale)

    p = jax.tree_util.tree_map_with_path(weights, structs)
    inputs = integers(b, nodes, below=kinds), integers(b, edges, 2, below=nodes), booleans(b, edges)
    return Built(run, (p, *inputs, integers(b, below=nodes // 2), integers(b, below=classes)))
