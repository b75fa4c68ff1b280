"""Programs of the inference and training of language models, by an author who knew nothing of the package."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight

GROUP = "second"


def _rms_norm(x, scale, eps=1e-6):
    x32 = x.astype(jnp.float32)
    var = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * lax.rsqrt(var + eps)).astype(x.dtype) * scale


def _layer_norm(x, p, eps=1e-7):
    x32 = x.astype(jnp.float32)
    mu = x32.mean(-1, keepdims=True)
    var = jnp.square(x32 - mu).mean(-1, keepdims=True)
    return ((x32 - mu) / jnp.sqrt(var + eps) * p["scale"] + p["bias"]).astype(x.dtype)


def _rotate(x, positions, base):
    """Rotary embedding of the two halves of x[..., length, heads, size]."""
    d = x.shape[-1]
    inv_freq = 1.0 / base ** (jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    angle = positions[..., None].astype(jnp.float32) * inv_freq
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@program("gpt-oss-window-sink-layer", GROUP)
def _gpt_oss(size: Size) -> Built:
    """A GPT-OSS decoder layer: grouped heads with biases, a window, learnt sinks, then a clamped interleaved GLU."""
    batch, seq, n, heads, kv, d, window = pick(
        size, (1, 1500, 2880, 64, 8, 64, 128), (1, 300, 360, 8, 2, 32, 48), (1, 7, 8, 4, 2, 4, 3)
    )
    dtype, hidden = half(size), n
    group = heads // kv

    def swiglu(x, alpha=1.702, limit=7.0):
        x_glu, x_linear = x[..., ::2], x[..., 1::2]
        x_glu = jnp.minimum(x_glu, limit)
        x_linear = jnp.clip(x_linear, -limit, limit)
        return x_glu * jax.nn.sigmoid(alpha * x_glu) * (x_linear + 1)

    def layer(p, x):
        positions = jnp.arange(seq)
        qkv = _rms_norm(x, p["attn_norm"]) @ p["qkv_w"] + p["qkv_b"]
        q, k, v = jnp.split(qkv, [heads * d, (heads + kv) * d], axis=-1)
        q = _rotate(q.reshape(batch, seq, heads, d), positions, 150000.0).reshape(batch, seq, kv, group, d)
        k = _rotate(k.reshape(batch, seq, kv, d), positions, 150000.0)
        v = v.reshape(batch, seq, kv, d)
        qk = jnp.einsum("bqhmd,bkhd->bhmqk", q, k, preferred_element_type=jnp.float32) * d**-0.5
        mask = jnp.triu(jnp.full((seq, seq), -jnp.inf), 1) + jnp.tril(jnp.full((seq, seq), -jnp.inf), -window)
        sinks = jnp.broadcast_to(p["sinks"].reshape(1, kv, group, 1, 1), (batch, kv, group, seq, 1))
        w = jax.nn.softmax(jnp.concatenate([qk + mask, sinks], axis=-1), axis=-1)[..., :-1]
        attn = jnp.einsum("bhmqk,bkhd->bqhmd", w.astype(dtype), v).reshape(batch, seq, heads * d)
        x = x + attn @ p["out_w"] + p["out_b"]
        h = swiglu(_rms_norm(x, p["mlp_norm"]) @ p["mlp1_w"] + p["mlp1_b"])
        return x + h @ p["mlp2_w"] + p["mlp2_b"]

    width = (heads + 2 * kv) * d
    params = {"attn_norm": gain(n, dtype), "mlp_norm": gain(n, dtype), "sinks": normal(heads)}
    params |= {"qkv_w": weight(n, width, dtype=dtype), "qkv_b": normal(width, dtype=dtype, scale=0.1)}
    params |= {"out_w": weight(heads * d, n, dtype=dtype), "out_b": normal(n, dtype=dtype, scale=0.1)}
    params |= {"mlp1_w": weight(n, 2 * hidden, dtype=dtype), "mlp1_b": normal(2 * hidden, dtype=dtype, scale=0.1)}
    params |= {"mlp2_w": weight(hidden, n, dtype=dtype), "mlp2_b": normal(n, dtype=dtype, scale=0.1)}
    return Built(layer, (params, normal(batch, seq, n, dtype=dtype)))


@program("ring-cache-prefill-chunk", GROUP)
def _ring(size: Size) -> Built:
    """A chunk of a prompt is written into a ring of keys (transposed) and values, and attends to all it may see."""
    batch, chunk, ring, n, heads, kv, d = pick(
        size, (2, 256, 6000, 2560, 32, 8, 80), (2, 48, 1500, 320, 8, 2, 80), (2, 3, 7, 8, 4, 2, 4)
    )
    dtype = half(size)
    window = ring - chunk

    def one(p, x, k_cache, v_cache, start):
        positions = start + jnp.arange(chunk)
        h = _rms_norm(x, p["norm"])
        q = _rotate((h @ p["q"]).reshape(chunk, heads, d), positions, 10000.0)
        k = _rotate((h @ p["k"]).reshape(chunk, kv, d), positions, 10000.0)
        v = (h @ p["v"]).reshape(chunk, kv, d)
        slots = positions % ring
        k_cache = k_cache.at[:, :, slots].set(jnp.transpose(k, (1, 2, 0)))
        v_cache = v_cache.at[:, slots, :].set(jnp.transpose(v, (1, 0, 2)))
        last = start + chunk - 1
        held = last - jnp.mod(last - jnp.arange(ring), ring)
        age = positions[:, None] - held[None, :]
        visible = (held >= 0)[None, :] & (age >= 0) & (age < window)
        q = jnp.transpose(q.reshape(chunk, kv, heads // kv, d), (1, 2, 0, 3)) / jnp.asarray(d**0.5, dtype)
        scores = jnp.einsum("hgqd,hdk->hgqk", q, k_cache).astype(jnp.float32)
        scores = jnp.where(visible, scores, -2.0e38)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("hgqk,hkd->hgqd", probs, v_cache)
        out = jnp.transpose(mixed, (2, 0, 1, 3)).reshape(chunk, heads * d) @ p["o"]
        return x + out, k_cache, v_cache

    def prefill(p, x, k_cache, v_cache, start):
        return jax.vmap(one, in_axes=(None, 0, 0, 0, 0))(p, x, k_cache, v_cache, start)

    params = {"norm": gain(n, dtype), "q": weight(n, heads * d, dtype=dtype), "o": weight(heads * d, n, dtype=dtype)}
    params |= {"k": weight(n, kv * d, dtype=dtype), "v": weight(n, kv * d, dtype=dtype)}
    caches = normal(batch, kv, d, ring, dtype=dtype), normal(batch, kv, ring, d, dtype=dtype)
    return Built(prefill, (params, normal(batch, chunk, n, dtype=dtype), *caches, integers(batch, below=3 * ring)))


@program("moe-sorted-capacity", GROUP)
def _moe(size: Size) -> Built:
    """Qwen1.5-MoE: pairs sorted by expert, packed up to a capacity, scattered back, plus a gated shared expert."""
    tokens, n, experts, top, hidden, shared = pick(
        size, (2048, 2048, 60, 4, 1408, 5632), (300, 160, 12, 4, 112, 320), (6, 8, 3, 2, 4, 8)
    )
    dtype = half(size)
    capacity = max(1, int(1.25 * tokens * top / experts))

    def moe(p, x):
        router_logits = x.astype(jnp.float32) @ p["router"]
        probs = jax.nn.softmax(router_logits, axis=-1)
        weights, chosen = lax.top_k(probs, top)
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        expert, token = flat[order], order // top
        counts = jnp.bincount(flat, length=experts)
        first = jnp.cumsum(counts) - counts
        place = jnp.arange(tokens * top) - first[expert]
        kept = place < capacity
        slot = jnp.where(kept, expert * capacity + place, experts * capacity)
        packed = jnp.zeros((experts * capacity + 1, n), dtype).at[slot].set(x[token])
        packed = packed[:-1].reshape(experts, capacity, n)
        h = jax.nn.silu(jnp.einsum("ecn,enh->ech", packed, p["gate"])) * jnp.einsum("ecn,enh->ech", packed, p["up"])
        out = jnp.einsum("ech,ehn->ecn", h, p["down"]).reshape(experts * capacity, n)
        out = jnp.concatenate([out, jnp.zeros((1, n), dtype)])[slot]
        scale = jnp.where(kept, weights.reshape(-1)[order], 0.0)
        routed = jnp.zeros((tokens, n), jnp.float32).at[token].add(out.astype(jnp.float32) * scale[:, None])
        common = (jax.nn.silu(x @ p["shared_gate"]) * (x @ p["shared_up"])) @ p["shared_down"]
        common = jax.nn.sigmoid(x @ p["shared_router"]) * common
        load = jnp.mean(jax.nn.one_hot(chosen, experts).sum(1), 0)
        return x + routed.astype(dtype) + common, experts * jnp.sum(load * probs.mean(0))

    params = {"router": weight(n, experts), "shared_router": weight(n, 1, dtype=dtype)}
    params |= {k: weight(experts, n, hidden, dtype=dtype) for k in ("gate", "up")}
    params |= {"down": weight(experts, hidden, n, dtype=dtype), "shared_down": weight(shared, n, dtype=dtype)}
    params |= {k: weight(n, shared, dtype=dtype) for k in ("shared_gate", "shared_up")}
    return Built(moe, (params, normal(tokens, n, dtype=dtype)))


@program("rwkv6-time-mix-scan", GROUP)
def _rwkv(size: Size) -> Built:
    """RWKV-6 time mixing: shifts by low-rank maps of the data, a decaying state scanned, then norms of heads."""
    batch, seq, heads, d, rank, decay_rank = pick(
        size, (8, 128, 40, 64, 32, 64), (3, 93, 8, 40, 16, 24), (2, 4, 2, 4, 3, 2)
    )
    n = heads * d
    dtype = half(size)

    def mix(p, x, last, state):
        xx = jnp.concatenate([last[None], x[:-1]]) - x
        low = jnp.tanh((x + xx * p["maa_x"]) @ p["maa_w1"]).reshape(seq, 5, rank)
        shift = p["maa"][:, None, :] + jnp.einsum("tfr,frn->ftn", low, p["maa_w2"])
        xw, xk, xv, xr, xg = x + xx * shift
        r, k, v = ((y @ p[name]).reshape(seq, heads, d) for y, name in ((xr, "r"), (xk, "k"), (xv, "v")))
        g = jax.nn.silu(xg @ p["g"])
        w = p["decay"] + (jnp.tanh(xw @ p["decay_w1"]) @ p["decay_w2"]).astype(jnp.float32)
        w = jnp.exp(-jnp.exp(w)).reshape(seq, heads, d)

        def step(s, rkvw):
            r_t, k_t, v_t, w_t = rkvw
            kv = k_t[:, :, None] * v_t[:, None, :]
            y = jnp.einsum("hk,hkv->hv", r_t, s + p["bonus"][:, :, None] * kv)
            return s * w_t[:, :, None] + kv, y

        state, y = lax.scan(step, state, tuple(t.astype(jnp.float32) for t in (r, k, v, w)))
        mu = y.mean(-1, keepdims=True)
        y = (y - mu) / jnp.sqrt(y.var(-1, keepdims=True) + 64e-5)
        y = (y.reshape(seq, n) * p["ln_scale"] + p["ln_bias"]).astype(dtype)
        return (y * g) @ p["o"], x[-1], state

    def block(p, x, last, state):
        return jax.vmap(mix, in_axes=(None, 0, 0, 0))(p, x, last, state)

    params = {name: weight(n, n, dtype=dtype) for name in "rkvgo"}
    params |= {"maa_x": normal(n, dtype=dtype, scale=0.3, offset=0.5), "maa": normal(5, n, dtype=dtype, scale=0.3)}
    params |= {"maa_w1": weight(n, 5 * rank, dtype=dtype), "maa_w2": weight(5, rank, n, dtype=dtype)}
    params |= {"decay_w1": weight(n, decay_rank, dtype=dtype), "decay_w2": weight(decay_rank, n, dtype=dtype)}
    params |= {"decay": normal(n, offset=-3.0), "bonus": normal(heads, d, scale=0.5)}
    params |= {"ln_scale": gain(n), "ln_bias": normal(n, scale=0.05)}
    states = normal(batch, n, dtype=dtype), normal(batch, heads, d, d, scale=0.3)
    return Built(block, (params, normal(batch, seq, n, dtype=dtype), *states))


@program("deberta-reranker-layer", GROUP)
def _deberta(size: Size) -> Built:
    """A cross-encoder's last layer: disentangled attention by gathers over log buckets, then the pooled score."""
    batch, seq, n, heads, buckets, longest = pick(
        size, (16, 333, 1024, 16, 256, 512), (2, 111, 256, 4, 64, 512), (2, 6, 8, 2, 4, 12)
    )
    dtype = half(size)
    d = n // heads

    def log_bucket(relative):
        mid = buckets // 2
        sign = jnp.sign(relative)
        close = (relative < mid) & (relative > -mid)
        length = jnp.where(close, mid - 1, jnp.abs(relative)).astype(jnp.float32)
        far = jnp.ceil(jnp.log(length / mid) / jnp.log((longest - 1) / mid) * (mid - 1)) + mid
        return jnp.where(length <= mid, relative, far.astype(jnp.int32) * sign)

    def split(t):
        return jnp.moveaxis(t.reshape(*t.shape[:-1], heads, d), -2, -3)

    def attention(p, x, seen):
        q, k, v = (split(x @ p[name] + p[name + "_b"]) for name in ("q", "k", "v"))
        table = _layer_norm(p["relative"], p["relative_norm"])
        pos_q, pos_k = split(table @ p["q"] + p["q_b"]), split(table @ p["k"] + p["k_b"])
        scale = 1.0 / np.sqrt(3.0 * d)
        distance = log_bucket(jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :])
        c2p_index = jnp.clip(distance + buckets, 0, 2 * buckets - 1)
        p2c_index = jnp.clip(buckets - distance, 0, 2 * buckets - 1).T
        shape = (batch, heads, seq, seq)
        c2p = jnp.take_along_axis(jnp.einsum("bhqd,hpd->bhqp", q, pos_k), jnp.broadcast_to(c2p_index, shape), axis=-1)
        p2c = jnp.take_along_axis(jnp.einsum("bhkd,hpd->bhkp", k, pos_q), jnp.broadcast_to(p2c_index, shape), axis=-1)
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) + c2p + jnp.swapaxes(p2c, -1, -2)
        both = seen[:, None, :, None] & seen[:, None, None, :]
        scores = jnp.where(both, scores.astype(jnp.float32) * scale, jnp.finfo(jnp.float32).min)
        probs = jnp.where(both, jax.nn.softmax(scores, axis=-1), 0.0).astype(dtype)
        return jnp.moveaxis(probs @ v, 1, 2).reshape(batch, seq, n)

    def rerank(p, x, seen):
        h = _layer_norm(x + attention(p, x, seen) @ p["o"] + p["o_b"], p["norm1"])
        ffn = jax.nn.gelu(h @ p["up"] + p["up_b"], approximate=False) @ p["down"] + p["down_b"]
        h = _layer_norm(h + ffn, p["norm2"])
        pooled = jax.nn.gelu(h[:, 0] @ p["pool"] + p["pool_b"], approximate=False)
        return h, jax.nn.sigmoid((pooled @ p["classify"]).astype(jnp.float32))[:, 0]

    params = {name: weight(n, n, dtype=dtype) for name in ("q", "k", "v", "o", "pool")}
    params |= {name + "_b": normal(n, dtype=dtype, scale=0.1) for name in ("q", "k", "v", "o", "pool", "down")}
    params |= {"up": weight(n, 4 * n, dtype=dtype), "up_b": normal(4 * n, dtype=dtype, scale=0.1)}
    params |= {"down": weight(4 * n, n, dtype=dtype), "classify": weight(n, 1, dtype=dtype)}
    params |= {"relative": normal(2 * buckets, n, dtype=dtype)}
    norm = {"scale": gain(n), "bias": normal(n, scale=0.05)}
    params |= {"norm1": norm, "norm2": norm, "relative_norm": norm}
    return Built(rerank, (params, normal(batch, seq, n, dtype=dtype), booleans(batch, seq)))


