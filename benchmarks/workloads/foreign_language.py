"""Routers, chunked recurrences and sampling of language models, as users write them who knew nothing of the package."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.foreign_attention import _rms, _rms_one_plus
from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight


@program("mixtral-top2-dispatch-einsum", "foreign-language")
def _top2(size: Size) -> Built:
    """Two experts for each token, with one-hot dispatch, a capacity, and the loss that balances the load."""
    groups, seq, n, hidden, experts = pick(size, (4, 1024, 1024, 2816, 8), (1, 256, 256, 512, 4), (2, 8, 8, 16, 4))
    dtype = half(size)
    capacity = max(4, int(2 * seq * 1.25 / experts))

    def moe(x: Any, router: Any, wi_0: Any, wi_1: Any, wo: Any) -> Any:
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x.astype(jnp.float32), router), axis=-1)
        index_1 = jnp.argmax(gates, axis=-1)
        mask_1 = jax.nn.one_hot(index_1, experts, dtype=jnp.float32)
        without = gates * (1 - mask_1)
        mask_2 = jax.nn.one_hot(jnp.argmax(without, axis=-1), experts, dtype=jnp.float32)
        aux = jnp.mean(gates.mean(1) * mask_1.mean(1)) * experts * experts

        place_1 = jnp.cumsum(mask_1, axis=1) * mask_1 - mask_1
        mask_1 = mask_1 * (place_1 < capacity)
        place_2 = (jnp.cumsum(mask_2, axis=1) - 1 + mask_1.sum(1, keepdims=True)) * mask_2
        mask_2 = mask_2 * (place_2 < capacity)
        gate_1, gate_2 = (gates * mask_1).sum(-1), (gates * mask_2).sum(-1)
        total = gate_1 + gate_2
        total = jnp.where(total > 0, total, 1.0)
        gate_1, gate_2 = gate_1 / total, gate_2 / total

        def spread(gate: Any, mask: Any, place: Any) -> Any:
            slot = jax.nn.one_hot((place * mask).sum(-1).astype(jnp.int32), capacity, dtype=jnp.float32)
            return gate[..., None, None] * mask[..., None] * slot[:, :, None, :]

        combine = spread(gate_1, mask_1, place_1) + spread(gate_2, mask_2, place_2)
        dispatch = (combine > 0).astype(x.dtype)
        inputs = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        h = jax.nn.silu(jnp.einsum("egcm,emh->egch", inputs, wi_0)) * jnp.einsum("egcm,emh->egch", inputs, wi_1)
        outputs = jnp.einsum("egch,ehm->egcm", h, wo)
        return jnp.einsum("gsec,egcm->gsm", combine.astype(x.dtype), outputs), aux

    up, down = weight(experts, n, hidden, dtype=dtype), weight(experts, hidden, n, dtype=dtype)
    return Built(moe, (normal(groups, seq, n, dtype=dtype), weight(n, experts), up, up, down))


@program("expert-choice-routing", "foreign-language")
def _expert_choice(size: Size) -> Built:
    """Each expert picks its tokens with top_k; one-hot gather, a two-layer expert, and a weighted scatter."""
    groups, seq, n, hidden, experts = pick(size, (8, 512, 768, 3072, 16), (2, 256, 384, 768, 8), (2, 8, 8, 16, 4))
    dtype = half(size)
    capacity = 2 * seq // experts

    def route(x: Any, router: Any, norm: Any, wi: Any, bias: Any, wo: Any) -> Any:
        h = _rms(x, norm)
        logits = lax.dot_general(h.astype(jnp.float32), router, (((2,), (0,)), ((), ())))
        probs = jax.nn.softmax(logits, axis=-1)
        gate, index = lax.top_k(jnp.swapaxes(probs, 1, 2), capacity)
        permutation = jax.nn.one_hot(index, seq, dtype=h.dtype)
        picked = jnp.einsum("gecs,gsd->gecd", permutation, h)

        def expert(tokens: Any, w_in: Any, b_in: Any, w_out: Any) -> Any:
            return jax.nn.gelu(tokens @ w_in + b_in, approximate=False) @ w_out

        done = jax.vmap(expert, in_axes=(1, 0, 0, 0), out_axes=1)(picked, wi, bias, wo)
        done = done * gate[..., None].astype(done.dtype)
        return x + jnp.einsum("gecs,gecd->gsd", permutation, done)

    up, down = weight(experts, n, hidden, dtype=dtype), weight(experts, hidden, n, dtype=dtype)
    bias = normal(experts, hidden, dtype=dtype, scale=0.1)
    return Built(route, (normal(groups, seq, n, dtype=dtype), weight(n, experts), gain(n, dtype), up, bias, down))


@program("mamba2-segsum-chunks", "foreign-language")
def _mamba2(size: Size) -> Built:
    """The state-space dual in chunks: segment sums, products inside the chunks, states passed between them."""
    batch, length, heads, d, states, chunk = pick(
        size, (2, 2048, 24, 64, 128, 256), (1, 1024, 12, 64, 64, 128), (1, 8, 2, 4, 4, 4)
    )
    dtype = half(size)
    chunks = length // chunk

    def segsum(x: Any) -> Any:
        t = x.shape[-1]
        x = jnp.repeat(x[..., None], t, axis=-1)
        x = jnp.where(jnp.tril(jnp.ones((t, t), dtype=bool), k=-1), x, 0)
        total = jnp.cumsum(x, axis=-2)
        return jnp.where(jnp.tril(jnp.ones((t, t), dtype=bool), k=0), total, -jnp.inf)

    def ssd(x: Any, dt: Any, dt_bias: Any, a_log: Any, b: Any, c: Any, skip: Any) -> Any:
        dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        a = -jnp.exp(a_log) * dt
        scaled = x * dt[..., None].astype(x.dtype)
        scaled = scaled.reshape(batch, chunks, chunk, heads, d)
        b_, c_ = (t.reshape(batch, chunks, chunk, 1, states) for t in (b, c))
        b_, c_ = (jnp.broadcast_to(t, (batch, chunks, chunk, heads, states)) for t in (b_, c_))
        a = a.reshape(batch, chunks, chunk, heads).transpose(0, 3, 1, 2)
        a_cumsum = jnp.cumsum(a, axis=-1)

        inside = jnp.exp(segsum(a)).astype(x.dtype)
        scores = jnp.einsum("bclhn,bcshn->bhcls", c_, b_) * inside
        y_diagonal = jnp.einsum("bhcls,bcshp->bclhp", scores, scaled)

        decay_states = jnp.exp(a_cumsum[..., -1:] - a_cumsum).astype(x.dtype)
        summary = jnp.einsum("bclhn,bhcl,bclhp->bchpn", b_, decay_states, scaled)
        summary = jnp.concatenate([jnp.zeros_like(summary[:, :1]), summary], axis=1)
        decay_chunk = jnp.exp(segsum(jnp.pad(a_cumsum[..., -1], ((0, 0), (0, 0), (1, 0))))).astype(x.dtype)
        passed = jnp.einsum("bhzc,bchpn->bzhpn", decay_chunk, summary)
        passed, final = passed[:, :-1], passed[:, -1]
        y_off = jnp.einsum("bclhn,bchpn,bhcl->bclhp", c_, passed, jnp.exp(a_cumsum).astype(x.dtype))
        y = (y_diagonal + y_off).reshape(batch, length, heads, d)
        return y + x * skip[:, None].astype(x.dtype), final

    x, dt = normal(batch, length, heads, d, dtype=dtype), normal(batch, length, heads, dtype=dtype)
    state = normal(batch, length, states, dtype=dtype, scale=states**-0.5)
    per_head = (normal(heads, offset=-3.0), normal(heads, scale=0.5, offset=0.5))
    return Built(ssd, (x, dt, *per_head, state, state, gain(heads)))


@program("retnet-chunk-scan", "foreign-language")
def _retention(size: Size) -> Built:
    """Retention with a scan over chunks: decay inside, a state between, then a norm of each head and a gate."""
    batch, seq, heads, dk, dv, chunk = pick(
        size, (4, 2048, 8, 256, 512, 512), (1, 1000, 8, 64, 128, 200), (2, 8, 2, 4, 8, 4)
    )
    dtype = half(size)

    def retention(q: Any, k: Any, v: Any, gate: Any, w_out: Any) -> Any:
        log_gamma = jnp.log(1 - 2.0 ** (-5 - jnp.arange(heads, dtype=jnp.float32)))
        index = jnp.arange(chunk, dtype=jnp.float32)
        delta = index[:, None] - index[None, :]
        decay = jnp.where(delta >= 0, jnp.exp(jnp.maximum(delta, 0) * log_gamma[:, None, None]), 0.0)
        cross_decay = jnp.exp((index + 1) * log_gamma[:, None])[..., None]
        key_decay = jnp.exp((chunk - index - 1) * log_gamma[:, None])[..., None]
        chunk_decay = jnp.exp(chunk * log_gamma)[:, None, None]

        def body(state: Any, entry: Any) -> Any:
            qc, kc, vc = entry
            scores = (qc @ kc.swapaxes(-1, -2)).astype(jnp.float32) * decay
            inner = scores.astype(vc.dtype) @ vc
            cross = (qc.astype(jnp.float32) * cross_decay) @ state
            update = jnp.einsum("bhsd,bhsv->bhdv", kc * key_decay.astype(kc.dtype), vc)
            return state * chunk_decay + update, inner + cross.astype(inner.dtype)

        def split(t: Any) -> Any:
            return t.reshape(batch, seq // chunk, chunk, heads, -1).transpose(1, 0, 3, 2, 4)

        start = jnp.zeros((batch, heads, dk, dv), jnp.float32)
        state, out = lax.scan(body, start, (split(q), split(k * dk**-0.5), split(v)))
        out = out.transpose(1, 0, 3, 2, 4).reshape(batch, seq, heads, dv).astype(jnp.float32)
        mean = out.mean(-1, keepdims=True)
        out = (out - mean) * lax.rsqrt(((out - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        out = jax.nn.swish(gate) * out.reshape(batch, seq, heads * dv).astype(gate.dtype)
        return out @ w_out, state

    n = heads * dv
    qk = normal(batch, seq, heads * dk, dtype=dtype)
    v = normal(batch, seq, n, dtype=dtype)
    return Built(retention, (qk, qk, v, v, weight(n, heads * dk, dtype=dtype)))


@program("top-p-min-p-sampler", "foreign-language")
def _top_p(size: Size) -> Built:
    """Temperature, a nucleus and a least probability for every row, then a draw, or the best when greedy."""
    rows, vocab = pick(size, (32, 128256), (2, 16032), (3, 11))

    def sample(logits: Any, temperature: Any, top_p: Any, min_p: Any, seed: Any, greedy: Any) -> Any:
        logits = logits.astype(jnp.float32) / jnp.maximum(temperature, 1e-2)[:, None]
        probs = jax.nn.softmax(logits, axis=-1)
        floor = jnp.max(probs, axis=-1, keepdims=True) * jax.nn.sigmoid(min_p)[:, None]
        logits = jnp.where(probs < floor, -jnp.inf, logits)
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        cumulative = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        cutoff_index = jnp.sum(cumulative < jax.nn.sigmoid(top_p)[:, None], axis=-1, keepdims=True)
        cutoff = jnp.take_along_axis(ordered, jnp.minimum(cutoff_index, vocab - 1), axis=-1)
        logits = jnp.where(logits < cutoff, jnp.full_like(logits, float("-inf")), logits)
        token = lax.cond(
            greedy > 0,
            lambda key, x: jnp.argmax(x, axis=-1),
            lambda key, x: jax.random.categorical(key, x, axis=-1),
            jax.random.PRNGKey(seed),
            logits,
        )
        return token, jax.nn.softmax(logits, axis=-1)

    per_row = normal(rows, scale=0.1, offset=0.9), normal(rows, offset=2.2), normal(rows, scale=0.5, offset=-3.0)
    arguments = (normal(rows, vocab, dtype=half(size), scale=3.0), *per_row)
    return Built(sample, (*arguments, integers(below=1000), integers(below=2)))


@program("tied-head-penalised-log-probs", "foreign-language")
def _tied_head(size: Size) -> Built:
    """A token is embedded, added to a state, and scored by the same table: capped, penalised, tempered log probabilities."""
    rows, n, vocab, past = pick(size, (64, 2048, 256000, 512), (16, 512, 24000, 200), (3, 8, 16, 4))
    dtype = half(size)

    def embed(table: Any, tokens: Any) -> Any:
        x = jnp.take(table, tokens, axis=0)
        return x * jnp.sqrt(n).astype(x.dtype)

    @jax.jit
    def head(table: Any, x: Any) -> Any:
        logits = jnp.dot(x, table.T).astype(jnp.float32)
        return jnp.tanh(logits / 30.0) * 30.0

    def step(params: Any, tokens: Any, state: Any, previous: Any, penalty: Any, temperature: Any) -> Any:
        x = embed(params["table"], tokens) + state
        logits = head(params["table"], _rms_one_plus(x, params["final_norm"]))
        seen = jnp.zeros((rows, vocab), bool).at[jnp.arange(rows)[:, None], previous].set(True)
        penalised = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
        logits = jnp.where(seen, penalised, logits) / temperature[:, None]
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return log_probs, jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]

    params = {"table": normal(vocab, n, dtype=dtype, scale=n**-0.5), "final_norm": normal(n, dtype=dtype, scale=0.1)}
    per_row = normal(rows, scale=0.05, offset=1.2), normal(rows, scale=0.05, offset=0.8)
    tokens, previous = integers(rows, below=vocab), integers(rows, past, below=vocab)
    return Built(step, (params, tokens, normal(rows, n, dtype=dtype), previous, *per_row))


@program("speculative-acceptance", "foreign-language")
def _speculative(size: Size) -> Built:
    """Drafted tokens are accepted by the ratio of two models; the first refused one is drawn from what remains."""
    batch, drafts, vocab = pick(size, (16, 5, 128256), (4, 4, 32064), (2, 3, 11))
    dtype = half(size)

    def accept(target_logits: Any, draft_logits: Any, draft_tokens: Any, seed: Any) -> Any:
        key_accept, key_sample = jax.random.split(jax.random.PRNGKey(seed))
        p = jax.nn.softmax(target_logits.astype(jnp.float32), axis=-1)
        q = jax.nn.softmax(draft_logits.astype(jnp.float32), axis=-1)
        rows, places = jnp.arange(batch)[:, None], jnp.arange(drafts)[None, :]
        p_token = p[rows, places, draft_tokens]
        q_token = q[rows, places, draft_tokens]
        u = jax.random.uniform(key_accept, (batch, drafts))
        accepted = u < jnp.minimum(1.0, p_token / jnp.maximum(q_token, 1e-20))
        prefix = jnp.cumprod(accepted.astype(jnp.int32), axis=1)
        count = prefix.sum(axis=1)
        q_padded = jnp.concatenate([q, jnp.zeros((batch, 1, vocab), q.dtype)], axis=1)

        def at(t: Any, i: Any) -> Any:
            return lax.dynamic_index_in_dim(t, i, axis=0, keepdims=False)

        left = jnp.maximum(jax.vmap(at)(p, count) - jax.vmap(at)(q_padded, count), 0.0)
        mass = left.sum(-1, keepdims=True)
        left = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), jax.vmap(at)(p, count))
        extra = jax.random.categorical(key_sample, jnp.log(left + 1e-30), axis=-1)
        padded = jnp.concatenate([draft_tokens, jnp.zeros((batch, 1), draft_tokens.dtype)], axis=1)
        index = jnp.arange(drafts + 1)[None, :]
        tokens = jnp.where(index < count[:, None], padded, -1)
        tokens = jnp.where(index == count[:, None], extra[:, None].astype(tokens.dtype), tokens)
        return tokens, count, left

    logits = (normal(batch, drafts + 1, vocab, dtype=dtype), normal(batch, drafts, vocab, dtype=dtype))
    return Built(accept, (*logits, integers(batch, drafts, below=vocab), integers(below=1000)))


@program("hyper-connections-mlp", "foreign-language")
def _hyper(size: Size) -> Built:
    """Several residual streams, mixed by weights which depend on them, around a gated feed-forward block."""
    batch, seq, n, streams, hidden = pick(size, (1, 2048, 2048, 4, 5632), (1, 256, 512, 4, 1024), (2, 4, 8, 2, 16))
    dtype = half(size)

    def connect(p: Any, streams_in: Any) -> Any:
        normed = streams_in.astype(jnp.float32)
        mean = jnp.mean(normed, -1, keepdims=True)
        normed = (normed - mean) * lax.rsqrt(jnp.var(normed, -1, keepdims=True) + 1e-5) * p["norm"]
        alpha = jnp.tanh(normed @ p["dynamic_alpha"]) * p["alpha_scale"] + p["static_alpha"]
        beta = jnp.tanh(jnp.einsum("btsd,d->bts", normed, p["dynamic_beta"])) * p["beta_scale"] + p["static_beta"]
        mixed = jnp.einsum("btse,btsd->bted", alpha, streams_in.astype(jnp.float32))
        branch, rest = mixed[..., 0, :], mixed[..., 1:, :]

        h = _rms(branch.astype(dtype), p["block_norm"])
        out = (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return (rest + beta[..., None] * out[..., None, :].astype(jnp.float32)).astype(streams_in.dtype)

    params = {
        "norm": gain(n),
        "dynamic_alpha": normal(n, streams + 1, scale=0.5 * n**-0.5),
        "dynamic_beta": normal(n, scale=0.5 * n**-0.5),
        "alpha_scale": normal(scale=0.01, offset=0.1),
        "beta_scale": normal(scale=0.01, offset=0.1),
        "static_alpha": normal(streams, streams + 1, scale=0.5),
        "static_beta": gain(streams),
        "block_norm": gain(n, dtype),
        "gate": weight(n, hidden, dtype=dtype),
        "up": weight(n, hidden, dtype=dtype),
        "down": weight(hidden, n, dtype=dtype),
    }
    return Built(connect, (params, normal(batch, seq, streams, n, dtype=dtype)))


@program("contrastive-search-rerank", "foreign-language")
def _contrastive(size: Size) -> Built:
    """Candidates are ranked by probability less the greatest cosine with the context, and the winner's state is kept."""
    batch, candidates, length, n, vocab = pick(
        size, (16, 8, 1000, 4096, 50304), (8, 6, 1000, 1024, 12000), (2, 3, 5, 8, 12)
    )
    dtype = half(size)
    alpha = 0.6

    def rank(logits: Any, context: Any, padding: Any, candidate_hidden: Any) -> Any:
        probs, tokens = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), candidates)
        norm_context = context / jnp.linalg.norm(context.astype(jnp.float32), axis=2, keepdims=True).astype(dtype)
        norm_next = candidate_hidden / jnp.linalg.norm(
            candidate_hidden.astype(jnp.float32), axis=2, keepdims=True
        ).astype(dtype)
        cosine = jax.vmap(lambda c, h: h @ c.T)(norm_context, norm_next).astype(jnp.float32)
        cosine = jnp.where(padding[:, None, :], cosine, jnp.finfo(jnp.float32).min)
        degeneration = jnp.max(cosine, axis=-1)
        score = (1.0 - alpha) * probs - alpha * degeneration
        best = jnp.argmax(score, axis=-1)
        state = jax.vmap(lambda h, i: h[i])(candidate_hidden, best)
        return jnp.take_along_axis(tokens, best[:, None], axis=1)[:, 0], state, score

    states = normal(batch, length, n, dtype=dtype), booleans(batch, length), normal(batch, candidates, n, dtype=dtype)
    return Built(rank, (normal(batch, vocab, dtype=dtype, scale=3.0), *states))


