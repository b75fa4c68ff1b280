"""Losses with their gradients and whole training steps, the twenty-sixth set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "twenty-sixth"


@program("boxes-assigned-at-least-cost-to-queries-three-levels-loss-grad", GROUP)
def _assigned(size: Size) -> Built:
    """This gives the gradients of heads that name and box things of a picture, each thing assigned to one query at least cost.

    It is the set loss of DETR (Carion, 2020) with losses of levels in between, as in google-research/scenic; optax finds the
    assignment by the Hungarian method, without gradients.
    """
    import optax

    levels, b, queries, n, most, classes = pick(
        size, (3, 12, 300, 256, 31, 91), (3, 2, 100, 96, 13, 91), (3, 2, 7, 8, 3, 5)
    )
    dtype = half(size)

    def corners(box):
        centre, sides = box[..., :2], box[..., 2:]
        return jnp.concatenate([centre - 0.5 * sides, centre + 0.5 * sides], axis=-1)

    def overlap(one, two):
        """This is the generalised overlap of boxes with corners [..., 4], less what a box around both wastes."""
        low, high = jnp.maximum(one[..., :2], two[..., :2]), jnp.minimum(one[..., 2:], two[..., 2:])
        both = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
        area = jnp.prod(one[..., 2:] - one[..., :2], axis=-1) + jnp.prod(two[..., 2:] - two[..., :2], axis=-1) - both
        low, high = jnp.minimum(one[..., :2], two[..., :2]), jnp.maximum(one[..., 2:], two[..., 2:])
        around = jnp.prod(high - low, axis=-1) + 1e-6
        return both / (area + 1e-6) - (around - area) / around

    def assigned(logits, boxes, labels, wanted, real):
        chance = jax.nn.softmax(logits, axis=-1)[:, labels]
        cost = 5 * jnp.sum(jnp.abs(boxes[:, None] - wanted), axis=-1) - chance
        cost = cost - 2 * overlap(corners(boxes)[:, None], corners(wanted))
        cost = jnp.where(real, cost, 50.0).T
        rows, columns = optax.assignment.hungarian_algorithm(lax.stop_gradient(cost))
        return jnp.zeros(most, columns.dtype).at[rows].set(columns)

    def heads(p, x):
        logits = dense(p["name"], x).astype(jnp.float32)
        for q in p["box"][:-1]:
            x = jax.nn.relu(dense(q, x))
        return logits, jax.nn.sigmoid(dense(p["box"][-1], x).astype(jnp.float32))

    def one_level(logits, boxes, labels, wanted, real):
        at = jax.vmap(assigned)(logits, boxes, labels, wanted, real)
        rows = jnp.arange(b)[:, None]
        goal = jnp.full((b, queries), classes).at[rows, at].set(jnp.where(real, labels, classes))
        logp = jax.nn.log_softmax(logits, axis=-1)
        weigh = jnp.where(goal == classes, 0.1, 1.0)
        own = jnp.take_along_axis(logp, goal[..., None], axis=-1)[..., 0]
        named = -jnp.sum(weigh * own) / jnp.sum(weigh)
        count = jnp.maximum(jnp.sum(real), 1)
        mine = boxes[rows, at]
        far = jnp.sum(jnp.where(real[..., None], jnp.abs(mine - wanted), 0.0)) / count
        shared = overlap(corners(mine), corners(wanted))
        near = jnp.sum(jnp.where(real, 1 - shared, 0.0)) / count
        right = jnp.sum(real & (jnp.argmax(logits, axis=-1)[rows, at] == labels)) / count
        wrong = jnp.abs(jnp.sum(jnp.argmax(logits, axis=-1) != classes, axis=1) - jnp.sum(real, axis=1))
        return named + 5 * far + 2 * near, (named, far, near, right, jnp.mean(wrong.astype(jnp.float32)))

    def loss(p, states, labels, raw, real):
        wanted = jax.nn.sigmoid(raw)
        logits, boxes = heads(p, states)
        told = [one_level(logits[k], boxes[k], labels, wanted, real) for k in range(levels)]
        return sum(value for value, _ in told), jax.tree.map(lambda *x: jnp.stack(x), *[more for _, more in told])

    p = {"name": dense_of(n, classes + 1, dtype)}
    p["box"] = [dense_of(n, n, dtype), dense_of(n, n, dtype), dense_of(n, 4, dtype)]
    inputs = (
        normal(levels, b, queries, n, dtype=dtype),
        integers(b, most, below=classes),
        normal(b, most, 4),
        booleans(b, most),
    )
    return Built(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), (p, *inputs))


@program("films-as-signs-of-numbers-causal-convolutions-entropy-grad", GROUP)
def _signs(size: Size) -> Built:
    """This gives the gradients of a network that packs short films into codes that are only signs of numbers.

    It is MAGVIT-v2 (Yu, 2023), known from lucidrains/magvit2-pytorch and ports to JAX: convolutions over time never look ahead,
    signs pass gradients straight through, and codes should be sure one by one but even on the whole.
    """
    b, frames, side, w, bits, split = pick(size, (2, 17, 112, 64, 18, 2), (1, 5, 24, 8, 18, 2), (1, 5, 8, 4, 4, 2))
    dtype, groups = half(size), pick(size, 8, 4, 2)
    each = bits // split
    book = ((np.arange(2**each)[:, None] >> np.arange(each)) & 1) * 2.0 - 1
    book = book.astype(np.float32)

    def conv(q, x, stride=(1, 1, 1)):
        k = q["w"].shape[0]
        sides = ((k - 1, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0))
        x = jnp.pad(x, ((0, 0), *sides), mode="edge" if k > 1 else "constant")
        y = lax.conv_general_dilated(x, q["w"], stride, "VALID", dimension_numbers=("NTHWC", "THWIO", "NTHWC"))
        return y + q["b"]

    def norm(q, x):
        """This norms groups of channels of each frame alone, so that no frame sees a later one."""
        y = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
        y = y - jnp.mean(y, axis=(2, 3, 5), keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=(2, 3, 5), keepdims=True) + 1e-6)
        return (y.reshape(x.shape) * q["scale"] + q["shift"]).astype(dtype)

    def unit(q, x):
        y = conv(q["conv1"], jax.nn.silu(norm(q["norm1"], x)))
        return x + conv(q["conv2"], jax.nn.silu(norm(q["norm2"], y)))

    def grown(q, x, times):
        """This makes films larger by moving channels to space and to time; the first frame stays one."""
        y = conv(q, x)
        t, r, c = y.shape[1:4]
        y = y.reshape(b, t, r, c, times, 2, 2, -1)
        y = jnp.transpose(y, (0, 1, 4, 2, 5, 3, 6, 7)).reshape(b, t * times, 2 * r, 2 * c, -1)
        return y[:, times - 1 :]

    def entropy(z):
        """This is how unsure codes are one by one, and how even they are on the whole, for each half of the bits."""
        z = z.reshape(-1, split, each)
        logits = 2 * jnp.einsum("psk,ck->psc", z, book) / 0.5
        logp = jax.nn.log_softmax(logits, axis=-1)
        alone = -jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1))
        mean = jnp.mean(jnp.exp(logp), axis=0)
        return alone, -jnp.mean(jnp.sum(mean * jnp.log(mean + 1e-9), axis=-1))

    def loss(p, films):
        x = (films / 127.5 - 1).astype(dtype)
        y = unit(p["enter_unit"], conv(p["enter"], x))
        y = unit(p["down1_unit"], conv(p["down1"], y, (1, 2, 2)))
        y = unit(p["down2_unit"], conv(p["down2"], y, (2, 2, 2)))
        z = conv(p["pack"], jax.nn.silu(y)).astype(jnp.float32)
        signs = jnp.where(z > 0, 1.0, -1.0)
        code = z + lax.stop_gradient(signs - z)
        y = unit(p["mid_unit"], conv(p["unpack"], code.astype(dtype)))
        y = unit(p["up1_unit"], grown(p["up1"], y, 2))
        y = unit(p["up2_unit"], grown(p["up2"], y, 1))
        out = conv(p["leave"], jax.nn.silu(y)).astype(jnp.float32)
        wrong = jnp.abs(out - x.astype(jnp.float32))
        slopes = [jnp.diff(out, axis=k) - jnp.diff(x.astype(jnp.float32), axis=k) for k in (1, 2, 3)]
        sharp = sum(jnp.mean(jnp.abs(s)) for s in slopes)
        alone, whole = entropy(z)
        commit = jnp.mean((z - lax.stop_gradient(signs)) ** 2)
        value = jnp.mean(wrong) + 0.3 * sharp + 0.1 * (alone - whole) + 0.25 * commit
        number = jnp.sum((z > 0).reshape(-1, split, each) * 2 ** np.arange(each), axis=-1)
        used = jnp.mean(
            (jnp.zeros((split, 2**each)).at[jnp.arange(split), number].add(1.0) > 0).astype(jnp.float32), axis=1
        )
        return value, (jnp.mean(wrong, axis=(0, 2, 3, 4)), alone, whole, commit, used)

    def kernel(i, o, k=3):
        return {
            "w": normal(k, k, k, i, o, dtype=dtype, scale=(k**3 * i) ** -0.5),
            "b": normal(o, dtype=dtype, scale=0.02),
        }

    def unit_of(c):
        q = {k: {"scale": normal(c, scale=0.1, offset=1.0), "shift": normal(c, scale=0.1)} for k in ("norm1", "norm2")}
        return q | {"conv1": kernel(c, c), "conv2": kernel(c, c)}

    p = {
        "enter": kernel(3, w),
        "down1": kernel(w, 2 * w),
        "down2": kernel(2 * w, 2 * w),
        "pack": kernel(2 * w, bits, 1),
    }
    p |= {
        "unpack": kernel(bits, 2 * w),
        "up1": kernel(2 * w, 16 * w),
        "up2": kernel(2 * w, 4 * w),
        "leave": kernel(w, 3),
    }
    p |= {f"{k}_unit": unit_of(c) for k, c in (("enter", w), ("down1", 2 * w), ("down2", 2 * w), ("mid", 2 * w))}
    p |= {"up1_unit": unit_of(2 * w), "up2_unit": unit_of(w)}
    return Built(jax.value_and_grad(loss, has_aux=True), (p, integers(b, frames, side, side, 3, below=256)))


@program("surfaces-with-slopes-of-length-one-seen-along-rays-adam-step", GROUP)
def _surfaces(size: Size) -> Built:
    """This trains a network that tells how far every point is from a surface, from pictures of the surface and masks.

    It is NeuS (Wang, 2021; Totoro97/NeuS, with ports to JAX): colours read the slope of the distance, so that weights get second
    slopes, rays weigh points where the distance changes its sign, and optax takes a step.
    """
    import optax

    rays, points, w, hidden = pick(size, (512, 97, 256, 8), (24, 33, 64, 8), (3, 5, 8, 8))
    turns, looks, skip = 6, 4, 4
    enter = 3 + 6 * turns

    def waves(x, many):
        angles = (x[..., None, :] * 2.0 ** np.arange(many, dtype=np.float32)[:, None]).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], axis=-1)

    def normed(q, x):
        """This is a linear layer whose rows have a learned length."""
        scale = q["length"] * lax.rsqrt(jnp.sum(q["w"] ** 2, axis=0) + 1e-9)
        return x @ (q["w"] * scale) + q["b"]

    def distance(layers, x):
        """This gives the distance of a point [3] from the surface, and features of the point."""
        first = waves(x, turns)
        y = first
        for k, q in enumerate(layers):
            if k == skip:
                y = jnp.concatenate([y, first]) * np.float32(np.sqrt(0.5))
            y = normed(q, y)
            y = jax.nn.softplus(20 * y) / 20 if k + 1 < len(layers) else y
        return y[0] + jnp.sqrt(jnp.sum(x * x) + 1e-9) - 0.7, y[1:]

    def colour(layers, x, slope, look, features):
        y = jnp.concatenate([x, waves(look, looks), slope, features])
        for k, q in enumerate(layers):
            y = normed(q, y)
            y = jax.nn.relu(y) if k + 1 < len(layers) else jax.nn.sigmoid(y)
        return y

    def loss(p, start, look, wanted, mask, seed):
        look = look / jnp.linalg.norm(look, axis=-1, keepdims=True)
        start = start - 2.0 * look
        steps = jnp.linspace(1.0, 3.0, points)
        steps = steps + (jax.random.uniform(jax.random.key(seed), (rays, 1)) - 0.5) * 2.0 / points
        gaps = jnp.diff(steps, axis=-1, append=steps[:, -1:] + 2.0 / points)
        x = start[:, None] + look[:, None] * (steps + 0.5 * gaps)[..., None]

        def at(x, look):
            (far, features), slope = jax.value_and_grad(lambda x: distance(p["far"], x), has_aux=True)(x)
            return far, slope, colour(p["colour"], x, slope, look, features)

        far, slope, shade = jax.vmap(jax.vmap(at, (0, None)))(x, look)
        sharp = jnp.clip(jnp.exp(10 * p["sharp"]), 1e-3, 1e4)
        falls = -jax.nn.relu(-jnp.sum(slope * look[:, None], axis=-1))
        before, after = (
            jax.nn.sigmoid((far - 0.5 * falls * gaps) * sharp),
            jax.nn.sigmoid((far + 0.5 * falls * gaps) * sharp),
        )
        alpha = jnp.clip((before - after + 1e-5) / (before + 1e-5), 0.0, 1.0)
        left = jnp.cumprod(1 - alpha + 1e-7, axis=-1)
        weigh = alpha * jnp.concatenate([jnp.ones((rays, 1)), left[:, :-1]], axis=-1)
        seen = jnp.einsum("rp,rpc->rc", weigh, shade)
        solid = jnp.clip(jnp.sum(weigh, axis=-1), 1e-3, 1 - 1e-3)
        real = mask.astype(jnp.float32)
        error = jnp.sum(jnp.abs(seen - jax.nn.sigmoid(wanted)) * real[:, None]) / (jnp.sum(real) + 1e-5)
        inside = lax.stop_gradient((jnp.sum(x * x, axis=-1) < 1.44).astype(jnp.float32))
        length = jnp.sqrt(jnp.sum(slope * slope, axis=-1) + 1e-9)
        bent = jnp.sum(inside * (length - 1) ** 2) / (jnp.sum(inside) + 1e-5)
        masked = -jnp.mean(real * jnp.log(solid) + (1 - real) * jnp.log1p(-solid))
        deep = jnp.sum(weigh * steps, axis=-1) / solid
        return error + 0.1 * bent + 0.1 * masked, (error, bent, masked, deep, jnp.max(weigh, axis=-1))

    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-4, 500, 30000)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def step(p, state, *inputs):
        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(p, *inputs)
        changes, state = optimiser.update(grads, state, p)
        return optax.apply_updates(p, changes), state, value, told, optax.global_norm(grads)

    def layer(i, o):
        return dense_of(i, o) | {"length": normal(o, scale=0.1, offset=1.0)}

    widths = [enter, *[w] * hidden]
    p = {"far": [layer(i + (enter if k == skip else 0), o) for k, (i, o) in enumerate(itertools.pairwise(widths))]}
    p["far"].append(layer(w, w + 1) | {"length": normal(w + 1, scale=0.02, offset=0.1)})
    p["colour"] = [layer(9 + 6 * looks + w, w), layer(w, w), layer(w, w), layer(w, 3)]
    p["sharp"] = normal(scale=0.01, offset=0.3)
    as_structs = jax.tree.map(lambda r: r.struct, p, is_leaf=lambda r: hasattr(r, "below"))
    state = jax.eval_shape(optimiser.init, as_structs)
    state = jax.tree.map(
        lambda s: integers(*s.shape, below=1000) if s.dtype == jnp.int32 else normal(*s.shape, scale=1e-4, offset=1e-3),
        state,
    )
    inputs = (normal(rays, 3, scale=0.2), normal(rays, 3), normal(rays, 3), booleans(rays), integers(below=1000))
    return Built(step, (p, state, *inputs))


@program("rewards-for-places-a-fixed-network-surprises-two-critics-linen-step", GROUP)
def _surprises(size: Size) -> Built:
    """This updates an agent that is also rewarded where it cannot yet guess what a fixed random network says of a place.

    It is random network distillation (Burda, 2018) over PPO, in the style of purejaxrl and of cleanrl: two critics have horizons of
    their own, surprises are divided by a running spread, and minibatches are scanned.
    """
    import optax
    from flax import linen as nn

    t, envs, seen, w, told, moves = pick(
        size, (128, 256, 147, 512, 256, 17), (64, 16, 67, 96, 48, 17), (4, 4, 7, 8, 5, 3)
    )
    parts = 4

    class Agent(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(w)(x))
            x = nn.LayerNorm()(nn.relu(nn.Dense(w)(x)))
            more = x + nn.relu(nn.Dense(w)(x))
            return nn.Dense(moves)(x), nn.Dense(1)(more)[..., 0], nn.Dense(1)(more)[..., 0]

    class Teller(nn.Module):
        deep: int

        @nn.compact
        def __call__(self, x):
            for _ in range(self.deep):
                x = nn.leaky_relu(nn.Dense(w)(x), 0.01)
            return nn.Dense(told)(x)

    agent, fixed, guess = Agent(), Teller(2), Teller(4)
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-4, eps=1e-5))

    def advantages(rewards, values, last, ends, rate):
        def step(carry, now):
            ahead, following = carry
            reward, value, end = now
            wrong = reward + rate * following * (1 - end) - value
            ahead = wrong + rate * 0.95 * (1 - end) * ahead
            return (ahead, value), ahead

        _, ahead = lax.scan(step, (jnp.zeros(envs), last), (rewards, values, ends), reverse=True)
        return ahead, ahead + values

    def loss(p, batch, key):
        x, normed, goal, move, old, own_goal, new_goal, ahead = batch
        logits, own, new = agent.apply(p["agent"], x)
        logp = jax.nn.log_softmax(logits, axis=-1)
        mine = jnp.take_along_axis(logp, move[:, None], axis=-1)[:, 0]
        ratio = jnp.exp(mine - old)
        ahead = (ahead - jnp.mean(ahead)) / (jnp.std(ahead) + 1e-8)
        policy = jnp.mean(jnp.maximum(-ahead * ratio, -ahead * jnp.clip(ratio, 0.9, 1.1)))
        critics = 0.5 * jnp.mean((own - own_goal) ** 2) + 0.5 * jnp.mean((new - new_goal) ** 2)
        unsure = -jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1))
        missed = jnp.mean((guess.apply(p["guess"], normed) - goal) ** 2, axis=-1)
        kept = (jax.random.uniform(key, missed.shape) < 0.25).astype(jnp.float32)
        learned = jnp.sum(kept * missed) / jnp.maximum(jnp.sum(kept), 1.0)
        near = jnp.mean((ratio - 1) - (mine - old))
        return policy + 0.5 * critics - 0.001 * unsure + learned, (policy, critics, unsure, learned, near)

    def step(p, target, state, running, places, last, move, old, rewards, ends, seed):
        mean, spread, count = running
        ends = (~ends).astype(jnp.float32)
        total = count + t * envs
        shift = jnp.mean(places, axis=(0, 1)) - mean
        fresh_mean = mean + shift * t * envs / total
        spread = (
            spread * count + jnp.var(places, axis=(0, 1)) * t * envs + shift**2 * count * t * envs / total
        ) / total
        normed = jnp.clip((places - fresh_mean) * lax.rsqrt(spread + 1e-6), -5, 5)
        goal = fixed.apply(target, normed)
        bonus = 0.5 * jnp.sum((guess.apply(p["guess"], normed) - goal) ** 2, axis=-1)

        def fade(kept, now):
            kept = 0.99 * kept + now
            return kept, kept

        _, returns = lax.scan(fade, jnp.zeros(envs), bonus)
        bonus = bonus / (jnp.std(returns) + 1e-6)
        _, own, new = agent.apply(p["agent"], places)
        _, own_last, new_last = agent.apply(p["agent"], last)
        own_ahead, own_goal = advantages(rewards, own, own_last, ends, 0.999)
        new_ahead, new_goal = advantages(bonus, new, new_last, jnp.zeros_like(ends), 0.99)
        batch = (places, normed, goal, move, old, own_goal, new_goal, 2 * own_ahead + new_ahead)
        keys = jax.random.split(jax.random.key(seed), parts + 1)
        order = jax.random.permutation(keys[0], t * envs)
        batch = [x.reshape(t * envs, *x.shape[2:])[order] for x in batch]
        batch = [x.reshape(parts, -1, *x.shape[1:]) for x in batch]

        def update(carry, now):
            p, state = carry
            (value, more), grads = jax.value_and_grad(loss, has_aux=True)(p, *now)
            changes, state = optimiser.update(grads, state, p)
            return (optax.apply_updates(p, changes), state), (value, more, optax.global_norm(grads))

        (p, state), metrics = lax.scan(update, (p, state), (batch, keys[1:]))
        fit = 1 - jnp.var(own_goal - own) / (jnp.var(own_goal) + 1e-8)
        return p, state, (fresh_mean, spread, total), metrics, jnp.mean(bonus, axis=0), fit

    x = jax.ShapeDtypeStruct((envs, seen), jnp.float32)
    structs = {k: jax.eval_shape(m.init, jax.random.key(0), x) for k, m in (("agent", agent), ("guess", guess))}
    state = jax.tree.map(
        lambda s: integers(*s.shape, below=1000) if s.dtype == jnp.int32 else normal(*s.shape, scale=1e-4, offset=1e-3),
        jax.eval_shape(optimiser.init, structs),
    )
    target = drawn(jax.eval_shape(fixed.init, jax.random.key(0), x))
    running = (normal(seen), normal(seen, scale=0.1, offset=1.0), normal(offset=1e4))
    inputs = (normal(t, envs, seen), normal(envs, seen), integers(t, envs, below=moves))
    inputs += (normal(t, envs, scale=0.05, offset=-float(np.log(moves))), normal(t, envs), booleans(t, envs))
    return Built(step, (drawn(structs), target, state, running, *inputs, integers(below=1000)))