@program("medusa-tree-verification", GROUP)
def _medusa(size: Size) -> Built:
    """A tree of drafted tokens attends to cache and ancestors; typical acceptance picks the longest path."""
    batch, nodes, cache, n, heads, kv, d, vocab = pick(
        size, (4, 61, 2100, 3072, 32, 8, 96, 50257), (2, 31, 700, 384, 4, 2, 96, 12003), (2, 5, 6, 8, 4, 2, 4, 11)
    )
    dtype = half(size)
    parent = np.maximum((np.arange(nodes) - 1) // 3, 0)
    ancestors = np.eye(nodes, dtype=bool)
    for i in range(1, nodes):
        ancestors[i] |= ancestors[parent[i]]
    depth = ancestors.sum(1) - 1
    leaves = [i for i in range(1, nodes) if i not in parent[1:]]
    paths = np.full((len(leaves), depth.max() + 1), -1)
    for row, leaf in enumerate(leaves):
        line = np.flatnonzero(ancestors[leaf])
        paths[row, : len(line)] = line

    def verify(p, x, tokens, k_cache, v_cache, lengths):
        h = _rms_norm(x, p["norm"])
        positions = lengths[:, None] + jnp.asarray(depth)[None, :]
        q = _rotate((h @ p["q"]).reshape(batch, nodes, heads, d), positions, 10000.0)
        k = _rotate((h @ p["k"]).reshape(batch, nodes, kv, d), positions, 10000.0)
        v = (h @ p["v"]).reshape(batch, nodes, kv, d)
        keys = jnp.repeat(jnp.concatenate([k_cache, k], axis=1), heads // kv, axis=2)
        values = jnp.repeat(jnp.concatenate([v_cache, v], axis=1), heads // kv, axis=2)
        past = jnp.broadcast_to(jnp.arange(cache) < lengths[:, None, None], (batch, nodes, cache))
        tree = jnp.broadcast_to(jnp.asarray(ancestors), (batch, nodes, nodes))
        mask = jnp.concatenate([past, tree], axis=-1)[:, None]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys, preferred_element_type=jnp.float32) / np.sqrt(d)
        probs = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, values).reshape(batch, nodes, heads * d) @ p["o"]
        logits = jnp.dot(_rms_norm(x, p["final_norm"]), p["head"], preferred_element_type=jnp.float32)

        posterior = jax.nn.softmax(logits / 0.7, axis=-1)
        entropy = -jnp.sum(posterior * jnp.log(posterior + 1e-5), axis=-1)
        threshold = jnp.minimum(0.09, 0.3 * jnp.exp(-entropy))
        of_node = jnp.take_along_axis(posterior[:, parent], tokens[..., None], axis=-1)[..., 0]
        fine = (of_node > threshold[:, parent]).at[:, 0].set(True)
        along = jnp.where(paths >= 0, fine[:, np.maximum(paths, 0)], False)
        length = jnp.sum(jnp.cumprod(along.astype(jnp.int32), axis=-1), axis=-1)
        best = jnp.argmax(length, axis=-1)
        accepted = jnp.take_along_axis(length, best[:, None], axis=1)[:, 0]
        end = jnp.asarray(paths)[best, accepted - 1]
        following = jnp.argmax(jnp.take_along_axis(logits, end[:, None, None], axis=1)[:, 0], axis=-1)
        return best, accepted, following, k, v

    params = {"q": weight(n, heads * d, dtype=dtype), "o": weight(heads * d, n, dtype=dtype)}
    params |= {"k": weight(n, kv * d, dtype=dtype), "v": weight(n, kv * d, dtype=dtype)}
    params |= {"head": weight(n, vocab, dtype=dtype), "norm": gain(n, dtype), "final_norm": gain(n, dtype)}
    states = normal(batch, cache, kv, d, dtype=dtype)
    inputs = normal(batch, nodes, n, dtype=dtype), integers(batch, nodes, below=vocab)
    return Built(verify, (params, *inputs, states, states, integers(batch, below=cache)))


@program("colbert-late-interaction-grad", GROUP)
def _colbert(size: Size) -> Built:
    """The gradient of ColBERT's loss: the sum over query tokens of the best match in each of all documents."""
    queries, documents, q_len, d_len, n, dim = pick(
        size, (64, 128, 32, 220, 768, 128), (6, 12, 32, 110, 192, 64), (2, 4, 3, 5, 8, 4)
    )
    dtype = half(size)

    def embed(w, hidden):
        e = (hidden @ w).astype(jnp.float32)
        return (e / jnp.maximum(jnp.linalg.norm(e, axis=-1, keepdims=True), 1e-6)).astype(dtype)

    def loss(w, query_hidden, doc_hidden, doc_mask):
        q, c = embed(w, query_hidden), embed(w, doc_hidden)
        sim = jnp.einsum("qid,cjd->qcij", q, c, preferred_element_type=jnp.float32)
        sim = jnp.where(doc_mask[None, :, None, :], sim, -9999.0)
        score = sim.max(axis=-1).sum(axis=-1)
        target = jnp.arange(queries) * (documents // queries)
        picked = jnp.take_along_axis(score, target[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(score, axis=-1) - picked)

    def step(w, query_hidden, doc_hidden, doc_mask):
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(w, query_hidden, doc_hidden, doc_mask)

    hidden = normal(queries, q_len, n, dtype=dtype), normal(documents, d_len, n, dtype=dtype)
    return Built(step, (weight(n, dim, dtype=dtype), *hidden, booleans(documents, d_len)))


@program("bigbird-block-sparse-attention", GROUP)
def _bigbird(size: Size) -> Built:
    """BigBird: a block of queries sees the first and last blocks, neighbours and random ones, repeats masked."""
    batch, blocks, block, heads, d = pick(size, (2, 44, 80, 12, 64), (1, 11, 48, 4, 64), (2, 6, 2, 2, 4))
    dtype = half(size)
    seq = blocks * block

    def plain(q, k, v, valid):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) * d**-0.5
        s = s + (1.0 - valid[:, None, None, :].astype(jnp.float32)) * -10000.0
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, -1).astype(dtype), v)

    def attention(q, k, v, valid, random_blocks):
        q, k, v = (jnp.transpose(t, (0, 2, 1, 3)) for t in (q, k, v))
        qb, kb, vb = (t.reshape(batch, heads, blocks, block, d) for t in (q, k, v))
        here = jnp.arange(blocks)
        fixed = jnp.stack([jnp.zeros_like(here), here * 0 + blocks - 1, here - 1, here, here + 1], -1) % blocks
        index = jnp.concatenate([jnp.broadcast_to(fixed, (heads, blocks, 5)), random_blocks], axis=-1)
        earlier = jnp.tril(jnp.ones((8, 8), bool), -1)
        repeated = jnp.any((index[..., :, None] == index[..., None, :]) & earlier, axis=-1)

        def of_head(t, i):
            return t[:, i].reshape(batch, blocks, 8 * block, d)

        keys = jax.vmap(of_head, in_axes=(1, 0), out_axes=1)(kb, index)
        values = jax.vmap(of_head, in_axes=(1, 0), out_axes=1)(vb, index)
        live = valid.reshape(batch, blocks, block)[:, index] & ~repeated[None, ..., None]
        live = live.reshape(batch, heads, blocks, 1, 8 * block)
        scores = jnp.einsum("bhnqd,bhnkd->bhnqk", qb, keys).astype(jnp.float32) / jnp.sqrt(jnp.float32(d))
        scores = jnp.where(live, scores, -1.0e9)
        middle = jnp.einsum("bhnqk,bhnkd->bhnqd", jax.nn.softmax(scores, axis=-1).astype(dtype), values)
        first, last = plain(qb[:, :, 0], k, v, valid), plain(qb[:, :, -1], k, v, valid)
        out = jnp.concatenate([first[:, :, None], middle[:, :, 1:-1], last[:, :, None]], axis=2)
        out = out * valid.reshape(batch, 1, blocks, block, 1).astype(dtype)
        return jnp.transpose(out.reshape(batch, heads, seq, d), (0, 2, 1, 3)).reshape(batch, seq, heads * d)

    x = normal(batch, seq, heads, d, dtype=dtype)
    return Built(attention, (x, x, x, booleans(batch, seq), integers(heads, blocks, 3, below=blocks)))


