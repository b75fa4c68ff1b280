"""Languages that are heard, crystals with their endless images and molecules drawn out of noise: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn, state_of

GROUP = "fortieth"


@program("whisper-spoken-language-identification-spec-augment-head-step-transformers", GROUP)
def _languages(size: Size) -> Built:
    """This program does one step of training the head that tells which language is spoken, over a frozen encoder of Whisper.

    It is the audio classification of transformers with FlaxWhisperForAudioClassification (Radford, 2022), as for FLEURS: sound
    becomes logarithms of a mel spectrum, and random bands and times are hidden (SpecAugment).
    """
    import optax

    transformers = library()
    b, frames, mels, n, heads, depth, inner, kinds, window, hop = pick(
        size,
        (8, 3000, 80, 512, 8, 6, 256, 102, 400, 160),
        (1, 320, 40, 128, 4, 2, 64, 24, 400, 160),
        (2, 16, 8, 16, 2, 2, 6, 3, 16, 8),
    )
    dtype, samples = half(size), frames * hop
    how = {
        "encoder_layers": depth,
        "decoder_layers": 1,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
    }
    how |= {"encoder_ffn_dim": 4 * n, "decoder_ffn_dim": 4 * n, "max_source_positions": frames // 2, "vocab_size": 100}
    how |= {"classifier_proj_size": inner, "num_labels": kinds}
    config = transformers.WhisperConfig(
        d_model=n, num_mel_bins=mels, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **how
    )
    shape = (1, mels, frames)
    model = transformers.FlaxWhisperForAudioClassification(config, input_shape=shape, _do_init=False, dtype=dtype)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), shape))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 2000)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def mel_filters():
        """This makes triangles over bins of a spectrum whose middles are evenly spaced in mels."""
        top = 2595 * np.log10(1 + 8000 / 700)
        edges = 700 * (10 ** (np.linspace(0, top, mels + 2) / 2595) - 1)
        bins = np.linspace(0, 8000, window // 2 + 1)
        up = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        down = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
        return jnp.asarray(np.maximum(np.minimum(up, down), 0) * (2 / (edges[2:] - edges[:-2]))[:, None], jnp.float32)

    def spectrum(sound):
        """This makes logarithms of a mel spectrum [b, mels, frames]."""
        long = jnp.pad(sound, ((0, 0), (window // 2, window // 2)), mode="reflect")
        cut = long[:, jnp.arange(frames)[:, None] * hop + jnp.arange(window)]
        shape = 0.5 - 0.5 * jnp.cos(2 * jnp.pi * jnp.arange(window) / window)
        power = jnp.abs(jnp.fft.rfft(cut * shape, axis=-1)) ** 2
        x = jnp.log10(jnp.maximum(jnp.einsum("mk,btk->bmt", mel_filters(), power), 1e-10))
        return (jnp.maximum(x, jnp.max(x, axis=(1, 2), keepdims=True) - 8.0) + 4.0) / 4.0

    def hidden(key, many, length, most):
        """This draws stretches [b, length] that are hidden on one axis."""
        one, two = jax.random.split(key)
        wide = jax.random.randint(one, (b, many, 1), 0, most + 1)
        start = jnp.floor(jax.random.uniform(two, (b, many, 1)) * (length - wide + 1)).astype(jnp.int32)
        place = jnp.arange(length)
        return jnp.any((place >= start) & (place < start + wide), axis=1)

    def run(frozen, head, state, sound, label, seed):
        """This gives the loss, whether the five best are right, chances, new weights of the head, and its optimiser."""
        keys = jax.random.split(jax.random.key(seed), 2)
        x = spectrum(sound)
        x = jnp.where(hidden(keys[0], 2, mels, mels // 4)[:, :, None], 0.0, x)
        x = jnp.where(hidden(keys[1], 5, frames, frames // 20)[:, None], 0.0, x).astype(dtype)

        def loss(head):
            """This is the mean smoothed surprise of the languages."""
            logits = model(x, params={"encoder": frozen, **head}).logits.astype(jnp.float32)
            true = optax.smooth_labels(jax.nn.one_hot(label, kinds), 0.1)
            five = lax.top_k(logits, min(5, kinds))[1] == label[:, None]
            return jnp.mean(optax.softmax_cross_entropy(logits, true)), (five, jax.nn.softmax(logits))

        (value, (five, chance)), slopes = jax.value_and_grad(loss, has_aux=True)(head)
        change, state = optimiser.update(slopes, state, head)
        head = optax.apply_updates(head, change)
        return value, five, chance, head, state

    weights = drawn(structs, dtype)
    encoder = weights.pop("encoder")
    head = drawn({k: structs[k] for k in weights})
    inputs = normal(b, samples, scale=0.1), integers(b, below=kinds), integers(below=1000)
    return Built(run, (encoder, head, state_of(optimiser, head), *inputs))


@program("crystal-graph-gated-convolutions-nearest-periodic-images-formation-energies-step-equinox", GROUP)
def _crystals(size: Size) -> Built:
    """This program does one step of training a network that tells the energies of crystals from their cells.

    It is CGCNN (Xie, 2018; txie-93/cgcnn), with equinox and optax: nearest atoms are sought among the images of a cell in the 26
    cells around, distances become bells, gates choose what neighbours tell, and norms run over all real bonds of a batch.
    """
    import equinox as eqx
    import optax

    b, atoms, near, kinds, n, bells, wide, depth = pick(
        size, (256, 48, 12, 92, 64, 41, 128, 3), (12, 12, 8, 40, 32, 24, 48, 3), (2, 3, 4, 5, 4, 5, 6, 3)
    )
    far = 8.0
    middles = jnp.linspace(0.0, far, bells)
    shifts = jnp.asarray([(i, j, k) for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)], jnp.float32)

    class Norm(eqx.Module):
        """This is a norm of batches over what is real."""

        weight: jax.Array
        bias: jax.Array

        def __init__(self, many):
            self.weight, self.bias = jnp.ones(many), jnp.zeros(many)

        def __call__(self, x, real):
            axes = tuple(range(x.ndim - 1))
            share = real[..., None] / jnp.maximum(jnp.sum(real), 1)
            mean = jnp.sum(x * share, axis=axes)
            spread = jnp.sum((x - mean) ** 2 * share, axis=axes)
            return (x - mean) * lax.rsqrt(spread + 1e-5) * self.weight + self.bias

    class Layer(eqx.Module):
        """This is one gated convolution."""

        full: eqx.nn.Linear
        inside: Norm
        outside: Norm

        def __init__(self, key):
            self.full = eqx.nn.Linear(2 * n + bells, 2 * n, key=key)
            self.inside, self.outside = Norm(2 * n), Norm(n)

        def __call__(self, x, bond, at, real, good):
            other = jax.vmap(lambda z, k: z[k])(x, at)
            mine = jnp.broadcast_to(x[:, :, None], other.shape)
            y = jnp.concatenate([mine, other, bond], axis=-1) @ self.full.weight.T + self.full.bias
            gate, core = jnp.split(self.inside(y, good), 2, axis=-1)
            y = jnp.sum(jax.nn.sigmoid(gate) * jax.nn.softplus(core) * good[..., None], axis=2)
            return jax.nn.softplus(x + self.outside(y, real))

    class Net(eqx.Module):
        """This is the whole network."""

        table: eqx.nn.Embedding
        layers: list
        hidden: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, depth + 3)
            self.table = eqx.nn.Embedding(kinds, n, key=keys[0])
            self.layers = [Layer(k) for k in keys[3:]]
            self.hidden, self.head = eqx.nn.Linear(n, wide, key=keys[1]), eqx.nn.Linear(wide, 1, key=keys[2])

        def __call__(self, kind, bond, at, real, good):
            x = self.table.weight[kind]
            for layer in self.layers:
                x = layer(x, bond, at, real, good)
            many = jnp.maximum(jnp.sum(real, axis=1), 1)[:, None]
            x = jax.nn.softplus(jnp.sum(x * real[..., None], axis=1) / many)
            return jax.vmap(lambda z: self.head(jax.nn.softplus(self.hidden(z))))(x)[:, 0], x

    shapes = eqx.filter_eval_shape(Net, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    optimiser = optax.adamw(optax.exponential_decay(1e-2, 500, 0.9), weight_decay=1e-4)

    def run(p, state, kind, place, skew, short, energy):
        """This gives the loss, new weights and state, errors, what crystals look like, and how long bonds are."""
        real = jnp.arange(atoms) < atoms - short[:, None]
        cell = 0.9 * atoms ** (1 / 3) * 2.2 * (jnp.eye(3) + 0.08 * skew)
        inside = place - jnp.floor(place)
        flat = jnp.einsum("bai,bij->baj", inside, cell)
        moved = jnp.einsum("si,bij->bsj", shifts, cell)
        gap = flat[:, None, :, None] + moved[:, None, None] - flat[:, :, None, None]
        away = jnp.sqrt(jnp.sum(gap**2, axis=-1))
        good = real[:, None, :, None] & real[:, :, None, None] & (away > 1e-3)
        away = jnp.where(good, away, 1e3).reshape(b, atoms, atoms * 27)
        close, which = lax.top_k(-away, near)
        close, at = -close, which // 27
        good = (close < far).astype(jnp.float32)
        bond = jnp.exp(-(((close[..., None] - middles) / (far / bells)) ** 2))

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(net):
            """This is the mean of softened distances of energies that have mean nought and spread one."""
            told, seen = net(kind, bond, at, real.astype(jnp.float32), good)
            true = (energy - jnp.mean(energy)) / (jnp.std(energy) + 1e-6)
            return jnp.mean(optax.huber_loss(told, true)), (jnp.abs(told - true) * jnp.std(energy), seen)

        (value, (error, seen)), slopes = loss(eqx.combine(p, rest))
        slopes = eqx.filter(slopes, eqx.is_array)
        change, state = optimiser.update(slopes, state, p)
        fresh = jax.tree.leaves(eqx.apply_updates(p, change))
        counts = jnp.histogram(close, bins=32, range=(0.0, far), weights=good)[0]
        return value, fresh, jax.tree.leaves(state), error, seen, counts, optax.tree.norm(slopes)

    def weights(path, s):
        """This describes matrices [outputs, inputs], gains and biases."""
        name = getattr(path[-1], "name", "")
        if len(s.shape) == 1:
            return normal(*s.shape, scale=0.1, offset=1.0 if name == "weight" else 0.0)
        return normal(*s.shape, scale=s.shape[1] ** -0.5)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    inputs = integers(b, atoms, below=kinds), normal(b, atoms, 3), normal(b, 3, 3), integers(b, below=atoms // 2 + 1)
    return Built(run, (p, state_of(optimiser, p), *inputs, normal(b)))


@program("equivariant-diffusion-draws-molecules-atoms-and-places-from-mean-free-noise-scan-haiku", GROUP)
def _molecules(size: Size) -> Built:
    """This program draws molecules with many atoms out of noise: places and kinds of atoms are cleaned together.

    It is EDM (Hoogeboom, 2022; ehoogeboom/e3_diffusion_for_molecules), with haiku: noise of places has no mean, messages between
    all atoms have gates and move places along lines between them, and drawn molecules are checked for bonds that atoms can have.
    """
    import haiku as hk

    b, atoms, n, depth, steps, kinds = pick(size, (96, 29, 256, 6, 12, 5), (6, 14, 64, 3, 5, 5), (2, 4, 6, 2, 2, 5))
    dtype = half(size)
    radii = jnp.asarray([0.31, 0.76, 0.71, 0.66, 0.57])
    allowed = jnp.asarray([1, 4, 3, 2, 1])

    def dense(x, o, name):
        """This is a linear layer."""
        return hk.Linear(o, name=name)(x)

    def net(place, kind, time, real):
        """This tells how places [b, atoms, 3] and kinds [b, atoms, kinds + 1] turn into noise (v-prediction)."""
        both = (real[:, :, None] & real[:, None] & ~jnp.eye(atoms, dtype=bool))[..., None]
        times = jnp.broadcast_to(time, (b, atoms, 1))
        h = dense(jnp.concatenate([kind, times], axis=-1).astype(dtype), n, "enter")
        x, first = place, None
        for k in range(depth):
            gap = x[:, :, None] - x[:, None]
            square = jnp.sum(gap**2, axis=-1, keepdims=True)
            first = square if first is None else first
            mine, other = dense(h, n, f"mine_{k}"), dense(h, n, f"other_{k}")
            lengths = dense(jnp.concatenate([square, first], axis=-1).astype(dtype), n, f"lengths_{k}")
            m = jax.nn.silu(dense(jax.nn.silu(mine[:, :, None] + other[:, None] + lengths), n, f"message_{k}"))
            m = m * jax.nn.sigmoid(dense(m, 1, f"gate_{k}")) * both.astype(dtype)
            push = dense(jax.nn.silu(dense(m, n, f"push1_{k}")), 1, f"push2_{k}").astype(jnp.float32)
            away = gap / (jnp.sqrt(square + 1e-8) + 1.0)
            x = x + jnp.sum(away * jnp.tanh(push) * both, axis=2) * 15.0 / (100.0 * depth)
            total = jnp.sum(m, axis=2) / 10.0
            h = h + dense(jax.nn.silu(dense(jnp.concatenate([h, total], axis=-1), n, f"node1_{k}")), n, f"node2_{k}")
            h = h * real[..., None].astype(dtype)
        return centred(x - place, real), dense(h, kinds + 1, "leave").astype(jnp.float32) * real[..., None]

    def centred(x, real):
        """This takes the mean of real atoms off places."""
        part = real[..., None].astype(jnp.float32)
        return (x - jnp.sum(x * part, axis=1, keepdims=True) / jnp.sum(part, axis=1, keepdims=True)) * part

    model = hk.without_apply_rng(hk.transform(net))
    shape = [jax.ShapeDtypeStruct((b, atoms, c), jnp.float32) for c in (3, kinds + 1)]
    real_struct = jax.ShapeDtypeStruct((b, atoms), bool)
    structs = jax.eval_shape(model.init, jax.random.key(0), *shape, jax.ShapeDtypeStruct((), jnp.float32), real_struct)

    def signal(time):
        """This is how much of the square of the signal is left at a time: a polynomial, kept off both ends."""
        return (1 - 2e-5) * (1 - time**2) ** 2 + 1e-5

    def run(p, short, seed):
        """This gives places, kinds and charges of atoms, bonds, which atoms and molecules are stable, and lengths of steps."""
        real = jnp.arange(atoms) < atoms - short[:, None]

        def noise(key):
            """This draws noise for places and kinds."""
            one, two = jax.random.split(key)
            far = centred(jax.random.normal(one, (b, atoms, 3)), real)
            return far, jax.random.normal(two, (b, atoms, kinds + 1)) * real[..., None]

        def step(carry, each):
            """This goes from a time to one before."""
            now, key = each
            before = now - 1.0 / steps
            high, low = signal(now), signal(before)
            ratio = high / low
            fresh = 1 - ratio
            speed = model.apply(p, *carry, now, real)
            guess = [jnp.sqrt(high) * v + jnp.sqrt(1 - high) * z for v, z in zip(speed, carry, strict=True)]
            amount = fresh / jnp.sqrt(1 - high)
            spread = jnp.sqrt(fresh * (1 - low) / (1 - high))
            moved = [
                (z - amount * e) * lax.rsqrt(ratio) + spread * w
                for z, e, w in zip(carry, guess, noise(key), strict=True)
            ]
            place = jnp.clip(centred(moved[0], real), -50.0, 50.0)
            size = jnp.sqrt(jnp.mean(guess[0] ** 2)), jnp.sqrt(jnp.mean(guess[1] ** 2))
            return (place, jnp.clip(moved[1], -50.0, 50.0)), jnp.stack(size)

        keys = jax.random.split(jax.random.key(seed), steps + 1)
        times = 1.0 - jnp.arange(steps) / steps
        (place, kind), sizes = lax.scan(step, noise(keys[0]), (times, keys[1:]))
        what, charge = jnp.argmax(kind[..., :kinds], axis=-1), jnp.round(kind[..., kinds] * 10.0)
        gap = jnp.sqrt(jnp.sum((place[:, :, None] - place[:, None]) ** 2, axis=-1) + 1e-12)
        ideal = radii[what][:, :, None] + radii[what][:, None]
        both = real[:, :, None] & real[:, None] & ~jnp.eye(atoms, dtype=bool)
        order = jnp.sum(gap[..., None] < ideal[..., None] * jnp.asarray([1.15, 0.9, 0.8]), axis=-1) * both
        stable = (jnp.sum(order, axis=2) == allowed[what]) & real
        share = jnp.sum(stable, axis=1) / jnp.sum(real, axis=1)
        kinds_seen = jnp.zeros(kinds).at[what].add(real)
        return place, what, charge, order.astype(jnp.int8), share, jnp.all(stable | ~real, axis=1), kinds_seen, sizes

    def weights(path, r):
        """This lets the last layers say little."""
        little = path[0].key in {"leave"} and len(r.shape) > 1
        return normal(*r.shape, dtype=dtype, scale=0.3 * r.scale) if little else r

    p = jax.tree_util.tree_map_with_path(weights, drawn(structs, dtype), is_leaf=lambda r: hasattr(r, "offset"))
    return Built(run, (p, integers(b, below=atoms // 2), integers(below=1000)))
