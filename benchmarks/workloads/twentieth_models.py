"""Models of pictures, voices, graphs, molecules, shoppers and series, the twentieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_models import equinox_parts, nnx_program

GROUP = "twentieth"


@program("picture-tokens-merged-by-likeness-between-layers-linen", GROUP)
def _tome(size: Size) -> Built:
    """This gives classes of pictures by a transformer that merges like tokens in each layer, as ToMe (Bolya, 2023).

    Tokens are split in two sets, each of the first finds its nearest in the second, and the closest pairs are averaged
    by their sizes; attention adds the logarithm of the sizes.
    """
    import flax.linen as nn

    b, side, patch, n, h, fewer, classes = pick(
        size, (32, 224, 16, 384, 6, 23, 1000), (4, 144, 16, 192, 3, 9, 1000), (2, 12, 4, 8, 2, 2, 5)
    )
    dtype = half(size)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, sizes):
            t = x.shape[1]
            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            q, k, v = jnp.moveaxis(nn.DenseGeneral((3, h, n // h), dtype=dtype)(y), 2, 0)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (n // h) ** -0.5
            probs = nn.softmax(scores + jnp.log(sizes)[:, None, None], axis=-1).astype(dtype)
            x = x + nn.DenseGeneral(n, (-2, -1), dtype=dtype)(jnp.einsum("bhqk,bkhd->bqhd", probs, v))
            metric = jnp.mean(k, axis=2).astype(jnp.float32)
            metric = metric / jnp.linalg.norm(metric, axis=-1, keepdims=True)
            like = jnp.einsum("bid,bjd->bij", metric[:, ::2], metric[:, 1::2]).at[:, 0].set(-jnp.inf)
            best, to = jnp.max(like, axis=-1), jnp.argmax(like, axis=-1)
            order = jnp.argsort(-best, axis=-1)
            gone, kept = order[:, :fewer], jnp.sort(order[:, fewer:], axis=-1)
            target = jnp.take_along_axis(to, gone, axis=1)
            z = jnp.concatenate([x.astype(jnp.float32) * sizes[..., None], sizes[..., None]], axis=-1)
            first, second = z[:, ::2], z[:, 1::2]
            moved = jnp.take_along_axis(first, gone[..., None], axis=1)
            second = jax.vmap(lambda s, i, m: s.at[i].add(m))(second, target, moved)
            z = jnp.concatenate([jnp.take_along_axis(first, kept[..., None], axis=1), second], axis=1)
            assert z.shape[1] == t - fewer
            x, sizes = (z[..., :-1] / z[..., -1:]).astype(dtype), z[..., -1]
            y = nn.Dense(4 * n, dtype=dtype)(nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x))
            return x + nn.Dense(n, dtype=dtype)(nn.gelu(y)), sizes

    class Net(nn.Module):
        @nn.compact
        def __call__(self, pictures):
            x = nn.Conv(n, (patch, patch), (patch, patch), dtype=dtype)(pictures.astype(dtype) / 255 - 0.5)
            x = x.reshape(b, -1, n)
            cls = self.param("cls", nn.initializers.zeros, (1, 1, n)).astype(dtype)
            x = jnp.concatenate([jnp.broadcast_to(cls, (b, 1, n)), x], axis=1)
            x = x + self.param("places", nn.initializers.normal(0.02), (1, x.shape[1], n)).astype(dtype)
            sizes = jnp.ones(x.shape[:2], jnp.float32)
            for _ in range(3):
                x, sizes = Layer()(x, sizes)
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            return nn.Dense(classes, dtype=jnp.float32)(x[:, 0]), sizes

    return linen_program(size, Net(), integers(b, side, side, 3, below=256))


@program("who-speaks-by-multi-scale-units-and-attentive-deviations-nnx", GROUP)
def _ecapa(size: Size) -> Built:
    """This gives vectors of speakers by Res2 units, channel gates and attentive statistics, as ECAPA-TDNN (2020).

    The batch norms run on stored statistics, frames behind the end of an utterance are masked, and all pairs of
    vectors are scored by cosines that are normalised by a cohort.
    """
    from flax import nnx

    b, t, mels, n, parts, low, out, cohort = pick(
        size, (24, 301, 80, 512, 8, 128, 192, 600), (2, 201, 80, 128, 8, 32, 96, 200), (2, 9, 5, 8, 4, 4, 6, 7)
    )
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Unit(nnx.Module):
        def __init__(self, i, o, wide, dilation, rngs):
            self.conv = nnx.Conv(i, o, (wide,), kernel_dilation=(dilation,), rngs=rngs, **kinds)
            self.norm = nnx.BatchNorm(o, use_running_average=True, rngs=rngs, **kinds)

        def __call__(self, x):
            return self.norm(nnx.relu(self.conv(x)))

    class Block(nnx.Module):
        def __init__(self, dilation, rngs):
            self.enter, self.leave = Unit(n, n, 1, 1, rngs), Unit(n, n, 1, 1, rngs)
            self.units = nnx.List([Unit(n // parts, n // parts, 3, dilation, rngs) for _ in range(parts - 1)])
            self.down, self.up = nnx.Linear(n, low, rngs=rngs, **kinds), nnx.Linear(low, n, rngs=rngs, **kinds)

        def __call__(self, x, mask):
            pieces = jnp.split(self.enter(x), parts, axis=-1)
            made = [pieces[0]]
            for i, unit in enumerate(self.units):
                made.append(unit(pieces[i + 1] + made[-1] if i else pieces[1]))
            y = self.leave(jnp.concatenate(made, axis=-1))
            mean = jnp.sum(y * mask, axis=1, keepdims=True) / jnp.sum(mask, axis=1, keepdims=True)
            return x + y * nnx.sigmoid(self.up(nnx.relu(self.down(mean))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.enter = Unit(mels, n, 5, 1, rngs)
            self.blocks = nnx.List([Block(dilation, rngs) for dilation in (2, 3, 4)])
            self.merge = nnx.Linear(3 * n, 3 * n, rngs=rngs, **kinds)
            self.look, self.score = (
                nnx.Linear(9 * n, low, rngs=rngs, **kinds),
                nnx.Linear(low, 3 * n, rngs=rngs, **kinds),
            )
            self.last = nnx.Linear(6 * n, out, rngs=rngs, **kinds)

        def __call__(self, mel, lengths, others):
            alive = (jnp.arange(t) < (t // 2 + lengths)[:, None])[..., None]
            mask = alive.astype(jnp.float32)
            mean = jnp.sum(mel * mask, axis=1, keepdims=True) / jnp.sum(mask, axis=1, keepdims=True)
            x = self.enter(((mel - mean) * mask).astype(dtype))
            seen = []
            for block in self.blocks:
                x = block(x, mask.astype(dtype))
                seen.append(x)
            x = nnx.relu(self.merge(jnp.concatenate(seen, axis=-1))).astype(jnp.float32)

            def statistics(w):
                mean = jnp.sum(w * x, axis=1, keepdims=True)
                spread = jnp.sum(w * (x - mean) ** 2, axis=1, keepdims=True)
                return mean, jnp.sqrt(jnp.maximum(spread, 1e-12))

            mean, spread = statistics(mask / jnp.sum(mask, axis=1, keepdims=True))
            whole = jnp.concatenate([x, jnp.broadcast_to(mean, x.shape), jnp.broadcast_to(spread, x.shape)], axis=-1)
            logits = self.score(jnp.tanh(nnx.relu(self.look(whole.astype(dtype))))).astype(jnp.float32)
            mean, spread = statistics(nnx.softmax(jnp.where(alive, logits, -jnp.inf), axis=1))
            pooled = jnp.concatenate([mean, spread], axis=-1)[:, 0]
            e = self.last(pooled.astype(dtype)).astype(jnp.float32)
            e = e / jnp.linalg.norm(e, axis=-1, keepdims=True)
            c = others / jnp.linalg.norm(others, axis=-1, keepdims=True)
            near = jnp.sort(e @ c.T, axis=-1)[:, -cohort // 3 :]
            centre, wide = jnp.mean(near, axis=-1), jnp.std(near, axis=-1) + 1e-3
            raw = e @ e.T
            fair = (raw - centre[:, None]) / wide[:, None] + (raw - centre) / wide
            return e, 0.5 * fair

    return nnx_program(size, Net, normal(b, t, mels, scale=2.0), integers(b, below=t // 2), normal(cohort, out))


@program("papers-authors-and-topics-typed-edges-attention-equinox", GROUP)
def _typed_graph(size: Size) -> Built:
    """This gives classes of papers in a graph with typed nodes and edges by attention, as HGT (Hu et al., 2020).

    Every kind of edge has matrices for each head and a prior; the softmax runs over all edges that end at a node.
    """
    import equinox as eqx

    counts, edges, n, h, classes = pick(
        size, ((9001, 6007, 801), (30011, 24001, 18013), 128, 8, 349), ((1201, 801, 101), (4001, 3001, 2003), 64, 4, 41),
        ((7, 5, 3), (11, 9, 6), 8, 2, 4),
    )  # fmt: skip
    dtype, d = half(size), n // h
    kinds = ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2))
    amount = (edges[0], edges[1], edges[2], edges[1], edges[2])

    class Layer(eqx.Module):
        keys: list
        queries: list
        values: list
        outs: list
        norms: list
        look: jax.Array
        send: jax.Array
        prior: jax.Array
        skip: jax.Array

        def __init__(self, key):
            k = jax.random.split(key, 14)
            self.keys, self.queries, self.values, self.outs = (
                [eqx.nn.Linear(n, n, key=k[3 * i + j]) for j in range(3)] for i in range(4)
            )
            self.norms = [eqx.nn.LayerNorm(n) for _ in range(3)]
            self.look = jax.random.normal(k[12], (len(kinds), h, d, d)) * d**-0.5
            self.send = jax.random.normal(k[13], (len(kinds), h, d, d)) * d**-0.5
            self.prior, self.skip = jnp.ones((len(kinds), h)), jnp.ones(3)

        def __call__(self, xs, sources, targets):
            q, k, v = (
                [jax.vmap(f)(x).reshape(-1, h, d) for f, x in zip(fs, xs, strict=True)]
                for fs in (self.queries, self.keys, self.values)
            )
            scores, messages = [[], [], []], [[], [], []]
            ends = [[], [], []]
            for r, (source, target) in enumerate(kinds):
                key = jnp.einsum("ehd,hdf->ehf", k[source], self.look[r])[sources[r]]
                score = jnp.sum(q[target][targets[r]] * key, axis=-1).astype(jnp.float32)
                scores[target].append(score * self.prior[r].astype(jnp.float32) * d**-0.5)
                messages[target].append(jnp.einsum("ehd,hdf->ehf", v[source], self.send[r])[sources[r]])
                ends[target].append(targets[r])
            out = []
            for i in range(3):
                score, message, end = (jnp.concatenate(z[i]) for z in (scores, messages, ends))
                high = jax.ops.segment_max(score, end, counts[i])
                e = jnp.exp(score - high[end])
                total = jax.ops.segment_sum(e, end, counts[i])
                share = e / total[end]
                seen = jax.ops.segment_sum(share[..., None] * message.astype(jnp.float32), end, counts[i])
                y = jax.vmap(self.outs[i])(jax.nn.gelu(seen.reshape(-1, n)).astype(dtype))
                keep = jax.nn.sigmoid(self.skip[i])
                out.append(jax.vmap(self.norms[i])(keep * y + (1 - keep) * xs[i]))
            return out

    class Net(eqx.Module):
        enter: list
        layers: list
        head: eqx.nn.Linear

        def __init__(self, key):
            k = jax.random.split(key, 6)
            self.enter = [eqx.nn.Linear(n, n, key=key) for key in k[:3]]
            self.layers = [Layer(key) for key in k[3:5]]
            self.head = eqx.nn.Linear(n, classes, key=k[5])

        def __call__(self, xs, sources, targets):
            xs = [jnp.tanh(jax.vmap(f)(x.astype(dtype))) for f, x in zip(self.enter, xs, strict=True)]
            for layer in self.layers:
                xs = layer(xs, sources, targets)
            return jax.nn.log_softmax(jax.vmap(self.head)(xs[0]).astype(jnp.float32))

    leaves, whole = equinox_parts(Net, dtype)
    xs = [normal(c, n) for c in counts]
    sources = [integers(a, below=counts[s]) for a, (s, _) in zip(amount, kinds, strict=True)]
    targets = [integers(a, below=counts[t], ramp=True) for a, (_, t) in zip(amount, kinds, strict=True)]
    return Built(lambda leaves, *xs: whole(leaves)(*xs), (leaves, xs, sources, targets))


@program("angles-between-bonds-as-messages-on-edges-energies-and-pulls", GROUP)
def _dimenet(size: Size) -> Built:
    """This gives energies and forces of molecules from messages on edges that read angles, as DimeNet++ (2020).

    A triplet is two edges that share an atom; Bessel functions of distances and cosines of angles weigh the messages.
    """
    atoms, edges, triplets, molecules, n, low, radial, angular = pick(
        size, (769, 9013, 60013, 37, 128, 64, 6, 7), (97, 1009, 5003, 5, 64, 32, 6, 7), (9, 20, 40, 2, 8, 4, 3, 2)
    )

    def swish(x):
        return x * jax.nn.sigmoid(x)

    def energy(p, places, kinds, i, j, inner, outer, owner):
        gap = places[j] - places[i]
        far = jnp.sqrt(jnp.sum(gap**2, axis=-1) + 1e-3)
        s = jnp.minimum(far / 5.0, 1.0)
        envelope = (1 / (s + 0.05) - 28 * s**5 + 48 * s**6 - 21 * s**7) * (s < 1)
        rbf = envelope[:, None] * jnp.sin(s[:, None] * jnp.arange(1, radial + 1) * jnp.pi)
        cosine = jnp.sum(gap[inner] * gap[outer], axis=-1) / (far[inner] * far[outer])
        angle = jnp.arccos(jnp.clip(cosine, -0.999, 0.999))
        around = jnp.cos(angle[:, None] * jnp.arange(angular))
        sbf = (rbf[inner][:, :, None] * around[:, None]).reshape(triplets, -1)
        e = p["kinds"][kinds]
        m = swish(jnp.concatenate([e[i], e[j], rbf @ p["rbf"]], axis=-1) @ p["enter"])
        total = jnp.zeros((atoms, n))
        for layer in p["layers"]:
            x = swish(m @ layer["same"])
            y = swish(m @ layer["other"]) * (rbf @ layer["rbf"])
            y = swish(y @ layer["down"])[inner] * (sbf @ layer["sbf1"] @ layer["sbf2"])
            y = swish(jax.ops.segment_sum(y, outer, edges) @ layer["up"])
            z = x + y
            for w in layer["rest"]:
                z = z + swish(swish(z @ w[0]) @ w[1])
            m = m + swish(z @ layer["last"])
            total = total + jax.ops.segment_sum(m * (rbf @ layer["out_rbf"]), j, atoms)
        atom = (swish(swish(total @ p["out1"]) @ p["out2"]) @ p["out3"])[:, 0]
        return jnp.sum(atom), jax.ops.segment_sum(atom, owner, molecules, indices_are_sorted=True)

    def pulled(p, places, *graph):
        (_, energies), slope = jax.value_and_grad(energy, argnums=1, has_aux=True)(p, places, *graph)
        return energies, -slope

    def layer():
        p = {name: weight(n, n) for name in ("same", "other", "last")} | {"down": weight(n, low), "up": weight(low, n)}
        p |= {"rbf": weight(radial, n), "out_rbf": weight(radial, n), "sbf1": weight(radial * angular, 8)}
        return p | {"sbf2": weight(8, low), "rest": [(weight(n, n), weight(n, n)) for _ in range(2)]}

    p = {"kinds": normal(95, n), "rbf": weight(radial, n), "enter": weight(3 * n, n), "layers": [layer(), layer()]}
    p |= {"out1": weight(n, 2 * n), "out2": weight(2 * n, n), "out3": weight(n, 1)}
    graph = (integers(atoms, below=95), integers(edges, below=atoms), integers(edges, below=atoms, ramp=True))
    graph += (integers(triplets, below=edges), integers(triplets, below=edges, ramp=True))
    return Built(pulled, (p, normal(atoms, 3, scale=2.5), *graph, integers(atoms, below=molecules, ramp=True)))


@program("linear-attention-and-gated-convolutions-picture-flow-step-linen", GROUP)
def _sana(size: Size) -> Built:
    """This gives one guided flow step of a picture by rectified linear attention and gated convolutions, as Sana (2024)."""
    import flax.linen as nn

    side, n, h, words, texts = pick(size, (32, 576, 18, 300, 512), (12, 192, 6, 77, 128), (4, 8, 2, 5, 6))
    dtype, channels = half(size), pick(size, 32, 32, 4)

    def scaled(x, shift, scale):
        return nn.LayerNorm(epsilon=1e-6, use_bias=False, use_scale=False, dtype=dtype)(x) * (1 + scale) + shift

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mods, text, ok):
            table = self.param("table", nn.initializers.normal(0.04), (6, n)).astype(dtype)
            a, b, c, d, e, f = jnp.split((table + mods)[:, :, None], 6, axis=1)
            a, b, c, d, e, f = (z[:, 0] for z in (a, b, c, d, e, f))
            y = scaled(x, a, b)
            q, k, v = (
                z.reshape(*x.shape[:2], h, n // h) for z in jnp.split(nn.Dense(3 * n, dtype=dtype)(y), 3, axis=-1)
            )
            q, k, v = nn.relu(q).astype(jnp.float32), nn.relu(k).astype(jnp.float32), v.astype(jnp.float32)
            v = jnp.pad(v, ((0, 0),) * 3 + ((0, 1),), constant_values=1)
            y = jnp.einsum("bqhd,bhde->bqhe", q, jnp.einsum("bkhd,bkhe->bhde", k, v))
            y = (y[..., :-1] / (y[..., -1:] + 1e-8)).reshape(x.shape).astype(dtype)
            x = x + c * nn.Dense(n, dtype=dtype)(y)
            y = nn.RMSNorm(dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(h, dtype=dtype)(y, text, mask=ok[:, None, None])
            y = scaled(x, d, e).reshape(-1, side, side, n)
            y = nn.silu(nn.Conv(5 * n, (1, 1), dtype=dtype)(y))
            y, gate = jnp.split(nn.Conv(5 * n, (3, 3), feature_group_count=5 * n, dtype=dtype)(y), 2, axis=-1)
            y = nn.Conv(n, (1, 1), use_bias=False, dtype=dtype)(y * nn.silu(gate))
            return x + f * y.reshape(x.shape)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, latent, text, lengths, time):
            s = nn.sigmoid(time)
            both = jnp.concatenate([latent, latent]).astype(dtype)
            angle = 1000 * s[:, None] * jnp.exp(-np.log(10000) * jnp.arange(128) / 128)
            t = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1).astype(dtype)
            t = nn.silu(nn.Dense(n, dtype=dtype)(nn.silu(nn.Dense(n, dtype=dtype)(t))))
            mods = nn.Dense(6 * n, dtype=dtype)(t).reshape(1, 6, n)
            ok = jnp.arange(words) < (words // 2 + lengths)[:, None]
            y = nn.RMSNorm(dtype=dtype)(nn.Dense(n, dtype=dtype)(nn.RMSNorm(dtype=dtype)(text.astype(dtype))))
            x = nn.Dense(n, dtype=dtype)(both.reshape(2, side * side, channels))
            for _ in range(3):
                x = Block()(x, mods, y, ok)
            v = nn.Dense(channels, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)).astype(jnp.float32)
            null, told = v.reshape(2, side, side, channels)
            guided = null + 4.5 * (told - null)
            ratio = jnp.std(told) / jnp.std(guided)
            guided = guided * (0.7 * ratio + 0.3)
            return latent - 0.05 * guided[None], jnp.mean(guided**2, axis=(0, 1))

    inputs = (normal(1, side, side, channels), normal(2, words, texts), integers(2, below=words // 2), normal(1))
    return linen_program(size, Net(), *inputs)


@program("interests-of-a-shopper-routed-into-capsules-and-matched-haiku", GROUP)
def _capsules(size: Size) -> Built:
    """This gives the best items for several interests of each shopper, found by routing, as MIND (Li et al., 2019).

    Past items vote for capsules in three rounds of routing, and label-aware attention weighs interests by a target.
    """
    import haiku as hk

    b, past, items, e, interests, top, sample = pick(
        size, (512, 53, 50021, 64, 4, 50, 8009), (192, 37, 9001, 64, 4, 20, 3001), (3, 5, 17, 8, 2, 3, 11)
    )
    dtype = half(size)

    def squash(x):
        norm = jnp.sum(x * x, axis=-1, keepdims=True)
        return norm / (1 + norm) * x * lax.rsqrt(norm + 1e-9)

    def net(history, age, target, count, candidates):
        table = hk.get_parameter("table", (items, e), dtype, init=hk.initializers.RandomNormal())
        ages = hk.get_parameter("ages", (64, e), dtype, init=hk.initializers.RandomNormal())
        known = (history % 7 > 0) & (jnp.arange(past) < past - past // 8)
        x = table[history] + ages[age]
        votes = hk.Linear(e, with_bias=False)(x).astype(jnp.float32)
        wanted = jnp.clip(jnp.log2(jnp.sum(known, axis=-1) + 1.0).astype(jnp.int32), 1, interests)
        used = jnp.arange(interests) < wanted[:, None]
        start = hk.get_parameter("start", (interests, past), jnp.float32, init=hk.initializers.RandomNormal())
        logits = jnp.broadcast_to(start, (b, interests, past))
        still = lax.stop_gradient(votes)
        for turn in range(3):
            share = jax.nn.softmax(jnp.where(used[..., None], logits, -1e9), axis=1) * known[:, None]
            capsules = squash(jnp.einsum("bkt,bte->bke", share, votes if turn == 2 else still))
            if turn < 2:
                logits = logits + jnp.einsum("bke,bte->bkt", capsules, still)
        side = jnp.broadcast_to(jnp.log1p(jnp.abs(count))[:, None, None], (b, interests, 1))
        y = jnp.concatenate([capsules, side], axis=-1).astype(dtype)
        y = hk.Linear(e)(jax.nn.relu(hk.Linear(4 * e)(y)))
        y = y * lax.rsqrt(jnp.sum(jnp.square(y.astype(jnp.float32)), axis=-1, keepdims=True) + 1e-6).astype(dtype)
        aim = table[target]
        match = jnp.einsum("bke,be->bk", y, aim).astype(jnp.float32)
        weights = jax.nn.softmax(jnp.where(used, 2 * match, -1e9), axis=-1)
        user = jnp.einsum("bk,bke->be", weights.astype(dtype), y)
        loss = -jax.nn.log_sigmoid(jnp.sum(user * aim, axis=-1).astype(jnp.float32))
        scores = jnp.einsum("bke,se->bks", y, table[candidates]).astype(jnp.float32)
        scores = jnp.max(jnp.where(used[..., None], scores, -jnp.inf), axis=1)
        seen = jnp.any(candidates[None, None, :64] == history[..., None], axis=1)
        scores = scores.at[:, :64].add(jnp.where(seen, -1e3, 0.0))
        best, place = lax.top_k(scores, top)
        return best, candidates[place], loss, y

    model = hk.without_apply_rng(hk.transform(net))
    inputs = (integers(b, past, below=items), integers(b, past, below=64), integers(b, below=items), normal(b))
    inputs = (*inputs, integers(sample, below=items))
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs))
    return Built(model.apply, (module_weights(structs, dtype), *inputs))


@program("series-pooled-at-three-rates-and-interpolated-forecast-equinox", GROUP)
def _nhits(size: Size) -> Built:
    """This gives forecasts by stacks that pool at three rates and interpolate few knots, as N-HiTS (Challu, 2022)."""
    import equinox as eqx

    b, past, ahead, n = pick(size, (2048, 840, 168, 512), (512, 420, 84, 320), (3, 24, 8, 8))
    rates, knots = pick(size, ((24, 8, 1), (7, 24, 84)), ((12, 4, 1), (7, 21, 42)), ((4, 2, 1), (2, 4, 8)))
    dtype, extra = half(size), 5

    def knotted(values, count):
        """Interpolates linearly between values at the middles of equal intervals."""
        k = values.shape[-1]
        at = jnp.clip((jnp.arange(count) + 0.5) * k / count - 0.5, 0, k - 1)
        low = jnp.floor(at).astype(jnp.int32)
        high, part = jnp.minimum(low + 1, k - 1), at - low
        return values[low] * (1 - part) + values[high] * part

    class Stack(eqx.Module):
        mlp: eqx.nn.MLP
        rate: int = eqx.field(static=True)
        knots: int = eqx.field(static=True)

        def __init__(self, rate, knots, key):
            self.rate, self.knots = rate, knots
            wide = -(-past // rate)
            self.mlp = eqx.nn.MLP(wide + extra, wide + knots, n, 2, activation=jax.nn.relu, key=key)

        def __call__(self, x, known):
            x = jnp.pad(x, (0, -past % self.rate), constant_values=-jnp.inf)
            pooled = jnp.max(x.reshape(-1, self.rate), axis=-1)
            theta = self.mlp(jnp.concatenate([pooled, known]).astype(dtype)).astype(jnp.float32)
            back, fore = jnp.split(theta, [pooled.shape[0]])
            return knotted(back, past), knotted(fore, ahead)

    class Net(eqx.Module):
        stacks: list

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.stacks = [Stack(*z) for z in zip(rates, knots, keys, strict=True)]

        def __call__(self, x, observed, known):
            count = jnp.maximum(jnp.sum(observed), 1)
            centre = jnp.sum(jnp.where(observed, x, 0)) / count
            spread = jnp.sqrt(jnp.sum(jnp.where(observed, (x - centre) ** 2, 0)) / count + 1e-4)
            rest = jnp.where(observed, (x - centre) / spread, 0)
            total, parts = jnp.full(ahead, rest[-1]), []
            for stack in self.stacks:
                back, fore = stack(rest, known)
                rest = jnp.where(observed, rest - back, 0)
                total = total + fore
                parts.append(fore)
            return total * spread + centre, jnp.stack(parts), jnp.sqrt(jnp.mean(rest**2))

    leaves, whole = equinox_parts(Net, dtype)
    inputs = (normal(b, past, scale=3.0, offset=10.0), booleans(b, past), normal(b, extra))
    return Built(lambda leaves, *xs: jax.vmap(whole(leaves))(*xs), (leaves, *inputs))