@program("packed-int4-group-mlp", GROUP)
def _int4(size: Size) -> Built:
    """A gated MLP of a few tokens; weights of four bits, eight to an integer, with scales and zeros per group."""
    rows, n, hidden, group = pick(size, (12, 3584, 18944, 128), (12, 1792, 2432, 64), (3, 16, 24, 8))
    dtype = half(size)

    def unpack(packed, axis):
        shifts = jnp.arange(0, 32, 4, dtype=jnp.int32)
        shape = [1] * (packed.ndim + 1)
        shape[axis + 1] = 8
        nibbles = jnp.bitwise_and(jnp.right_shift(jnp.expand_dims(packed, axis + 1), shifts.reshape(shape)), 15)
        merged = list(packed.shape)
        merged[axis] *= 8
        return nibbles.reshape(merged)

    def dequantise(w):
        q, zeros = unpack(w["qweight"], 0), unpack(w["qzeros"], 1)
        inputs, outputs = q.shape
        q = q.reshape(inputs // group, group, outputs) - zeros[:, None, :]
        return (q.astype(dtype) * w["scales"][:, None, :]).reshape(inputs, outputs)

    def mlp(p, x):
        h = _rms_norm(x, p["norm"])
        gate, up = jnp.split(h @ dequantise(p["gate_up"]), 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ dequantise(p["down"])

    def packed(inputs, outputs):
        unit = inputs**-0.5 / 6.5
        return {
            "qweight": integers(inputs // 8, outputs, below=2**31 - 1),
            "qzeros": integers(inputs // group, outputs // 8, below=2**31 - 1),
            "scales": normal(inputs // group, outputs, dtype=dtype, scale=0.2 * unit, offset=unit),
        }

    params = {"norm": gain(n, dtype), "gate_up": packed(n, 2 * hidden), "down": packed(hidden, n)}
    return Built(mlp, (params, normal(rows, n, dtype=dtype)))


@program("logit-lens-map", GROUP)
def _lens(size: Size) -> Built:
    """GPT-2's head on every layer's residual, by a map: divergence from the last, entropy, the target's loss."""
    layers, tokens, n, vocab = pick(size, (12, 255, 768, 50257), (3, 40, 256, 10007), (2, 3, 8, 11))
    dtype = half(size)

    def lens(p, residuals, final, targets):
        def logits_of(h):
            return jnp.einsum(
                "td,vd->tv", _layer_norm(h, p["norm"], 1e-5), p["wte"], preferred_element_type=jnp.float32
            )

        final_logp = jax.nn.log_softmax(logits_of(final), axis=-1)

        def one(args):
            h, bias = args
            logits = logits_of(h + bias)
            logp = jax.nn.log_softmax(logits, axis=-1)
            kl = jnp.sum(jnp.exp(final_logp) * (final_logp - logp), axis=-1)
            entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            own = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
            return kl, entropy, -own, jnp.max(logp, axis=-1)

        return lax.map(one, (residuals, p["translator"]))

    params = {
        "norm": {"scale": gain(n), "bias": normal(n, scale=0.05)},
        "wte": normal(vocab, n, dtype=dtype, scale=0.1),
    }
    params |= {"translator": normal(layers, n, dtype=dtype, scale=0.1)}
    states = normal(layers, tokens, n, dtype=dtype), normal(tokens, n, dtype=dtype)
    return Built(lens, (params, *states, integers(tokens, below=vocab)))
