"""Retrieval, recommenders and an optimiser's step of the sixth set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight

GROUP = "sixth"


@program("splade-sparse-retrieval-loss-grad", GROUP)
def _splade(size: Size) -> Built:
    """This is the gradient of SPLADE's loss for sparse retrieval, from an encoder's output on, as its authors' code trains it.

    A head of masked language modelling gives logits over the vocabulary; their saturated logarithms are pooled by the maximum over
    a text's tokens; in-batch contrast, a teacher's margins and the regulariser of operations follow.
    """
    b, query, document, n, vocabulary = pick(size, (16, 30, 150, 768, 30522), (3, 12, 40, 96, 5003), (2, 3, 5, 6, 17))
    dtype = half(size)

    def head(p, x):
        y = jax.nn.gelu(x @ p["dense"] + p["dense_bias"], approximate=False).astype(jnp.float32)
        mean, var = jnp.mean(y, axis=-1, keepdims=True), jnp.var(y, axis=-1, keepdims=True)
        y = (y - mean) * lax.rsqrt(var + 1e-12) * p["scale"] + p["shift"]
        return y.astype(dtype) @ p["table"].T + p["bias"]

    def represent(p, x, length):
        seen = jnp.arange(x.shape[1])[None, :] < jnp.maximum(length, 1)[:, None]
        saturated = jnp.log1p(jax.nn.relu(head(p, x).astype(jnp.float32)))
        return jnp.max(saturated * seen[..., None], axis=1)

    def operations(representation):
        return jnp.sum(jnp.mean(jnp.abs(representation), axis=0) ** 2)

    def loss(p, queries, positive, negative, query_length, length, teacher):
        q = represent(p, queries, query_length)
        d = represent(p, jnp.concatenate([positive, negative], axis=0), length)
        scores = q @ d.T
        contrast = -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores, axis=-1)))
        own = jnp.diagonal(scores[:, :b]) - jnp.diagonal(scores[:, b:])
        margin = jnp.mean((own - teacher) ** 2)
        total = contrast + 0.05 * margin + 0.08 * operations(q) + 0.1 * operations(d)
        terms = jnp.mean(jnp.sum(d > 0, axis=-1))
        return total, {"contrast": contrast, "margin": margin, "terms": terms}

    params = {
        "dense": weight(n, n, dtype=dtype),
        "dense_bias": normal(n, dtype=dtype, scale=0.05),
        "scale": gain(n),
        "shift": normal(n, scale=0.05),
        "table": normal(vocabulary, n, dtype=dtype, scale=n**-0.5),
        "bias": normal(vocabulary, dtype=dtype, scale=0.3, offset=pick(size, -3.5, -3.0, -0.5)),
    }
    texts = (normal(b, query, n, dtype=dtype), normal(b, document, n, dtype=dtype), normal(b, document, n, dtype=dtype))
    lengths = (integers(b, below=query + 1), integers(2 * b, below=document + 1))
    return Built(
        jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True),
        (params, *texts, *lengths, normal(b, scale=2.0, offset=3.0)),
    )


@program("cross-network-two-task-clicks-grad", GROUP)
def _cross_network(size: Size) -> Built:
    """This is a step's gradient of a recommender of clicks and purchases, as advertisers train them.

    Hashed tables, a bag of recent items and numbers make the features; cross layers of DCN V2 with low-rank experts and gates
    follow, then a mixture of experts with a gate for each task, and the loss of ESMM over the whole space of impressions.
    """
    b, fields, rows, d, recent, numbers, rank, crosses, experts, wide = pick(
        size,
        (4096, 26, 20_000, 16, 20, 13, 64, 3, 4, 256),
        (512, 10, 1000, 8, 8, 7, 16, 3, 3, 64),
        (4, 3, 11, 4, 3, 2, 3, 3, 2, 6),
    )
    width, tasks = (fields + 1) * d + numbers, 2

    def features(p, category, history, counts):
        each = p["tables"][jnp.arange(fields), category]
        present = (history > 0).astype(jnp.float32)[..., None]
        bag = jnp.sum(p["items"][history] * present, axis=1) / jnp.maximum(jnp.sum(present, axis=1), 1.0)
        logged = jnp.log1p(counts.astype(jnp.float32))
        mean, var = jnp.mean(logged, axis=0), jnp.var(logged, axis=0)
        dense = (logged - mean) * lax.rsqrt(var + 1e-3) * p["number_scale"] + p["number_shift"]
        return jnp.concatenate([each.reshape(b, fields * d), bag, dense], axis=-1)

    def cross(p, first, x):
        gates = jax.nn.softmax(x @ p["gate"], axis=-1)
        low = jnp.tanh(jnp.einsum("bn,enr->ber", x, p["v"]))
        low = jnp.tanh(jnp.einsum("ber,ers->bes", low, p["c"]))
        out = first[:, None, :] * (jnp.einsum("ber,ern->ben", low, p["u"]) + p["bias"])
        return jnp.einsum("ben,be->bn", out, gates) + x

    def towers(p, x):
        shared = jax.nn.relu(jnp.einsum("bn,enf->bef", x, p["experts"]) + p["expert_bias"])
        gates = jax.nn.softmax(jnp.einsum("bn,nte->bte", x, p["gates"]), axis=-1)
        mixed = jnp.einsum("bte,bef->btf", gates, shared)
        y = jax.nn.relu(jnp.einsum("btf,tfg->btg", mixed, p["tower1"]) + p["tower_bias"])
        return jnp.einsum("btg,tg->bt", y, p["tower2"])

    def loss(p, category, history, counts, clicked, bought):
        first = features(p, category, history, counts)
        x = first
        for layer in p["crosses"]:
            x = cross(layer, first, x)
        logits = towers(p, x)
        click = jax.nn.log_sigmoid(logits[:, 0])
        both = click + jax.nn.log_sigmoid(logits[:, 1])
        clicked = (clicked == 0).astype(jnp.float32)
        bought = clicked * (bought == 0).astype(jnp.float32)
        not_both = jnp.log1p(-jnp.minimum(jnp.exp(both), 1.0 - 1e-6))
        of_click = -jnp.mean(clicked * click + (1.0 - clicked) * jax.nn.log_sigmoid(-logits[:, 0]))
        of_both = -jnp.mean(bought * both + (1.0 - bought) * not_both)
        return of_click + of_both, (jax.nn.sigmoid(logits[:, 0]), jnp.exp(both))

    layer = {
        "gate": weight(width, experts),
        "v": weight(experts, width, rank),
        "c": weight(experts, rank, rank),
        "u": weight(experts, rank, width),
        "bias": normal(experts, width, scale=0.05),
    }
    params = {
        "tables": normal(fields, rows, d, scale=0.3),
        "items": normal(rows, d, scale=0.3),
        "number_scale": gain(numbers),
        "number_shift": normal(numbers, scale=0.05),
        "crosses": [layer] * crosses,
        "experts": weight(experts, width, wide),
        "expert_bias": normal(experts, wide, scale=0.05),
        "gates": normal(width, tasks, experts, scale=width**-0.5),
        "tower1": weight(tasks, wide, wide // 2),
        "tower_bias": normal(tasks, wide // 2, scale=0.05),
        "tower2": normal(tasks, wide // 2, scale=0.1),
    }
    seen = (integers(b, fields, below=rows), integers(b, recent, below=rows), integers(b, numbers, below=1000))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *seen, integers(b, below=10), integers(b, below=3)))


@program("lightgcn-edge-dropout-pairs-grad", GROUP)
def _lightgcn(size: Size) -> Built:
    """This is the gradient of LightGCN's pairwise loss on a graph of users and items, as libraries of recommenders train it.

    Edges are dropped at random, embeddings go along the rest with weights of both degrees, the layers' mean is scored for pairs of
    an item that a user took and one that the user did not, with a penalty on the rows in use.
    """
    users, items, edges, n, layers, batch = pick(
        size, (20_000, 15_000, 250_000, 64, 3, 2048), (4000, 3000, 40_000, 32, 3, 512), (5, 4, 11, 3, 2, 3)
    )
    rate = 0.1

    def propagate(table_u, table_i, user, item, key):
        keep = jax.random.bernoulli(key, 1.0 - rate, (edges,)).astype(jnp.float32) / (1.0 - rate)
        one = jnp.ones(edges)
        of_user = jax.ops.segment_sum(one, user, users, indices_are_sorted=True)
        of_item = jax.ops.segment_sum(one, item, items)
        w = keep * lax.rsqrt(jnp.maximum(of_user, 1.0))[user] * lax.rsqrt(jnp.maximum(of_item, 1.0))[item]
        u, i = table_u, table_i
        all_u, all_i = [u], [i]
        for _ in range(layers):
            to_user = jax.ops.segment_sum(w[:, None] * i[item], user, users, indices_are_sorted=True)
            to_item = jax.ops.segment_sum(w[:, None] * u[user], item, items)
            u, i = to_user, to_item
            all_u.append(u)
            all_i.append(i)
        return jnp.mean(jnp.stack(all_u), axis=0), jnp.mean(jnp.stack(all_i), axis=0)

    def loss(params, user, item, who, liked, other, seed):
        u, i = propagate(params["users"], params["items"], user, item, jax.random.key(seed))
        first, good, bad = u[who], i[liked], i[other]
        apart = jnp.sum(first * good, axis=-1) - jnp.sum(first * bad, axis=-1)
        used = (params["users"][who], params["items"][liked], params["items"][other])
        penalty = sum(0.5 * jnp.sum(x**2) for x in used) / batch
        right = jnp.mean((apart > 0).astype(jnp.float32))
        return jnp.mean(jax.nn.softplus(-apart)) + 1e-4 * penalty, right

    params = {"users": normal(users, n, scale=0.3), "items": normal(items, n, scale=0.3)}
    graph = (integers(edges, below=users, ramp=True), integers(edges, below=items))
    pairs = (integers(batch, below=users), integers(batch, below=items), integers(batch, below=items))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *graph, *pairs, integers(below=1000)))


@program("adamw-eight-bit-blocks-update", GROUP)
def _eight_bit(size: Size) -> Built:
    """This is a step of AdamW whose moments are kept in eight bits by blocks, as bitsandbytes does and its ports.

    The norm of all gradients clips them; codes of 256 dynamic values times their block's largest make the moments, which are
    updated, used with the decay of weights, and put into the nearest codes again.
    """
    n, wide, block = pick(size, (1024, 4096, 256), (128, 300, 64), (4, 6, 8))
    shapes = {"attention": (n, 4 * n), "up": (n, wide), "down": (wide, n), "norm": (n,), "bias": (wide - 3,)}

    def dynamic_map(signed):
        """The values of the dynamic tree: a falling exponent, and fractions of it."""
        values = []
        for i in range(7):
            steps = 2 ** (i + (0 if signed else 1))
            edges = np.linspace(0.1, 1.0, steps + 1)
            middle = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (i - 6)
            values += [*middle, *(-middle if signed else ())]
        values = [*values, 0.0, 1.0]
        return np.sort(np.array(values + [1.0] * (256 - len(values)), np.float32))

    maps = {"first": dynamic_map(True), "second": dynamic_map(False)}

    def unpack(state, values, shape):
        count = int(np.prod(shape))
        wide = jnp.asarray(values)[state["codes"]] * state["largest"][:, None]
        return wide.reshape(-1)[:count].reshape(shape)

    def pack(x, values):
        flat = jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)
        largest = jnp.max(jnp.abs(flat), axis=-1)
        scaled = flat / jnp.maximum(largest, 1e-12)[:, None]
        codes = jnp.searchsorted(jnp.asarray((values[1:] + values[:-1]) / 2.0), scaled)
        return {"codes": codes.astype(jnp.uint8), "largest": largest}

    def update(params, gradients, state, count, rate):
        total = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients))
        clip = jnp.minimum(1.0, 1.0 / (jnp.sqrt(total) + 1e-6))
        after = count.astype(jnp.float32) + 1.0
        rate = jax.nn.sigmoid(rate) * 1e-3 * jnp.minimum(1.0, after / 100.0)
        new_params, new_state = {}, {}
        for name, p in params.items():
            g = gradients[name].astype(jnp.float32) * clip
            m = 0.9 * unpack(state[name]["first"], maps["first"], p.shape) + 0.1 * g
            v = 0.995 * unpack(state[name]["second"], maps["second"], p.shape) + 0.005 * g * g
            step = m / (1.0 - 0.9**after) / (jnp.sqrt(v / (1.0 - 0.995**after)) + 1e-8)
            decay = 0.1 if p.ndim > 1 else 0.0
            new_params[name] = p - rate * (step + decay * p)
            new_state[name] = {"first": pack(m, maps["first"]), "second": pack(v, maps["second"])}
        return new_params, new_state, count + 1, jnp.sqrt(total)

    def moment(shape, scale, offset):
        blocks = -(-int(np.prod(shape)) // block)
        codes = Random((blocks, block), jnp.dtype(jnp.uint8), below=256)
        return {"codes": codes, "largest": normal(blocks, scale=scale, offset=offset)}

    params = {name: weight(*s) if len(s) > 1 else gain(*s) for name, s in shapes.items()}
    gradients = {name: normal(*s, dtype=half(size), scale=0.01) for name, s in shapes.items()}
    state = {name: {"first": moment(s, 1e-4, 1e-3), "second": moment(s, 1e-7, 1e-6)} for name, s in shapes.items()}
    return Built(update, (params, gradients, state, integers(below=1000), normal()))
