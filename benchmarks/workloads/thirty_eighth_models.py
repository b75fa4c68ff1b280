"""Zero-shot classifiers, forecasts by periods and attentive writers, the thirty-eighth set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-eighth"


@program("clip-zero-shot-classifier-with-prompt-ensembles-transformers", GROUP)
def _zero_shot(size: Size) -> Built:
    """This program classifies photographs by how near they are to sentences that name the classes.

    It is zero-shot classification with FlaxCLIPModel of transformers (Radford, 2021): the embeddings of several prompts of a class
    are averaged, and accuracy, recall of retrieval in both directions and the margin between the two best classes are told.
    """
    transformers = library()
    b, side, patch, classes, templates, t, words, n_text, n_image, joint, depth = pick(
        size,
        (48, 224, 16, 100, 4, 24, 49408, 512, 768, 512, 3),
        (3, 96, 16, 10, 3, 12, 8000, 128, 192, 96, 3),
        (2, 8, 4, 3, 2, 5, 20, 8, 8, 4, 3),
    )
    dtype = half(size)
    common = {"num_hidden_layers": depth, "hidden_act": "quick_gelu"}
    heads_text, heads_image = pick(size, (8, 12), (4, 6), (2, 2))
    text = {"vocab_size": words, "hidden_size": n_text, "intermediate_size": 4 * n_text, "max_position_embeddings": 77}
    text |= {"num_attention_heads": heads_text, "eos_token_id": 2, **common}
    image = {"hidden_size": n_image, "intermediate_size": 4 * n_image, "num_attention_heads": heads_image}
    image |= {"image_size": side, "patch_size": patch, **common}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=joint)
    shapes = ((1, 1), (1, side, side, 3))
    model = transformers.FlaxCLIPModel(config, input_shape=shapes, _do_init=False, dtype=dtype)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), shapes))
    mean = jnp.array([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    spread = jnp.array([0.26862954, 0.26130258, 0.27577711])[:, None, None]

    def unit(x):
        """This gives vectors length one, in float32."""
        x = x.astype(jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def run(p, photo, prompt, short, label):
        """This gives the probabilities of classes, accuracies, recalls of retrieval, margins and class embeddings."""
        last = t - 1 - short
        row = jnp.arange(classes * templates)
        prompt = prompt.at[:, 0].set(words - 2).at[row, last].set(words - 1)
        mask = (jnp.arange(t) <= last[:, None]).astype(jnp.int32)
        told = unit(model.get_text_features(prompt, attention_mask=mask, params=p))
        names = unit(jnp.mean(told.reshape(classes, templates, joint), axis=1))
        pixels = (photo.astype(jnp.float32) / 255.0 - mean) / spread
        seen = unit(model.get_image_features(pixels.astype(dtype), params=p))
        logits = jnp.exp(p["logit_scale"].astype(jnp.float32)) * seen @ names.T
        probs = jax.nn.softmax(logits, axis=-1)
        best = lax.top_k(probs, min(5, classes))
        right = best[1] == label[:, None]
        among = jnp.sum(logits > jnp.take_along_axis(logits, label[:, None], axis=1), axis=1)
        own = logits[jnp.arange(b), label]
        rank = jnp.sum(logits[:, label] > own, axis=0)
        recall = jnp.stack([jnp.mean(among == 0), jnp.mean(rank == 0)])
        accuracy = jnp.mean(right[:, 0]), jnp.mean(jnp.any(right, axis=1))
        return probs, accuracy, recall, best[0][:, 0] - best[0][:, 1], names

    p = drawn(structs, dtype) | {"logit_scale": normal(scale=0.05, offset=3.0)}
    inputs = integers(b, 3, side, side, below=256), integers(classes * templates, t, below=words - 2)
    return Built(run, (p, *inputs, integers(classes * templates, below=t // 2), integers(b, below=classes)))


@program("timesnet-forecast-by-fourier-periods-and-two-dimensional-inception-equinox", GROUP)
def _timesnet(size: Size) -> Built:
    """This program forecasts many series by looking at them as pictures, whose width is one of their strongest periods.

    It is TimesNet (Wu, 2023; thuml/Time-Series-Library), with equinox: periods are found by a Fourier transform at run time, so
    square filters gather their inputs by places instead of reshaping, and amplitudes weigh the results of the periods.
    """
    import equinox as eqx

    b, past, ahead, columns, n, wide, strongest, depth = pick(
        size, (32, 336, 96, 21, 64, 64, 3, 2), (2, 96, 48, 7, 24, 24, 3, 2), (2, 6, 2, 2, 4, 6, 3, 2)
    )
    dtype, t, kernels = half(size), past + ahead, (1, 3, 5)
    reach = kernels[-1] // 2

    class Inception(eqx.Module):
        """This averages square filters of three sizes."""

        weights: list
        biases: list

        def __init__(self, i, o):
            self.weights = [jnp.zeros((k, k, i, o)) for k in kernels]
            self.biases = [jnp.zeros(o) for _ in kernels]

        def __call__(self, x, period):
            place = jnp.arange(t)[:, None, None]
            near = jnp.arange(-reach, reach + 1)
            column = place % period + near
            other = place + near[:, None] * period + near
            inside = (column >= 0) & (column < period) & (other >= 0) & (other < t)
            window = jnp.where(inside[..., None], x[:, jnp.clip(other, 0, t - 1)], 0)
            total = 0
            for k, w, bias in zip(kernels, self.weights, self.biases, strict=True):
                cut = slice(reach - k // 2, reach + k // 2 + 1)
                total = total + jnp.einsum("btijc,ijcd->btd", window[:, :, cut, cut], w) + bias
            return total / len(kernels)

    class TimesBlock(eqx.Module):
        """This filters series along each strong period and adds the results by their amplitudes."""

        up: Inception
        down: Inception
        norm: eqx.nn.LayerNorm

        def __init__(self):
            self.up, self.down, self.norm = Inception(n, wide), Inception(wide, n), eqx.nn.LayerNorm(n)

        def __call__(self, x):
            strength = jnp.mean(jnp.abs(jnp.fft.rfft(x.astype(jnp.float32), axis=1)), axis=-1)
            _, found = lax.top_k(jnp.mean(strength, axis=0).at[0].set(0.0), strongest)
            periods = t // jnp.maximum(found, 1)
            paths = [self.down(jax.nn.gelu(self.up(x, periods[k])), periods[k]) for k in range(strongest)]
            share = jax.nn.softmax(strength[:, found], axis=-1).astype(x.dtype)
            y = x + jnp.einsum("bk,kbtn->btn", share, jnp.stack(paths))
            return jax.vmap(jax.vmap(self.norm))(y), periods

    class TimesNet(eqx.Module):
        """This is the whole network."""

        value: eqx.nn.Conv1d
        calendar: eqx.nn.Linear
        longer: eqx.nn.Linear
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.value = eqx.nn.Conv1d(columns, n, 3, padding=1, padding_mode="CIRCULAR", use_bias=False, key=keys[0])
            self.calendar = eqx.nn.Linear(4, n, use_bias=False, key=keys[1])
            self.longer = eqx.nn.Linear(past, t, key=keys[2])
            self.blocks = [TimesBlock() for _ in range(depth)]
            self.head = eqx.nn.Linear(n, columns, key=keys[3])

        def __call__(self, series, stamps):
            mean = jnp.mean(series, axis=1, keepdims=True)
            spread = jnp.sqrt(jnp.var(series, axis=1, keepdims=True) + 1e-5)
            x = ((series - mean) / spread).astype(dtype)
            angle = jnp.arange(past)[:, None] * 10000.0 ** (-2 * jnp.arange(n // 2) / n)
            places = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(past, n)
            x = jax.vmap(self.value)(x.swapaxes(1, 2)).swapaxes(1, 2)
            x = x + jax.vmap(jax.vmap(self.calendar))(stamps) + places.astype(dtype)
            x = jax.vmap(jax.vmap(self.longer, in_axes=1, out_axes=1))(x)
            periods = []
            for block in self.blocks:
                x, found = block(x)
                periods.append(found)
            out = jax.vmap(jax.vmap(self.head))(x).astype(jnp.float32)
            return out * spread + mean, jnp.stack(periods)

    shapes = eqx.filter_eval_shape(TimesNet, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, series, stamps, future):
        """This gives forecasts, periods that layers chose, and squared and absolute errors by the distance ahead."""
        out, periods = eqx.combine(p, rest)(jnp.cumsum(series, axis=1) * 0.3, stamps)
        off = out[:, past:] - future
        return out[:, past:], periods, jnp.mean(off**2, axis=(0, 2)), jnp.mean(jnp.abs(off), axis=(0, 2))

    def weights(path, s):
        """This describes filters [rows, columns, inputs, outputs], matrices [outputs, inputs], gains and biases."""
        if len(s.shape) == 4:
            fan = s.shape[0] * s.shape[1] * s.shape[2]
        else:
            fan = s.shape[1] * (s.shape[2] if len(s.shape) == 3 else 1) if len(s.shape) > 1 else 0
        gains = len(s.shape) == 1 and getattr(path[-1], "name", "") == "weight"
        return normal(*s.shape, dtype=dtype, scale=fan**-0.5 if fan else 0.1, offset=1.0 if gains else 0.0)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    return Built(run, (p, normal(b, past, columns), normal(b, past, 4, dtype=dtype), normal(b, ahead, columns)))


@program("draw-recurrent-attentive-writer-variational-bound-grad-haiku", GROUP)
def _draw(size: Size) -> Built:
    """This program gives slopes of a network that draws pictures stroke by stroke through a grid of bell-shaped filters.

    It is DRAW (Gregor, 2015), with haiku: at each glimpse an LSTM reads a patch of the picture and of what is still missing, a
    latent is drawn, and a second LSTM writes a patch onto the canvas; the loss is the variational bound, slopes are clipped.
    """
    import haiku as hk
    import optax

    b, side, colours, patch, hidden, latent, glimpses = pick(
        size, (128, 64, 3, 12, 400, 100, 16), (8, 32, 3, 6, 96, 24, 8), (2, 5, 1, 2, 6, 3, 2)
    )

    def filters(numbers):
        """This makes bell-shaped filters over rows and columns [b, patch, side], and the strength of the patch."""
        x, y, spread, stride, strength = jnp.split(numbers, 5, axis=-1)
        middle = 0.5 * (side - 1) * (jnp.concatenate([y, x], axis=-1) + 1)
        apart = (side - 1) / (patch - 1) * jnp.exp(stride)
        centre = middle[..., None] + (jnp.arange(patch) - 0.5 * (patch - 1)) * apart[..., None]
        away = jnp.arange(side) - centre[..., None]
        bank = jnp.exp(-0.5 * away**2 * jnp.exp(-spread)[..., None, None])
        bank = bank / (jnp.sum(bank, axis=-1, keepdims=True) + 1e-8)
        return bank[:, 0], bank[:, 1], jnp.exp(strength)[..., None, None]

    def net(picture, noise):
        """This draws all pictures, and gives canvases, divergences of glimpses and where they looked."""
        encoder, decoder = hk.LSTM(hidden, name="encoder"), hk.LSTM(hidden, name="decoder")
        looking, writing = hk.Linear(5, name="looking"), hk.Linear(5, name="writing")
        belief, stroke = hk.Linear(2 * latent, name="belief"), hk.Linear(patch * patch * colours, name="stroke")

        def glimpse(carry, noise):
            """This is one glimpse and one stroke."""
            canvas, coded, told = carry
            rows, columns, strength = filters(looking(told.hidden))
            both = jnp.concatenate([picture, picture - jax.nn.sigmoid(canvas)], axis=-1)
            read = jnp.einsum("bir,brsc,bjs->bijc", rows, both, columns) * strength
            code, coded = encoder(jnp.concatenate([read.reshape(b, -1), told.hidden], axis=-1), coded)
            mean, log_spread = jnp.split(belief(code), 2, axis=-1)
            z = mean + jnp.exp(log_spread) * noise
            gap = 0.5 * jnp.sum(mean**2 + jnp.exp(2 * log_spread) - 2 * log_spread - 1, axis=-1)
            out, told = decoder(z, told)
            rows_out, columns_out, strength = filters(writing(out))
            drawn_patch = stroke(out).reshape(b, patch, patch, colours)
            canvas = canvas + jnp.einsum("bir,bijc,bjs->brsc", rows_out, drawn_patch, columns_out) / strength
            return (canvas, coded, told), (gap, jnp.argmax(jnp.sum(rows, axis=1), axis=-1))

        start = jnp.zeros_like(picture), encoder.initial_state(b), decoder.initial_state(b)
        (canvas, _, _), (gaps, looked) = hk.scan(glimpse, start, noise)
        return canvas, gaps, looked

    model = hk.without_apply_rng(hk.transform(net))
    photo = jax.ShapeDtypeStruct((b, side, side, colours), jnp.float32)
    structs = jax.eval_shape(
        model.init, jax.random.key(0), photo, jax.ShapeDtypeStruct((glimpses, b, latent), "float32")
    )

    def run(p, photo, seed):
        """This gives the bound in bits per value, clipped slopes and their length, divergences, canvases and places."""
        picture = photo.astype(jnp.float32) / 255.0
        noise = jax.random.normal(jax.random.key(seed), (glimpses, b, latent))

        def loss(p):
            """This is the mean of what pictures and latents cost, in nats."""
            canvas, gaps, looked = model.apply(p, picture, noise)
            miss = jnp.sum(optax.sigmoid_binary_cross_entropy(canvas, picture), axis=(1, 2, 3))
            return jnp.mean(miss + jnp.sum(gaps, axis=0)), (jnp.mean(gaps, axis=1), jax.nn.sigmoid(canvas), looked)

        (value, out), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        length = optax.tree.norm(slopes)
        slopes = jax.tree.map(lambda g: g * jnp.minimum(1.0, 5.0 / length), slopes)
        return value / (side * side * colours * jnp.log(2.0)), slopes, length, out

    p = jax.tree.map(lambda s: normal(*s.shape, scale=0.5 * s.shape[0] ** -0.5 if len(s.shape) > 1 else 0.1), structs)
    return Built(run, (p, integers(b, side, side, colours, below=256), integers(below=1000)))
