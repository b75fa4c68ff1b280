"""Losses with their gradients and whole training steps, the twenty-second set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_models import equinox_parts

GROUP = "twenty-second"


def _layer_norm(x, scale=1.0):
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


@program("states-of-a-model-as-few-directions-with-learned-jumps-adam-step", GROUP)
def _jump_autoencoder(size: Size) -> Built:
    """This trains a sparse autoencoder of a model's states with learned jumps, as JumpReLU (Rajamanoharan et al., 2024).

    The jumps get gradients by a rectangle around them, and Adam moves the decoder only at right angles to its unit rows.
    """
    rows, n, wide = pick(size, (2048, 768, 12288), (301, 192, 2003), (5, 8, 13))
    width = 0.05

    @jax.custom_vjp
    def jump(x, edge):
        """This keeps what is above an edge, and tells what is."""
        return x * (x > edge), (x > edge).astype(jnp.float32)

    def jump_back(saved, grads):
        (x, edge), (g, of_count) = saved, grads
        near = (jnp.abs(x - edge) < width / 2).astype(jnp.float32)
        return g * (x > edge), -jnp.sum((g * edge + of_count) * near, axis=0) / width

    jump.defvjp(lambda x, edge: (jump(x, edge), (x, edge)), jump_back)

    def loss(p, x, sparsity):
        dtype = x.dtype
        before = ((x - p["shift"].astype(dtype)) @ p["enter"].astype(dtype)).astype(jnp.float32) + p["bias"]
        before = jax.nn.relu(before)
        edge = jnp.exp(p["edge"])
        codes, used = jump(before, edge)
        back = (codes.astype(dtype) @ p["leave"].astype(dtype)).astype(jnp.float32) + p["shift"]
        wrong = jnp.sum((back - x.astype(jnp.float32)) ** 2, axis=-1)
        spread = jnp.var(x.astype(jnp.float32), axis=0)
        rest = (jnp.mean(used, axis=0), 1 - jnp.mean(wrong) / jnp.sum(spread))
        return jnp.mean(wrong) + sparsity * jnp.mean(jnp.sum(used, axis=-1)), rest

    def step(p, first, second, x, warm, at):
        x = x * (n**0.5 / jnp.mean(jnp.linalg.norm(x.astype(jnp.float32), axis=-1))).astype(x.dtype)
        sparsity = 0.02 * jnp.minimum(1.0, jnp.abs(warm))
        (value, (often, explained)), grads = jax.value_and_grad(loss, has_aux=True)(p, x, sparsity)
        unit = p["leave"] / (jnp.linalg.norm(p["leave"], axis=-1, keepdims=True) + 1e-6)
        along = jnp.sum(grads["leave"] * unit, axis=-1, keepdims=True)
        grads["leave"] = grads["leave"] - along * unit
        count_of = at.astype(jnp.float32) + 1
        first = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, first, grads)
        second = jax.tree.map(lambda a, g: 0.999 * jnp.abs(a) + 0.001 * g * g, second, grads)

        def move(w, a, s):
            return w - 7e-5 * (a / (1 - 0.9**count_of)) / (jnp.sqrt(s / (1 - 0.999**count_of)) + 1e-6)

        p = jax.tree.map(move, p, first, second)
        p["leave"] = p["leave"] / (jnp.linalg.norm(p["leave"], axis=-1, keepdims=True) + 1e-6)
        return p, first, second, value, explained, often

    def shapes(scale):
        p = {"enter": (n, wide), "leave": (wide, n), "shift": (n,), "bias": (wide,), "edge": (wide,)}
        scales = {"enter": n**-0.5, "leave": n**-0.5, "shift": 0.1, "bias": 0.1, "edge": 0.3}
        return {
            k: normal(*v, scale=scale or scales[k], offset=0.3 if k == "edge" and not scale else 0.0)
            for k, v in p.items()
        }

    inputs = (normal(rows, n, dtype=half(size)), normal(), integers(below=1000))
    return Built(step, (shapes(0.0), shapes(1e-3), shapes(1e-3), *inputs))


@program("words-with-their-lengths-from-speech-lattice-loss-grad", GROUP)
def _token_durations(size: Size) -> Built:
    """This gives gradients of a transducer that tells words and how many frames each takes, as TDT (Xu et al., 2023).

    The chances of all paths are summed over a lattice of frames and words; clips and texts are padded.
    """
    b, t, u, n, words, longest = pick(size, (8, 75, 29, 320, 257, 4), (4, 61, 23, 160, 129, 4), (2, 6, 4, 8, 5, 2))
    dtype, small = half(size), -1e5

    def loss(p, frames, texts, tokens, frame_cut, text_cut):
        f, g = frames @ p["frames"], texts @ p["texts"]
        joint = jax.nn.relu(f[:, :, None] + g[:, None]) @ p["out"] + p["bias"]
        joint = joint.astype(jnp.float32)
        logp = jax.nn.log_softmax(joint[..., : words + 1] - 0.05, axis=-1)
        length = jax.nn.log_softmax(joint[..., words + 1 :], axis=-1)
        blank = logp[..., -1]
        own = jnp.take_along_axis(logp[:, :, :-1], tokens[:, None, :, None], axis=-1)[..., 0]
        last_t, last_u = t - frame_cut, u - text_cut
        own = jnp.where(jnp.arange(u) < last_u[:, None, None], own, small)
        stay = blank[..., None] + length[..., 1:]
        say = own[..., None] + length[:, :, :-1]

        def combine(x, y):
            return x[0] + y[0], jnp.logaddexp(x[1] + y[0], y[1])

        def row(past, at):
            stay, say, now, index = at
            total = past[0] + stay[0][..., 0]
            for d in range(1, longest):
                total = jnp.logaddexp(total, past[d] + stay[d][..., d])
            for d in range(longest):
                come = past[d][:, :-1] + say[d][..., d + 1]
                total = total.at[:, 1:].set(jnp.logaddexp(total[:, 1:], come))
            total = jnp.where(index == 0, jnp.where(jnp.arange(u + 1) == 0, 0.0, small), total)
            total = jnp.maximum(total, small)
            shift = jnp.pad(now, ((0, 0), (1, 0)), constant_values=small)
            _, total = lax.associative_scan(combine, (shift, total), axis=1)
            total = jnp.maximum(total, small)
            return jnp.concatenate([total[None], past[:-1]]), total

        def shifted(x):
            x = jnp.moveaxis(x, 1, 0)
            pad = jnp.pad(x, ((longest, 0),) + ((0, 0),) * (x.ndim - 1), constant_values=small)
            return jnp.stack([pad[longest - d - 1 : longest - d - 1 + t] for d in range(longest)], axis=1)

        start = jnp.full((longest, b, u + 1), small)
        _, rows = lax.scan(row, start, (shifted(stay), shifted(say), jnp.moveaxis(say[..., 0], 1, 0), jnp.arange(t)))
        rows = jnp.moveaxis(rows, 0, 1)
        ends = []
        for d in range(1, longest + 1):
            at = last_t - d
            pick_t = jnp.take_along_axis(rows + blank + length[..., d], at[:, None, None], axis=1)[:, 0]
            ends.append(jnp.take_along_axis(pick_t, last_u[:, None], axis=1)[:, 0])
        each = -jax.nn.logsumexp(jnp.stack(ends), axis=0) / last_u
        return jnp.mean(each), each

    def step(p, frames, texts, *rest):
        (_, each), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(p, frames, texts, *rest)
        return each, grads

    p = {"frames": weight(n, n, dtype=dtype), "texts": weight(n, n, dtype=dtype)}
    p |= {
        "out": weight(n, words + 2 + longest, dtype=dtype),
        "bias": normal(words + 2 + longest, dtype=dtype, scale=0.1),
    }
    inputs = (normal(b, t, n, dtype=dtype), normal(b, u + 1, n, dtype=dtype), integers(b, u, below=words))
    return Built(step, (p, *inputs, integers(b, below=max(t // 4, 1)), integers(b, below=u // 2)))


@program("latent-world-of-simplices-five-critics-consistency-grad", GROUP)
def _world(size: Size) -> Built:
    """This gives gradients of a latent world model with simplex states and five critics, as TD-MPC2 (Hansen et al., 2024)."""
    b, ahead, see, act, n, bins, critics = pick(
        size, (512, 3, 39, 6, 512, 101, 5), (128, 3, 39, 6, 192, 101, 5), (3, 2, 5, 2, 8, 7, 2)
    )
    dtype, group = half(size), pick(size, 8, 8, 4)

    def mlp(p, x, out=None):
        for w, g in p["hidden"]:
            x = _layer_norm(x @ w, g)
            x = x * jnp.tanh(jax.nn.softplus(x))
        x = x @ p["last"]
        if out is None:
            return x.astype(jnp.float32)
        y = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)
        return jax.nn.softmax(y, axis=-1).reshape(x.shape).astype(x.dtype)

    def two_hot(x):
        x = jnp.clip(jnp.sign(x) * jnp.log1p(jnp.abs(x)), -10, 10)
        at = (x + 10) / 20 * (bins - 1)
        return jax.nn.relu(1 - jnp.abs(at[..., None] - jnp.arange(bins)))

    def value_of(logits):
        x = jax.nn.softmax(logits, axis=-1) @ jnp.linspace(-10, 10, bins)
        return jnp.sign(x) * jnp.expm1(jnp.abs(x))

    def policy(p, z, noise):
        mean, spread = jnp.split(mlp(p, z), 2, axis=-1)
        spread = -10 + 6 * (jnp.tanh(spread) + 1)
        raw = mean + noise * jnp.exp(spread)
        logp = -0.5 * noise**2 - spread - 0.92 - 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))
        return jnp.tanh(raw), jnp.sum(logp, axis=-1)

    def both(z, a):
        return jnp.concatenate([z, a.astype(dtype)], axis=-1)

    def loss(p, slow, views, actions, rewards, ended, noise):
        target = lax.stop_gradient(mlp(p["encoder"], views[1:], out="simplex"))
        a, _ = policy(p["policy"], target, noise)
        q = value_of(jax.vmap(lambda c: mlp(c, both(target, a)))(slow))
        wanted = two_hot(lax.stop_gradient(rewards + 0.97 * (1 - ended) * jnp.min(q[:2], axis=0)))
        z, states = mlp(p["encoder"], views[0], out="simplex"), []
        total, fade = 0.0, 1.0
        for i in range(ahead):
            states.append(z)
            x = both(z, actions[i])
            reward = -jnp.sum(two_hot(rewards[i]) * jax.nn.log_softmax(mlp(p["reward"], x)), axis=-1)
            logits = jax.nn.log_softmax(jax.vmap(mlp, in_axes=(0, None))(p["critics"], x), axis=-1)
            worth = -jnp.sum(wanted[i] * logits, axis=-1)
            z = mlp(p["dynamics"], x, out="simplex")
            apart = jnp.mean((z - target[i]).astype(jnp.float32) ** 2)
            total = total + fade * (20 * apart + 0.1 * jnp.mean(reward) + 0.1 * jnp.mean(worth))
            fade = 0.5 * fade
        still = lax.stop_gradient(jnp.stack(states))
        a, logp = policy(p["policy"], still, noise)
        frozen = lax.stop_gradient(p["critics"])
        q = jnp.mean(value_of(jax.vmap(lambda c: mlp(c, both(still, a)))(frozen)), axis=0)
        ordered = lax.stop_gradient(jnp.sort(q.reshape(-1)))
        scale = jnp.maximum(ordered[int(0.95 * ordered.size)] - ordered[int(0.05 * ordered.size)], 1.0)
        fades = 0.5 ** jnp.arange(ahead)
        actor = jnp.mean(fades * jnp.mean(1e-4 * logp - q / scale, axis=1))
        return total / ahead + actor, (total, actor, jnp.mean(q))

    def step(p, slow, views, actions, rewards, ended, noise):
        ended = (~ended).astype(jnp.float32)
        (_, extra), grads = jax.value_and_grad(loss, has_aux=True)(
            p, slow, views.astype(dtype), jnp.tanh(actions), rewards, ended, noise
        )
        slow = jax.tree.map(lambda s, w: (0.99 * s + 0.01 * w).astype(s.dtype), slow, p["critics"])
        return grads, slow, extra

    def net(i, o, *many):
        def matrix(i, o):
            return normal(*many, i, o, dtype=dtype, scale=i**-0.5)

        hidden = [(matrix(x, n), normal(*many, n, dtype=dtype, scale=0.1, offset=1.0)) for x in (i, n)]
        return {"hidden": hidden, "last": normal(*many, n, o, dtype=dtype, scale=0.3 * n**-0.5)}

    p = {"encoder": net(see, n), "dynamics": net(n + act, n), "reward": net(n + act, bins), "policy": net(n, 2 * act)}
    p["critics"] = net(n + act, bins, critics)
    inputs = (normal(ahead + 1, b, see), normal(ahead, b, act), normal(ahead, b), booleans(ahead, b))
    return Built(step, (p, net(n + act, bins, critics), *inputs, normal(ahead, b, act)))


@program("flow-of-latents-aligned-with-features-of-a-frozen-eye-grad-linen", GROUP)
def _aligned(size: Size) -> Built:
    """This gives gradients of a flow transformer of latents whose middle states follow a frozen encoder, as REPA (Yu, 2025)."""
    import flax.linen as nn

    b, side, channels, n, h, seen, classes = pick(
        size, (16, 32, 4, 384, 6, 768, 1000), (2, 24, 4, 192, 3, 384, 1000), (2, 4, 2, 8, 2, 6, 5)
    )
    dtype, tokens = half(size), (side // 2) ** 2

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, c):
            mods = nn.Dense(6 * n, dtype=dtype)(nn.silu(c))[:, None]
            a1, s1, g1, a2, s2, g2 = jnp.split(mods, 6, axis=-1)
            y = nn.LayerNorm(epsilon=1e-6, use_bias=False, use_scale=False, dtype=dtype)(x) * (1 + s1) + a1
            x = x + g1 * nn.MultiHeadDotProductAttention(h, dtype=dtype, normalize_qk=True)(y)
            y = nn.LayerNorm(epsilon=1e-6, use_bias=False, use_scale=False, dtype=dtype)(x) * (1 + s2) + a2
            return x + g2 * nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(4 * n, dtype=dtype)(y)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, latent, time, label):
            x = (
                latent.reshape(b, side // 2, 2, side // 2, 2, channels)
                .transpose(0, 1, 3, 2, 4, 5)
                .reshape(b, tokens, -1)
            )
            x = nn.Dense(n, dtype=dtype)(x.astype(dtype)) + self.param(
                "places", nn.initializers.normal(0.02), (tokens, n)
            )
            angle = 1000 * time[:, None] * jnp.exp(-np.log(10000) * jnp.arange(64) / 64)
            t = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1).astype(dtype)
            c = nn.Dense(n, dtype=dtype)(nn.silu(nn.Dense(n, dtype=dtype)(t)))
            c = c + nn.Embed(classes + 1, n, dtype=dtype)(label)
            middle = None
            for i in range(4):
                x = Block()(x.astype(dtype), c)
                if i == 1:
                    middle = nn.silu(nn.Dense(2 * n, dtype=dtype)(x))
                    middle = nn.Dense(seen, dtype=dtype)(nn.silu(nn.Dense(2 * n, dtype=dtype)(middle)))
            shift, scale = jnp.split(nn.Dense(2 * n, dtype=dtype)(nn.silu(c))[:, None], 2, axis=-1)
            x = nn.LayerNorm(epsilon=1e-6, use_bias=False, use_scale=False, dtype=dtype)(x) * (1 + scale) + shift
            x = nn.Dense(4 * channels, dtype=dtype)(x).astype(jnp.float32)
            x = x.reshape(b, side // 2, side // 2, 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
            return x.reshape(latent.shape), middle.astype(jnp.float32)

    module = Net()

    def loss(p, latent, noise, features, label, spot):
        time = jax.nn.sigmoid(spot)
        s = time[:, None, None, None]
        velocity, middle = module.apply(p, (1 - s) * latent + s * noise, time, label)
        each = jnp.mean((velocity - (noise - latent)) ** 2, axis=(1, 2, 3))
        a = middle * lax.rsqrt(jnp.sum(middle**2, axis=-1, keepdims=True) + 1e-6)
        f = features.astype(jnp.float32)
        f = f * lax.rsqrt(jnp.sum(f**2, axis=-1, keepdims=True) + 1e-6)
        align = -jnp.mean(jnp.sum(a * f, axis=-1), axis=-1)
        return jnp.mean(each) + 0.5 * jnp.mean(align), (each, align)

    def step(p, latent, noise, features, label, drop, spot):
        label = jnp.where(drop == 0, classes, label)
        (_, extra), grads = jax.value_and_grad(loss, has_aux=True)(p, latent, noise, features, label, spot)
        return grads, extra

    shape = jax.ShapeDtypeStruct((b, side, side, channels), jnp.float32)
    times, labels = jax.ShapeDtypeStruct((b,), jnp.float32), jax.ShapeDtypeStruct((b,), jnp.int32)
    structs = jax.eval_shape(module.init, jax.random.key(0), shape, times, labels)
    inputs = (normal(*shape.shape), normal(*shape.shape), normal(b, tokens, seen, dtype=dtype))
    inputs += (integers(b, below=classes), integers(b, below=10), normal(b))
    return Built(step, (module_weights(structs, dtype), *inputs))


@program("scans-of-organs-warped-onto-each-other-by-smooth-flows-grad-equinox", GROUP)
def _registration(size: Size) -> Built:
    """This gives gradients of a network that warps one volume onto another by a smooth flow, as VoxelMorph (Dalca, 2019)."""
    import equinox as eqx

    shape, wide, turns = pick(size, ((80, 96, 64), 16, 4), ((20, 24, 16), 8, 4), ((4, 8, 4), 2, 2))
    dtype = half(size)

    class Net(eqx.Module):
        down: list
        up: list
        last: eqx.nn.Conv3d

        def __init__(self, key):
            k = jax.random.split(key, 6)
            widths = (2, wide, 2 * wide, 2 * wide)
            self.down = [eqx.nn.Conv3d(widths[i], widths[i + 1], 3, padding=1, key=k[i]) for i in range(3)]
            self.up = [eqx.nn.Conv3d((4 - i) * wide, (2 - i) * wide, 3, padding=1, key=k[3 + i]) for i in range(2)]
            self.last = eqx.nn.Conv3d(wide, 3, 3, padding=1, key=k[5])

        def __call__(self, x):
            seen = []
            for i, conv in enumerate(self.down):
                x = jax.nn.leaky_relu(conv(x), 0.2)
                if i < 2:
                    seen.append(x)
                    c, i1, i2, i3 = x.shape
                    x = jnp.max(x.reshape(c, i1 // 2, 2, i2 // 2, 2, i3 // 2, 2), axis=(2, 4, 6))
            for conv in self.up:
                skip = seen.pop()
                x = jnp.repeat(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2), 2, axis=3)
                x = jax.nn.leaky_relu(conv(jnp.concatenate([x, skip])), 0.2)
            return self.last(x).astype(jnp.float32)

    leaves, whole = equinox_parts(Net, dtype)

    def warp(volume, flow):
        at = jnp.stack(jnp.meshgrid(*(jnp.arange(s, dtype=jnp.float32) for s in shape), indexing="ij")) + flow
        return jax.vmap(lambda v: jax.scipy.ndimage.map_coordinates(v, list(at), order=1, mode="nearest"))(volume)

    def local(x):
        return lax.reduce_window(x, 0.0, lax.add, (5, 5, 5), (1, 1, 1), "SAME") / 125

    def loss(leaves, fixed, moving, labels):
        speed = whole(leaves)(jnp.stack([fixed, moving]).astype(dtype))
        flow = speed / 2**turns
        for _ in range(turns):
            flow = flow + warp(flow, flow)
        both = warp(jnp.concatenate([moving[None], labels]), flow)
        moved, parts = both[0], both[1:]
        a, c = local(fixed), local(moved)
        cross = local(fixed * moved) - a * c
        va, vc = jax.nn.relu(local(fixed**2) - a * a), jax.nn.relu(local(moved**2) - c * c)
        ncc = jnp.mean(cross**2 / (va * vc + 1e-2))
        rough = sum(jnp.mean(jnp.diff(speed, axis=i) ** 2) for i in (1, 2, 3))
        want = jax.nn.sigmoid(4 * fixed)
        dice = 2 * jnp.sum(parts[0] * want) / (jnp.sum(parts[0]) + jnp.sum(want))
        return -ncc + 0.5 * rough + 0.5 * (1 - dice), (ncc, rough, dice, moved)

    def step(leaves, fixed, moving):
        labels = jax.nn.sigmoid(4 * moving)[None]
        (_, extra), grads = jax.value_and_grad(loss, has_aux=True)(leaves, fixed, moving, labels)
        return grads, extra

    return Built(step, (leaves, normal(*shape), normal(*shape)))


@program("facts-as-turns-of-complex-numbers-own-hard-negatives-grad", GROUP)
def _rotate(size: Size) -> Built:
    """This gives gradients of a base of facts where relations turn complex numbers, with weighted negatives, as RotatE (2019).

    Rare facts weigh more by the counts of their heads and tails, and only the rows used are moved by Adagrad.
    """
    b, negatives, entities, relations, n = pick(
        size, (512, 128, 40009, 237, 200), (128, 32, 9001, 237, 100), (3, 4, 11, 3, 4)
    )
    margin = 9.0

    def score(head, turn, tail):
        (a, c), (d, e) = jnp.split(head, 2, axis=-1), jnp.split(tail, 2, axis=-1)
        cos, sin = jnp.cos(turn), jnp.sin(turn)
        real, imaginary = a * cos - c * sin - d, a * sin + c * cos - e
        return margin - jnp.sum(jnp.sqrt(real**2 + imaginary**2 + 1e-6), axis=-1) * (6 / n)

    def loss(table, turns, head, relation, tail, wrong_tail, wrong_head, weights):
        h, r, t = table[head], turns[relation] * jnp.pi, table[tail]
        right = score(h, r, t)
        worse = jnp.concatenate(
            [score(h[:, None], r[:, None], table[wrong_tail]), score(table[wrong_head], r[:, None], t[:, None])], axis=1
        )
        share = lax.stop_gradient(jax.nn.softmax(worse, axis=-1))
        negative = -jnp.sum(share * jax.nn.log_sigmoid(-worse), axis=-1)
        each = 0.5 * (negative - jax.nn.log_sigmoid(right))
        return jnp.sum(weights * each) + 1e-5 * jnp.mean(jnp.abs(table) ** 3), (right, worse)

    def step(table, turns, sums, head, relation, tail, wrong_tail, wrong_head):
        counts = jnp.full(entities, 4.0).at[head].add(1.0).at[tail].add(1.0)
        w = lax.rsqrt(counts[head] + counts[tail])
        w = w / jnp.sum(w)
        args = (table, turns, head, relation, tail, wrong_tail, wrong_head, w)
        (value, (right, worse)), (g, gt) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*args)
        sums = jnp.abs(sums) + jnp.mean(g * g, axis=-1)
        used = jnp.concatenate([head, tail, wrong_tail.reshape(-1), wrong_head.reshape(-1)])
        touched = jnp.zeros(entities, bool).at[used].set(True)
        fresh = jnp.where(touched[:, None], table - 0.01 * g * lax.rsqrt(sums + 1e-6)[:, None], table)
        rank = 1 + jnp.sum(jax.nn.sigmoid((worse - right[:, None]) / 0.1), axis=-1)
        return value, fresh, sums, gt, jnp.mean(1 / rank)

    inputs = (normal(entities, 2 * n, scale=0.5), normal(relations, n), normal(entities, scale=1e-3))
    inputs += (integers(b, below=entities), integers(b, below=relations), integers(b, below=entities))
    return Built(step, (*inputs, integers(b, negatives, below=entities), integers(b, negatives, below=entities)))


@program("features-multiplied-in-pairs-compressed-and-stacked-clicks-grad-haiku", GROUP)
def _wukong(size: Size) -> Built:
    """This gives gradients of clicks by stacked blocks of compressed pairwise products, as Wukong (Zhang, 2024)."""
    import haiku as hk

    b, rows, fields, bag, dense, e, k = pick(
        size, (4096, 200003, 26, 7, 13, 64, 24), (512, 20011, 26, 5, 13, 32, 16), (3, 31, 4, 2, 3, 4, 2)
    )
    dtype, half_out = half(size), pick(size, 20, 20, 3)

    def norm(x):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x.astype(jnp.float32)).astype(dtype)

    def block(x):
        count = x.shape[1]
        squeeze = hk.get_parameter("squeeze", (count, k), dtype, init=hk.initializers.VarianceScaling())
        pairs = jnp.einsum("bne,bme,mk->bnk", x, x, squeeze)
        y = hk.nets.MLP([256 if size != "tiny" else 8, half_out * e])(norm(pairs.reshape(b, -1) * e**-0.5))
        line = hk.get_parameter("line", (count, half_out), dtype, init=hk.initializers.VarianceScaling())
        z = jnp.einsum("bne,nl->ble", x, line)
        rest = hk.get_parameter("rest", (count, 2 * half_out), dtype, init=hk.initializers.VarianceScaling())
        return norm(jnp.concatenate([y.reshape(b, half_out, e), z], axis=1) + jnp.einsum("bne,nl->ble", x, rest))

    def net(ids, bags, sizes, numbers):
        table = hk.get_parameter("table", (rows, e), dtype, init=hk.initializers.RandomNormal())
        single = table[(ids + 7919 * jnp.arange(fields)) % rows]
        held = (jnp.arange(bag) < sizes[:, None]).astype(dtype)
        several = jnp.einsum("bte,bt->be", table[bags], held) / jnp.maximum(sizes, 1)[:, None].astype(dtype)
        real = jnp.sign(numbers) * jnp.log1p(jnp.abs(numbers))
        real = hk.nets.MLP([2 * e, 2 * e])(real.astype(dtype)).reshape(b, 2, e)
        x = jnp.concatenate([single, several[:, None], real], axis=1)
        for _ in range(3):
            x = hk.to_module(block)("block")(x)
        logits = hk.nets.MLP([256 if size != "tiny" else 8, 2])(x.reshape(b, -1)).astype(jnp.float32)
        return logits

    model = hk.without_apply_rng(hk.transform(net))
    inputs = (
        integers(b, fields, below=rows),
        integers(b, bag, below=rows),
        integers(b, below=bag + 1),
        normal(b, dense),
    )
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs))

    def loss(p, ids, bags, sizes, numbers, clicked, bought):
        logits = model.apply(p, ids, bags, sizes, numbers)
        target = jnp.stack([clicked, clicked & bought], axis=-1).astype(jnp.float32)
        each = jax.nn.softplus(logits) - target * logits
        return jnp.mean(jnp.sum(each * jnp.array([1.0, 0.5]), axis=-1)), jax.nn.sigmoid(logits)

    grad = jax.value_and_grad(loss, has_aux=True)
    return Built(grad, (module_weights(structs, dtype), *inputs, booleans(b), booleans(b)))
