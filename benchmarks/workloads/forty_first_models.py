"""Answers ranked by one shared layer, captions of photographs, pairs of sentences, the forty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx

GROUP = "forty-first"


@program("albert-one-shared-layer-multiple-choice-answers-marked-and-calibrated-transformers", GROUP)
def _choices(size: Size) -> Built:
    """This program marks how well a model with one shared layer picks the right end of a story out of four.

    It is an evaluation as for SWAG with FlaxAlbertForMultipleChoice of transformers (ALBERT; Lan, 2019): each story is read
    beside each of its ends, and accuracies by length, gaps to the next choice and the calibration of chances are told.
    """
    transformers = library()
    b, choices, long, n, inner, heads, depth, words, bins = pick(
        size,
        (24, 4, 128, 768, 128, 12, 12, 30000, 15),
        (2, 4, 40, 192, 64, 6, 4, 4001, 10),
        (2, 3, 8, 8, 4, 2, 2, 17, 3),
    )
    how = {"embedding_size": inner, "hidden_size": n, "num_attention_heads": heads, "num_hidden_layers": depth}
    how |= {"intermediate_size": 4 * n, "max_position_embeddings": long, "pad_token_id": 0}
    config = transformers.AlbertConfig(vocab_size=words, bos_token_id=2, eos_token_id=3, **how)
    model = transformers.FlaxAlbertForMultipleChoice(config, dtype=half(size), _do_init=False)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 1, 4)))

    def run(p, story, end, short_story, short_end, label):
        """This gives chances of ends, which are right, gaps between choices, errors of calibration, and hits by length."""
        first = long // 2 - short_story[:, None, None]
        whole = first + long // 2 - short_end[..., None]
        place = jnp.broadcast_to(jnp.arange(long), (b, choices, long))
        other = jnp.take_along_axis(end, jnp.clip(place - first, 0, long // 2 - 1), axis=2)
        story = jnp.broadcast_to(jnp.pad(story, ((0, 0), (0, long - story.shape[1])))[:, None], place.shape)
        word = jnp.where(place < first, 4 + story, jnp.where(place < whole, 4 + other, 0))
        word = jnp.where(place == 0, 2, jnp.where((place == first - 1) | (place == whole - 1), 3, word))
        seen, kind = (place < whole).astype(jnp.int32), ((place >= first) & (place < whole)).astype(jnp.int32)
        logits = model(word, seen, kind, place, params=p).logits.astype(jnp.float32)
        chance = jax.nn.softmax(logits, axis=-1)
        two, which = lax.top_k(logits, 2)
        right = which[:, 0] == label
        sure = jnp.max(chance, axis=-1)
        bin_ = jnp.clip((sure * bins).astype(jnp.int32), 0, bins - 1)
        count = jnp.zeros(bins).at[bin_].add(1.0)
        gap = jnp.zeros(bins).at[bin_].add(sure - right)
        brier = jnp.mean(jnp.sum((chance - jax.nn.one_hot(label, choices)) ** 2, axis=-1))
        part = jnp.clip(short_story * 4 // (long // 4), 0, 3)
        hits = jnp.stack([jnp.zeros(4).at[part].add(z) for z in (right.astype(jnp.float32), 1.0)])
        return chance, right, two[:, 0] - two[:, 1], jnp.sum(jnp.abs(gap)) / b, count, brier, hits

    texts = integers(b, long // 2, below=words - 4), integers(b, choices, long // 2, below=words - 4)
    lengths = integers(b, below=long // 4), integers(b, choices, below=long // 4)
    return Built(run, (drawn(structs, half(size)), *texts, *lengths, integers(b, below=choices)))


@program("vit-gpt2-captions-of-photographs-written-greedily-then-scored-generate-transformers", GROUP)
def _captions(size: Size) -> Built:
    """This program writes captions of photographs word by word, and then tells how sure the model is of them.

    It is FlaxVisionEncoderDecoderModel of transformers with ViT and GPT-2, as in nlpconnect/vit-gpt2-image-captioning: bytes of
    pixels are normalised, `generate` writes with a cache, and a second pass marks the written words and a given caption.
    """
    transformers = library()
    b, side, patch, n, heads, eyes, depth, long, words = pick(
        size,
        (8, 224, 16, 768, 12, 12, 4, 12, 50257),
        (1, 64, 16, 192, 6, 3, 2, 6, 4001),
        (2, 8, 4, 8, 2, 2, 2, 4, 17),
    )
    dtype = half(size)
    eye = transformers.ViTConfig(
        hidden_size=n,
        num_hidden_layers=eyes,
        num_attention_heads=heads,
        intermediate_size=4 * n,
        image_size=side,
        patch_size=patch,
        hidden_act="gelu",
    )
    mouth = transformers.GPT2Config(
        vocab_size=words, n_positions=4 * long, n_embd=n, n_layer=depth, n_head=heads, bos_token_id=1, eos_token_id=1
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        eye, mouth, tie_word_embeddings=False, pad_token_id=1, decoder_start_token_id=1, eos_token_id=1
    )
    shape = ((1, side, side, 3), (1, 1))

    class Captioner(transformers.FlaxVisionEncoderDecoderModel):
        """This is the library's model, whose weights are only described when it is made."""

        def init_weights(self, rng, input_shape, params=None):
            start = super().init_weights
            return jax.eval_shape(lambda: start(rng, input_shape, params))

    model = Captioner(config, input_shape=shape, dtype=dtype)
    written = {"max_length": long, "min_length": long // 2, "num_beams": 1, "do_sample": False}
    written |= {"pad_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}

    def run(p, photo, given):
        """This gives written captions, surprises of their words and of given words, and agreement of the two."""
        pixels = jnp.moveaxis((photo.astype(jnp.float32) / 255.0 - 0.5) / 0.5, 3, 1).astype(dtype)
        text = model.generate(pixels, params=p, **written).sequences

        def surprise(caption):
            """This is the surprise of each word of a caption after its first."""
            logits = model(pixels, caption[:, :-1], params=p).logits.astype(jnp.float32)
            logp = jax.nn.log_softmax(logits, axis=-1)
            entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            return -jnp.take_along_axis(logp, caption[:, 1:, None], axis=-1)[..., 0], entropy

        own, entropy = surprise(text)
        theirs, _ = surprise(jnp.concatenate([text[:, :1], given], axis=1))
        alive = jnp.cumprod(text[:, 1:] != 1, axis=1)
        mean = jnp.sum(own * alive, axis=1) / jnp.maximum(jnp.sum(alive, axis=1), 1)
        shared = jnp.mean(jnp.any(text[:, 1:, None] == given[:, None], axis=2) * alive, axis=1)
        return text, own, theirs, entropy, mean, shared

    inputs = integers(b, side, side, 3, below=256), integers(b, long - 1, below=words)
    return Built(run, (drawn(model.params, dtype), *inputs))


@program("esim-two-sentences-aligned-softly-and-compared-between-two-way-lstms-nnx", GROUP)
def _esim(size: Size) -> Built:
    """This program tells whether one sentence follows from another, speaks against it, or does neither.

    It is ESIM (Chen, 2017; coetaur0/ESIM), with RNN, Bidirectional and OptimizedLSTMCell of nnx: words of each sentence see those
    of the other by a soft alignment, differences and products are read by a second LSTM, and means and maxima are classified.
    """
    from flax import nnx

    b, long, wide, n, words, kinds = pick(
        size, (512, 40, 300, 300, 42394, 3), (32, 16, 100, 100, 8001, 3), (2, 4, 6, 4, 11, 3)
    )
    dtype = half(size)
    dense, _, _ = layers_of_nnx(dtype)

    def two_way(i, rngs):
        """This makes an LSTM for each direction."""
        cells = [nnx.OptimizedLSTMCell(i, n, dtype=dtype, rngs=rngs) for _ in range(2)]
        return nnx.Bidirectional(*(nnx.RNN(cell) for cell in cells))

    class Net(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            self.table = nnx.Embed(words, wide, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.read, self.compose = two_way(wide, rngs), two_way(n, rngs)
            self.narrow = dense(8 * n, n, rngs)
            self.hidden, self.head = dense(8 * n, n, rngs), dense(n, kinds, rngs)

        def __call__(self, one, two, long1, long2):
            """This gives logits and the alignment."""
            start = tuple((jnp.zeros((b, n), dtype), jnp.zeros((b, n), dtype)) for _ in range(2))
            real1, real2 = (jnp.arange(long) < z[:, None] for z in (long1, long2))
            x = self.read(self.table(one), initial_carry=start, seq_lengths=long1) * real1[..., None].astype(dtype)
            y = self.read(self.table(two), initial_carry=start, seq_lengths=long2) * real2[..., None].astype(dtype)
            scores = jnp.einsum("bqc,bkc->bqk", x, y, preferred_element_type=jnp.float32)
            right = jax.nn.softmax(jnp.where(real2[:, None], scores, -1e9), axis=2)
            down = jax.nn.softmax(jnp.where(real1[:, :, None], scores, -1e9), axis=1)
            seen_x = jnp.einsum("bqk,bkc->bqc", right.astype(dtype), y)
            seen_y = jnp.einsum("bqk,bqc->bkc", down.astype(dtype), x)
            pooled = []
            for z, seen, size_, real in ((x, seen_x, long1, real1), (y, seen_y, long2, real2)):
                both = jnp.concatenate([z, seen, z - seen, z * seen], axis=-1)
                y = self.compose(nnx.relu(self.narrow(both)), initial_carry=start, seq_lengths=size_)
                part = real[..., None]
                total = jnp.sum(jnp.where(part, y, 0).astype(jnp.float32), axis=1) / size_[:, None]
                pooled += [total.astype(dtype), jnp.max(jnp.where(part, y, -1e4), axis=1)]
            return self.head(jnp.tanh(self.hidden(jnp.concatenate(pooled, axis=-1)))), right

    graph, structs = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def run(p, one, two, short1, short2, label):
        """This gives chances, a table of true and told kinds, surprises, and how sharp alignments are."""
        long1, long2 = long - short1, long - short2
        logits, right = nnx.merge(graph, p)(one, two, long1, long2)
        logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        told = jnp.argmax(logp, axis=-1)
        table = jnp.zeros((kinds, kinds), jnp.int32).at[label, told].add(1)
        hits = jnp.diag(table)
        f_score = 2 * hits / jnp.maximum(jnp.sum(table, axis=0) + jnp.sum(table, axis=1), 1)
        surprise = -jnp.take_along_axis(logp, label[:, None], axis=1)[:, 0]
        real = jnp.arange(long) < long1[:, None]
        sharp = jnp.sum(jnp.max(right, axis=2) * real, axis=1) / long1
        return jnp.exp(logp), table, f_score, surprise, sharp, jnp.where(real, jnp.argmax(right, axis=2), -1)

    texts = integers(b, long, below=words), integers(b, long, below=words)
    lengths = integers(b, below=long // 2), integers(b, below=long // 2)
    return Built(run, (drawn(structs, dtype), *texts, *lengths, integers(b, below=kinds)))