@program("beam-score-update", "foreign-language")
def _beam(size: Size) -> Built:
    """A step of beam search: log probabilities, twice the beams kept, sequences gathered, finished ones scored by length."""
    batch, beams, vocab, length = pick(size, (32, 4, 32128, 256), (12, 4, 32128, 128), (2, 2, 11, 5))
    eos, negative = 1, -1.0e7

    def gather(t: Any, index: Any) -> Any:
        one_hot = jax.nn.one_hot(index, t.shape[1], dtype=jnp.float32)
        return jnp.einsum("beo,bo...->be...", one_hot, t.astype(jnp.float32)).astype(t.dtype)

    def step(logits: Any, alive: Any, sequences: Any, finished: Any, finished_scores: Any, position: Any) -> Any:
        candidates = jax.nn.log_softmax(logits.astype(jnp.float32).reshape(batch, beams, vocab))
        scores = (candidates + alive[..., None]).reshape(batch, beams * vocab)
        top, flat = lax.top_k(scores, 2 * beams)
        chosen = gather(sequences, flat // vocab)
        ids = (flat % vocab)[..., None].astype(chosen.dtype)
        chosen = lax.dynamic_update_slice(chosen, ids, (0, 0, position))
        ended = chosen[:, :, position] == eos
        new_log_probs = top + ended * negative
        _, keep = lax.top_k(new_log_probs, beams)
        alive_sequences, alive_scores = gather(chosen, keep), jnp.take_along_axis(new_log_probs, keep, axis=1)
        penalty = jnp.power((5.0 + position + 1) / 6.0, 0.6)
        done = top / penalty + (~ended) * negative
        all_scores = jnp.concatenate([finished_scores, done], axis=1)
        all_sequences = jnp.concatenate([finished, chosen], axis=1)
        best, index = lax.top_k(all_scores, beams)
        return alive_scores, alive_sequences, gather(all_sequences, index), best

    sequences = integers(batch, beams, length, below=vocab)
    scores = normal(batch, beams, offset=-20.0)
    logits = normal(batch * beams, vocab, dtype=half(size), scale=2.0)
    return Built(step, (logits, scores, sequences, sequences, scores, integers(below=length)))
