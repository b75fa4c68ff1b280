"""Beam search, long summaries and long forecasts, the thirty-sixth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-sixth"


@program("marian-translation-beam-search-generate-transformers", GROUP)
def _marian(size: Size) -> Built:
    """This program translates sentences with beam search, by the `generate` method of a Marian model.

    It is FlaxMarianMTModel of transformers in float32, as users run it: the encoder is read once, a loop decodes with caches
    that are reordered by beams, and finished sentences are kept with a penalty of their length; the padding word is never
    chosen.
    """
    transformers = library()
    b, beams, source, target, n, h, wide, depth, words = pick(
        size,
        (4, 4, 96, 24, 512, 8, 2048, 3, 58101),
        (2, 3, 40, 12, 192, 6, 768, 3, 6003),
        (1, 2, 4, 4, 8, 2, 12, 3, 13),
    )
    config = transformers.MarianConfig(
        vocab_size=words,
        decoder_vocab_size=words,
        max_position_embeddings=max(source, target),
        encoder_layers=depth,
        decoder_layers=depth,
        encoder_ffn_dim=wide,
        decoder_ffn_dim=wide,
        encoder_attention_heads=h,
        decoder_attention_heads=h,
        d_model=n,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=words - 1,
        eos_token_id=0,
        forced_eos_token_id=0,
        decoder_start_token_id=words - 1,
    )
    model = transformers.FlaxMarianMTModel(config, _do_init=False)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, source)))

    def run(p, sentence, short):
        """This gives the best translation of each sentence, and its score."""
        mask = (jnp.arange(source) < source - short[:, None]).astype(jnp.int32)
        sentence = jnp.where(mask > 0, sentence, words - 1)
        how = {"num_beams": beams, "max_length": target, "length_penalty": 1.2, "early_stopping": False}
        out = model.generate(sentence, attention_mask=mask, params=p, bad_words_ids=[[words - 1]], **how)
        return out.sequences, out.scores

    return Built(run, (drawn(structs), integers(b, source, below=words - 1), integers(b, below=source // 2)))


@program("longt5-transient-global-summarisation-loss-transformers", GROUP)
def _long(size: Size) -> Built:
    """This program evaluates a summarisation model on long documents, with attention to near words and to summaries of blocks.

    It is FlaxLongT5ForConditionalGeneration of transformers with transient global attention, and the loss of the library's example
    `run_summarization_flax.py`: labels are smoothed, and padded words do not count.
    """
    transformers = library()
    b, source, target, radius, block, n, h, d, wide, depth, words = pick(
        size,
        (2, 2048, 128, 127, 16, 768, 12, 64, 2048, 3, 32128),
        (1, 288, 32, 23, 8, 144, 6, 24, 384, 3, 4001),
        (1, 12, 3, 2, 3, 8, 2, 4, 12, 3, 13),
    )
    dtype, smoothing = half(size), 0.1
    config = transformers.LongT5Config(
        vocab_size=words,
        d_model=n,
        d_kv=d,
        d_ff=wide,
        num_layers=depth,
        num_decoder_layers=depth,
        num_heads=h,
        local_radius=radius,
        global_block_size=block,
        encoder_attention_type="transient-global",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = transformers.FlaxLongT5ForConditionalGeneration(config, _do_init=False, dtype=dtype)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, source)))

    def run(p, document, summary, short, brief):
        """This gives the mean loss, losses of words, and how many words are foretold."""
        mask = (jnp.arange(source) < source - short[:, None]).astype(jnp.int32)
        real = jnp.arange(target) < target - brief[:, None]
        labels = jnp.where(real, summary, 0)
        shifted = jnp.concatenate([jnp.zeros((b, 1), labels.dtype), labels[:, :-1]], axis=1)
        out = model(
            input_ids=jnp.where(mask > 0, document, 0),
            attention_mask=mask,
            decoder_input_ids=shifted,
            decoder_attention_mask=real.astype(jnp.int32),
            params=p,
        )
        logits = out.logits.astype(jnp.float32)
        confidence, low = 1.0 - smoothing, smoothing / (words - 1)
        normaliser = -(confidence * np.log(confidence) + (words - 1) * low * np.log(low + 1e-20))
        soft = jax.nn.one_hot(labels, words) * (confidence - low) + low
        loss = -jnp.sum(soft * jax.nn.log_softmax(logits, axis=-1), axis=-1) - float(normaliser)
        loss = loss * real
        right = jnp.sum((jnp.argmax(logits, axis=-1) == labels) & real)
        return jnp.sum(loss) / jnp.sum(real), loss, right

    inputs = integers(b, source, below=words), integers(b, target, below=words)
    return Built(
        run, (drawn(structs, dtype), *inputs, integers(b, below=source // 3), integers(b, below=target // 2 + 1))
    )


@program("informer-probsparse-attention-forecast-haiku", GROUP)
def _informer(size: Size) -> Built:
    """This program forecasts many measured series far ahead, with attention that only the most telling queries take part in.

    It is Informer (Zhou, 2021; zhouhaoyi/Informer2020), with haiku: queries are rated by a sample of keys, the others get the
    mean of values, layers of the encoder are halved by a convolution and largest values, and the decoder writes all steps at
    once.
    """
    import haiku as hk

    b, past, known, ahead, series, n, h, wide = pick(
        size, (16, 384, 96, 192, 7, 512, 8, 2048), (6, 144, 36, 72, 7, 112, 4, 224), (1, 8, 2, 4, 2, 8, 2, 12)
    )
    dtype, factor, times = half(size), 5 if size != "tiny" else 1, 4

    def norm(name):
        """This is a norm of the last axis."""
        return hk.LayerNorm(-1, True, True, name=name)

    def heads(x, name):
        """This makes heads [b, h, length, d] of a linear layer."""
        return hk.Linear(n, name=name)(x).reshape(*x.shape[:2], h, n // h).transpose(0, 2, 1, 3)

    def joined(x, name):
        """This joins heads and applies a linear layer."""
        return hk.Linear(n, name=name)(x.transpose(0, 2, 1, 3).reshape(b, -1, n))

    def sparse(x, name, causal):
        """This is attention of the most telling queries."""
        q, k, v = (heads(x, f"{name}_{z}") for z in "qkv")
        long = x.shape[1]
        many = min(factor * int(np.ceil(np.log(long))), long)
        sample = jax.random.randint(hk.next_rng_key(), (long, many), 0, long)
        rated = jnp.einsum("bhqd,bhqsd->bhqs", q, k[:, :, sample], preferred_element_type=jnp.float32)
        telling = jnp.max(rated, axis=-1) - jnp.sum(rated, axis=-1) / long
        top = jax.lax.top_k(telling, many)[1]
        chosen = jnp.take_along_axis(q, top[..., None], axis=2)
        scores = jnp.einsum("bhqd,bhkd->bhqk", chosen, k, preferred_element_type=jnp.float32) * (n // h) ** -0.5
        if causal:
            scores = jnp.where(jnp.arange(long) > top[..., None], -jnp.inf, scores)
        fresh = jax.nn.softmax(scores, axis=-1).astype(v.dtype) @ v
        if causal:
            rest = jnp.cumsum(v.astype(jnp.float32), axis=2).astype(v.dtype)
        else:
            rest = jnp.broadcast_to(jnp.mean(v, axis=2, keepdims=True), v.shape)
        rest = rest.at[jnp.arange(b)[:, None, None], jnp.arange(h)[:, None], top].set(fresh)
        return joined(rest, f"{name}_o")

    def full(x, memory, name):
        """This is attention to what the encoder gave."""
        q, k, v = heads(x, f"{name}_q"), heads(memory, f"{name}_k"), heads(memory, f"{name}_v")
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * (n // h) ** -0.5
        return joined(jax.nn.softmax(scores, axis=-1).astype(v.dtype) @ v, f"{name}_o")

    def feed(x, name):
        """This is the wide layer."""
        return hk.Linear(n, name=f"{name}_two")(jax.nn.gelu(hk.Linear(wide, name=f"{name}_one")(x), approximate=False))

    def circular(x, channels, name):
        """This is a convolution whose ends meet."""
        x = jnp.concatenate([x[:, -1:], x, x[:, :1]], axis=1)
        return hk.Conv1D(channels, 3, padding="VALID", name=name)(x)

    def embedded(x, mark, name):
        """This joins values, places and times."""
        angle = np.arange(x.shape[1])[:, None] * np.exp(np.arange(0, n, 2) * -np.log(10000.0) / n)
        place = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(x.shape[1], n)
        time = hk.Linear(n, with_bias=False, name=f"{name}_time")(mark)
        return circular(x, n, f"{name}_value") + jnp.asarray(place, dtype) + time

    def net(past_x, past_mark, mark):
        """This is the whole network."""
        x = embedded(past_x, past_mark, "encoder")
        for k in range(2):
            x = norm(f"norm_{k}a")(x + sparse(x, f"attention_{k}", False))
            x = norm(f"norm_{k}b")(x + feed(x, f"feed_{k}"))
            if k == 0:
                x = jax.nn.elu(norm("norm_halved")(circular(x, n, "halved")))
                x = hk.max_pool(x, (3, 1), (2, 1), "SAME", channel_axis=None)
        memory = norm("norm_memory")(x)
        start = jnp.concatenate([past_x[:, -known:], jnp.zeros((b, ahead, series), past_x.dtype)], axis=1)
        x = embedded(start, mark, "decoder")
        x = norm("norm_c")(x + sparse(x, "own", True))
        x = norm("norm_d")(x + full(x, memory, "cross"))
        x = norm("norm_f")(x + feed(x, "feed"))
        return hk.Linear(series, name="last")(norm("norm_last")(x))[:, -ahead:]

    model = hk.transform(net)

    def run(p, seed, past_x, past_mark, mark, true):
        """This gives forecasts on the scale of the series, and mean squared and absolute errors by step."""
        middle = jnp.mean(past_x, axis=1, keepdims=True)
        spread = jnp.std(past_x, axis=1, keepdims=True) + 1e-5
        x = ((past_x - middle) / spread).astype(dtype)
        out = model.apply(p, jax.random.key(seed), x, past_mark, mark).astype(jnp.float32)
        off = out - (true - middle) / spread
        return out * spread + middle, jnp.mean(off**2, axis=(0, 2)), jnp.mean(jnp.abs(off), axis=(0, 2))

    mark_of = normal(b, past, times, dtype=dtype, scale=0.3), normal(b, known + ahead, times, dtype=dtype, scale=0.3)
    x = jax.ShapeDtypeStruct((b, past, series), dtype)
    structs = jax.eval_shape(model.init, jax.random.key(0), x, *(m.struct for m in mark_of))
    values = normal(b, past, series, scale=2.0, offset=1.0), normal(b, ahead, series, scale=2.0, offset=1.0)
    return Built(run, (drawn(structs, dtype), integers(below=1000), values[0], *mark_of, values[1]))
