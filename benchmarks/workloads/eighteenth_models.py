"""Models of pictures, series, molecules, streets and boxes, the eighteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.sixteenth_models import equinox_parts, nnx_program

GROUP = "eighteenth"


@program("gated-multiplications-across-tokens-no-attention-equinox", GROUP)
def _gated_tokens(size: Size) -> Built:
    """This gives masked words by a network whose tokens meet only in a learned matrix that gates half of the channels.

    One narrow head of attention is added to the gate, as its authors found helpful for pairs of sentences.
    """
    import equinox as eqx

    b, t, n, tiny, words = pick(size, (12, 257, 512, 64, 8000), (2, 129, 128, 32, 1000), (2, 7, 8, 4, 13))
    dtype = half(size)

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        gate_norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        qkv: eqx.nn.Linear
        project: eqx.nn.Linear
        spatial: jax.Array
        spatial_bias: jax.Array

        def __init__(self, key):
            k = jax.random.split(key, 5)
            self.norm, self.gate_norm = eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(2 * n)
            self.up, self.down = eqx.nn.Linear(n, 4 * n, key=k[0]), eqx.nn.Linear(2 * n, n, key=k[1])
            self.qkv = eqx.nn.Linear(n, 3 * tiny, use_bias=False, key=k[2])
            self.project = eqx.nn.Linear(tiny, 2 * n, key=k[3])
            self.spatial, self.spatial_bias = jax.random.normal(k[4], (t, t)) * 1e-3, jnp.zeros(t)

        def __call__(self, x, alive):
            y = jax.vmap(self.norm)(x).astype(dtype)
            u, v = jnp.split(jax.nn.gelu(jax.vmap(self.up)(y)), 2, axis=-1)
            v = jax.vmap(self.gate_norm)(v).astype(dtype) * alive[:, None]
            q, k, w = jnp.split(jax.vmap(self.qkv)(y), 3, axis=-1)
            scores = jnp.where(alive[None], (q @ k.T).astype(jnp.float32) * tiny**-0.5, -1e9)
            seen = jax.vmap(self.project)(jax.nn.softmax(scores).astype(dtype) @ w)
            gate = self.spatial @ v + self.spatial_bias[:, None] + 1 + seen
            return x + jax.vmap(self.down)(u * gate)

    class Net(eqx.Module):
        table: eqx.nn.Embedding
        blocks: list
        norm: eqx.nn.LayerNorm

        def __init__(self, key):
            k = jax.random.split(key, 5)
            self.table, self.norm = eqx.nn.Embedding(words, n, key=k[0]), eqx.nn.LayerNorm(n)
            self.blocks = [Block(key) for key in k[1:]]

        def __call__(self, text, alive):
            x = self.table.weight[jnp.where(alive, text, 0)] * np.sqrt(n)
            x = x.astype(dtype)
            for block in self.blocks:
                x = block(x, alive)
            logits = (jax.vmap(self.norm)(x).astype(dtype) @ self.table.weight.T).astype(jnp.float32)
            best, which = lax.top_k(logits, 5)
            return best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), which

    leaves, whole = equinox_parts(Net, dtype)
    arguments = (leaves, integers(b, t, below=words), booleans(b, t))
    return Built(lambda leaves, text, alive: jax.vmap(whole(leaves))(text, alive), arguments)


@program("kernels-made-by-each-pixel-involution-nnx", GROUP)
def _involution(size: Size) -> Built:
    """This gives a depth map where every pixel makes its own small kernel, shared among groups of channels.

    Afterwards rows and columns are pooled apart, and gate the places by coordinate attention.
    """
    from flax import nnx

    b, high, wide, n, k, groups = pick(size, (4, 90, 122, 128, 7, 8), (1, 45, 61, 32, 7, 4), (2, 7, 9, 8, 7, 2))
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Involution(nnx.Module):
        def __init__(self, rngs):
            self.reduce = nnx.Conv(n, n // 4, (1, 1), rngs=rngs, **kinds)
            self.norm = nnx.BatchNorm(n // 4, use_running_average=True, rngs=rngs, **kinds)
            self.span = nnx.Conv(n // 4, k * k * groups, (1, 1), rngs=rngs, **kinds)

        def __call__(self, x):
            made = self.span(nnx.relu(self.norm(self.reduce(x)))).reshape(b, high, wide, k * k, groups)
            pad = jnp.pad(x, ((0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0)))
            near = [pad[:, i : i + high, j : j + wide] for i in range(k) for j in range(k)]
            near = jnp.stack(near, axis=3).reshape(b, high, wide, k * k, groups, n // groups)
            return jnp.einsum("bhwkg,bhwkgc->bhwgc", made, near).reshape(x.shape)

    class Coordinates(nnx.Module):
        def __init__(self, rngs):
            self.both = nnx.Linear(n, n // 4, rngs=rngs, **kinds)
            self.rows, self.columns = (nnx.Linear(n // 4, n, rngs=rngs, **kinds) for _ in range(2))

        def __call__(self, x):
            y = jnp.concatenate([jnp.mean(x, axis=2), jnp.mean(x, axis=1)], axis=1)
            y = nnx.hard_swish(self.both(y))
            rows, columns = jnp.split(y, [high], axis=1)
            gate = nnx.sigmoid(self.rows(rows))[:, :, None] * nnx.sigmoid(self.columns(columns))[:, None]
            return x * gate

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(3, n, (3, 3), rngs=rngs, **kinds)
            self.involutions = nnx.List([Involution(rngs) for _ in range(2)])
            self.places = nnx.List([Coordinates(rngs) for _ in range(2)])
            self.mixes = nnx.List([nnx.Conv(n, n, (1, 1), rngs=rngs, **kinds) for _ in range(2)])
            self.bins = nnx.Conv(n, 48, (1, 1), rngs=rngs, **kinds)

        def __call__(self, x):
            x = nnx.relu(self.stem(x.astype(dtype)))
            for involution, place, mix in zip(self.involutions, self.places, self.mixes, strict=True):
                x = nnx.relu(x + mix(place(nnx.relu(involution(x)))))
            probs = nnx.softmax(self.bins(x).astype(jnp.float32), axis=-1)
            depth = jnp.sum(probs * jnp.geomspace(0.5, 80.0, 48), axis=-1)
            return depth, -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1)

    return nnx_program(size, Net, normal(b, high, wide, 3))


@program("street-lines-pooled-then-attended-six-futures-linen", GROUP)
def _streets(size: Size) -> Built:
    """This gives six likely futures of each car in a scene from short lines that draw streets and past tracks.

    Points of a line hear the maximum over the line three times; lines attend to each other; every mode decodes a path.
    """
    import flax.linen as nn

    b, lines, points, n, cars, modes, ahead = pick(
        size, (24, 203, 19, 128, 11, 6, 60), (8, 61, 19, 48, 5, 6, 30), (2, 7, 5, 8, 3, 6, 4)
    )
    dtype = half(size)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, vectors, kinds, here):
            known = jnp.any(here, axis=-1)
            centre = jnp.sum(jnp.where(here[..., None], vectors[..., :2], 0.0), axis=2, keepdims=True)
            centre = centre / jnp.maximum(jnp.sum(here, axis=2), 1)[:, :, None, None]
            local = vectors.at[..., :2].add(-centre)
            x = jnp.concatenate([local, jnp.broadcast_to(jax.nn.one_hot(kinds, 5)[:, :, None], (*here.shape, 5))], -1)
            x = x.astype(dtype)
            for _ in range(3):
                y = nn.relu(nn.LayerNorm(dtype=dtype)(nn.Dense(n, dtype=dtype)(x)))
                top = jnp.max(jnp.where(here[..., None], y, -jnp.inf), axis=2, keepdims=True)
                top = jnp.where(known[:, :, None, None], top, 0)
                x = jnp.concatenate([y, jnp.broadcast_to(top, y.shape)], axis=-1)
            x = jnp.max(jnp.where(here[..., None], x, -1e4), axis=2)
            x = x / (jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True) + 1e-6).astype(dtype)
            x = x + nn.Dense(2 * n, dtype=dtype)(0.1 * centre[:, :, 0].astype(dtype))
            mask = nn.make_attention_mask(jnp.ones_like(known), known)
            x = x + nn.MultiHeadDotProductAttention(4, qkv_features=n, out_features=2 * n, dtype=dtype)(x, mask=mask)
            own = x[:, :cars]
            queries = self.param("modes", nn.initializers.normal(1.0), (modes, 2 * n)).astype(dtype)
            z = nn.LayerNorm(dtype=dtype)(own[:, :, None] + queries)
            z = z + nn.Dense(2 * n, dtype=dtype)(nn.relu(nn.Dense(4 * n, dtype=dtype)(z)))
            steps = nn.Dense(ahead * 2)(z.astype(jnp.float32)).reshape(b, cars, modes, ahead, 2)
            paths = jnp.cumsum(steps, axis=3) + centre[:, :cars, :, None]
            chance = nn.softmax(nn.Dense(1)(z.astype(jnp.float32))[..., 0], axis=-1)
            best = jnp.argmax(chance, axis=-1)[..., None, None, None]
            return paths, chance, jnp.take_along_axis(paths, best, axis=2)[:, :, 0, -1]

    inputs = (normal(b, lines, points, 6, scale=10.0), integers(b, lines, below=5), booleans(b, lines, points))
    return linen_program(size, Net(), *inputs)


@program("trend-and-season-stacks-subtract-then-forecast-haiku", GROUP)
def _stacks(size: Size) -> Built:
    """This gives forecasts of many series by stacks that each explain a part and subtract it from what is left."""
    import haiku as hk

    b, past, ahead, n = pick(size, (8192, 144, 48, 512), (1024, 101, 24, 128), (3, 11, 4, 8))
    dtype = half(size)
    ago, soon = np.arange(past) / past, np.arange(ahead) / ahead
    powers = [np.stack([z**i for i in range(4)]).astype(np.float32) for z in (ago, soon)]
    turns = np.arange(1, 8)[:, None] * 2 * np.pi
    waves = [np.concatenate([np.cos(turns * z), np.sin(turns * z)]).astype(np.float32) for z in (ago, soon)]

    def block(x, basis):
        for _ in range(4):
            x = jax.nn.relu(hk.Linear(n)(x))
        if basis is None:
            return hk.Linear(past)(hk.Linear(32)(x)), hk.Linear(ahead)(hk.Linear(32)(x))
        back, front = (hk.Linear(basis[0].shape[0], with_bias=False)(x) for _ in range(2))
        return back @ basis[0].astype(dtype), front @ basis[1].astype(dtype)

    def net(series, known):
        count = jnp.maximum(jnp.sum(known, axis=1, keepdims=True), 1)
        level = jnp.sum(jnp.where(known, jnp.abs(series), 0), axis=1, keepdims=True) / count + 1e-3
        left = (jnp.where(known, series, 0) / level).astype(dtype)
        total, parts = 0.0, []
        for basis in (powers, waves, None):
            part = 0.0
            for _ in range(2):
                back, front = block(left, basis)
                left = jnp.where(known, left - back, 0)
                part = part + front.astype(jnp.float32)
            parts.append(part * level)
            total = total + parts[-1]
        return total, jnp.stack(parts, axis=1), jnp.mean(left.astype(jnp.float32) ** 2, axis=-1)

    model = hk.without_apply_rng(hk.transform(net))
    inputs = (normal(b, past, scale=3.0, offset=5.0), booleans(b, past))
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs))
    return Built(model.apply, (module_weights(structs, dtype), *inputs))


@program("delays-found-by-fourier-products-instead-of-attention-linen", GROUP)
def _delays(size: Size) -> Built:
    """This gives a forecast by layers that add up shifted copies of the series at its most alike delays.

    The likeness at each delay is a product in the Fourier domain; a moving mean takes the trend out after each branch.
    """
    import flax.linen as nn

    b, t, ahead, channels, n, h, top = pick(
        size, (24, 336, 96, 21, 256, 8, 5), (8, 150, 30, 7, 48, 4, 5), (2, 14, 3, 3, 8, 2, 2)
    )
    dtype, wide = half(size), pick(size, 25, 25, 5)

    def smooth(x):
        left, right = (jnp.repeat(x[:, i], wide // 2, axis=1) for i in (slice(0, 1), slice(-1, None)))
        padded = jnp.concatenate([left, x, right], axis=1).astype(jnp.float32)
        total = jnp.cumsum(jnp.pad(padded, ((0, 0), (1, 0), (0, 0))), axis=1)
        return ((total[:, wide:] - total[:, :-wide]) / wide).astype(x.dtype)

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x):
            q, k, v = (nn.DenseGeneral((h, n // h), dtype=dtype)(x) for _ in range(3))
            waves = (jnp.fft.rfft(z.astype(jnp.float32), axis=1) for z in (q, k))
            alike = jnp.fft.irfft(next(waves) * jnp.conj(next(waves)), n=t, axis=1)
            score, delay = lax.top_k(jnp.mean(alike, axis=(2, 3)), top)
            share = nn.softmax(score / np.sqrt(t), axis=-1).astype(dtype)
            at = (jnp.arange(t)[None, :, None] + delay[:, None]) % t
            shifted = jax.vmap(lambda v, at: v[at])(v, at)
            y = jnp.einsum("bk,btkhd->bthd", share, shifted)
            return nn.DenseGeneral(n, axis=(-2, -1), dtype=dtype)(y), delay

    class Net(nn.Module):
        @nn.compact
        def __call__(self, series, hour):
            mean, spread = jnp.mean(series, axis=1, keepdims=True), jnp.std(series, axis=1, keepdims=True) + 1e-4
            z = ((series - mean) / spread).astype(dtype)
            x = nn.Conv(n, (3,), padding="CIRCULAR", use_bias=False, dtype=dtype)(z) + nn.Embed(24, n, dtype=dtype)(
                hour
            )
            trend, delays = smooth(z), []
            for _ in range(3):
                y, delay = Mixer()(x)
                delays.append(delay)
                for branch in (
                    lambda x, y=y: y,
                    lambda x: nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(2 * n, dtype=dtype)(x))),
                ):
                    x = x + branch(x)
                    slow = smooth(x)
                    x, trend = x - slow, trend + nn.Dense(channels, use_bias=False, dtype=dtype)(slow)
            x = nn.LayerNorm(dtype=dtype)(x)
            x = nn.Dense(channels, dtype=dtype)(x - jnp.mean(x, axis=1, keepdims=True)) + trend
            after = nn.Dense(ahead)(jnp.swapaxes(x, 1, 2).astype(jnp.float32))
            return jnp.swapaxes(after, 1, 2) * spread + mean, jnp.stack(delays)

    return linen_program(size, Net(), normal(b, t, channels), integers(b, t, below=24))


@program("filters-of-distances-molecule-energies-and-pulls-haiku", GROUP)
def _molecules(size: Size) -> Built:
    """This gives energies of molecules and the forces on their atoms by filters that are smooth functions of distance."""
    import haiku as hk

    molecules, atoms, near, n, bases = pick(size, (160, 27, 20, 128, 50), (6, 19, 12, 64, 50), (2, 5, 3, 8, 6))
    total, dtype = molecules * atoms, jnp.float32
    senders = (np.arange(total)[:, None] // atoms) * atoms + (np.arange(total)[:, None] + 1 + np.arange(near)) % atoms
    senders, receivers = senders.reshape(-1).astype(np.int32), np.repeat(np.arange(total), near).astype(np.int32)

    def soft(x):
        return jax.nn.softplus(x) - np.log(2.0)

    def net(places, kinds):
        gap = places[senders] - places[receivers]
        far = jnp.sqrt(jnp.sum(gap**2, axis=-1) + 1e-8)
        window = jnp.where(far < 5.0, 0.5 * (jnp.cos(far * jnp.pi / 5.0) + 1), 0.0)
        centres = jnp.linspace(0.0, 5.0, bases)
        shells = jnp.exp(-10.0 * (far[:, None] - centres) ** 2)
        x = hk.Embed(20, n)(kinds)
        for _ in range(3):
            filters = hk.Linear(n)(soft(hk.Linear(n)(shells))) * window[:, None]
            y = hk.Linear(n, with_bias=False)(x)
            y = jax.ops.segment_sum(y[senders] * filters, receivers, num_segments=total, indices_are_sorted=True)
            x = x + hk.Linear(n)(soft(hk.Linear(n)(y)))
        each = hk.Linear(1)(soft(hk.Linear(n // 2)(x)))[:, 0]
        alone = hk.get_parameter("alone", (20,), init=jnp.zeros)[kinds]
        energies = jax.ops.segment_sum(each + alone, jnp.arange(total) // atoms, num_segments=molecules)
        return jnp.sum(energies), energies

    model = hk.without_apply_rng(hk.transform(net))

    def pulled(params, places, kinds):
        (_, energies), slope = jax.value_and_grad(model.apply, argnums=1, has_aux=True)(params, places, kinds)
        strain = jnp.einsum("mai,maj->mij", *(z.reshape(molecules, atoms, 3) for z in (places, slope)))
        return energies, -slope, strain

    inputs = (normal(total, 3, scale=1.5), integers(total, below=20))
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs))
    return Built(pulled, (module_weights(structs, dtype), *inputs))


@program("feature-pyramid-fused-both-ways-by-positive-shares-nnx", GROUP)
def _pyramid(size: Size) -> Built:
    """This gives boxes and classes at four scales after maps of all scales were fused downwards and upwards.

    Each fusion is a mean with learned positive shares; the heads are shared between scales but their norms are not.
    """
    from flax import nnx

    b, side, n, classes, keep = pick(size, (8, 64, 88, 90, 100), (1, 32, 40, 90, 50), (2, 8, 8, 4, 5))
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}
    widths = (n // 2, n, 2 * n, 3 * n)

    class Apart(nnx.Module):
        def __init__(self, out, rngs):
            self.depth = nnx.Conv(n, n, (3, 3), feature_group_count=n, use_bias=False, rngs=rngs, **kinds)
            self.point = nnx.Conv(n, out, (1, 1), rngs=rngs, **kinds)

        def __call__(self, x):
            return self.point(self.depth(x))

    class Fused(nnx.Module):
        def __init__(self, count, rngs):
            self.shares = nnx.Param(jnp.ones(count, dtype))
            self.conv = Apart(n, rngs)
            self.norm = nnx.BatchNorm(n, use_running_average=True, rngs=rngs, **kinds)

        def __call__(self, *maps):
            share = nnx.relu(self.shares[...])
            mixed = sum(s * m for s, m in zip(share, maps, strict=True)) / (jnp.sum(share) + 1e-4)
            return self.norm(self.conv(nnx.silu(mixed)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.List([nnx.Conv(w, n, (1, 1), rngs=rngs, **kinds) for w in widths])
            self.down = nnx.List([nnx.List([Fused(2, rngs) for _ in range(3)]) for _ in range(2)])
            self.up = nnx.List([nnx.List([Fused(2 + (i < 2), rngs) for i in range(3)]) for _ in range(2)])
            self.tower = nnx.List([Apart(n, rngs) for _ in range(2)])
            norms = [nnx.List([nnx.GroupNorm(n, num_groups=4, rngs=rngs, **kinds) for _ in range(2)]) for _ in widths]
            self.norms = nnx.List(norms)
            self.kinds, self.boxes = Apart(classes, rngs), Apart(4, rngs)

        def __call__(self, *maps):
            maps = [conv(m.astype(dtype)) for conv, m in zip(self.first, maps, strict=True)]
            for down, up in zip(self.down, self.up, strict=True):
                mid = [None, None, None, maps[3]]
                for i in (2, 1, 0):
                    mid[i] = down[i](maps[i], jax.image.resize(mid[i + 1], maps[i].shape, "nearest"))
                out = [mid[0]]
                for i in range(3):
                    small = nnx.max_pool(out[i], (3, 3), (2, 2), padding="SAME")
                    out.append(up[i](*((maps[i + 1], mid[i + 1], small) if i < 2 else (maps[3], small))))
                maps = out
            scores, boxes = [], []
            for i, fused in enumerate(maps):
                x = fused
                for conv, norm in zip(self.tower, self.norms[i], strict=True):
                    x = nnx.silu(norm(conv(x)))
                step, wide = 2.0 ** (i + 2), x.shape[1]
                centre = (jnp.stack(jnp.meshgrid(*(jnp.arange(wide),) * 2), axis=-1) + 0.5) * step
                sides = jnp.exp(jnp.clip(self.boxes(x).astype(jnp.float32), -4, 4)) * step
                box = jnp.concatenate([centre - sides[..., :2], centre + sides[..., 2:]], axis=-1)
                boxes.append(jnp.clip(box, 0, 4 * side).reshape(b, -1, 4))
                scores.append(self.kinds(x).reshape(b, -1, classes))
            scores, boxes = jnp.concatenate(scores, axis=1), jnp.concatenate(boxes, axis=1)
            score = nnx.sigmoid(scores.astype(jnp.float32))
            best, at = lax.top_k(jnp.max(score, axis=-1), keep)
            kind = jnp.take_along_axis(jnp.argmax(score, axis=-1), at, axis=1)
            return best, kind, jnp.take_along_axis(boxes, at[..., None], axis=1)

    return nnx_program(size, Net, *(normal(b, side >> i, side >> i, w) for i, w in enumerate(widths)))


@program("spline-curves-on-edges-instead-of-weights-equinox", GROUP)
def _splines(size: Size) -> Built:
    """This gives a regression of tables by layers where every edge is a learned curve made of cubic splines."""
    import equinox as eqx

    b, inputs, n, out, grid = pick(size, (8192, 31, 96, 3, 12), (500, 31, 24, 3, 8), (3, 5, 4, 2, 4))
    knots = (np.arange(-3, grid + 4) * (2 / grid) - 1).astype(np.float32)

    class Layer(eqx.Module):
        coefficients: jax.Array
        scale: jax.Array
        base: eqx.nn.Linear

        def __init__(self, i, o, key):
            k1, k2 = jax.random.split(key)
            self.coefficients = jax.random.normal(k1, (i, grid + 3, o)) * 0.1
            self.scale, self.base = jnp.ones((i, o)), eqx.nn.Linear(i, o, use_bias=False, key=k2)

        def __call__(self, x):
            z = x[:, None]
            basis = ((z >= knots[:-1]) & (z < knots[1:])).astype(x.dtype)
            for k in range(1, 4):
                left = (z - knots[: -k - 1]) / (knots[k:-1] - knots[: -k - 1])
                right = (knots[k + 1 :] - z) / (knots[k + 1 :] - knots[1:-k])
                basis = left * basis[:, :-1] + right * basis[:, 1:]
            return self.base(jax.nn.silu(x)) + jnp.einsum("ig,igo,io->o", basis, self.coefficients, self.scale)

    class Net(eqx.Module):
        layers: list

        def __init__(self, key):
            k = jax.random.split(key, 3)
            self.layers = [Layer(i, o, k) for i, o, k in zip((inputs, n, n), (n, n, out), k, strict=True)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(jnp.tanh(x))
            return x

    leaves, whole = equinox_parts(Net, jnp.float32)

    def predict(leaves, x, low, high):
        net = whole(leaves)
        y = jax.vmap(net)((x - low) / (jnp.abs(high - low) + 1.0))
        edges = jnp.mean(jnp.abs(net.layers[0].coefficients), axis=1)
        return y, jnp.sum(edges, axis=1) / jnp.sum(edges)

    return Built(predict, (leaves, normal(b, inputs), normal(inputs), normal(inputs)))
