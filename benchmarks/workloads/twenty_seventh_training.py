"""Losses with their gradients and whole training steps, the twenty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "twenty-seventh"


@program("states-as-few-of-many-features-with-learned-thresholds-adam-step", GROUP)
def _features(size: Size) -> Built:
    """This trains a dictionary that writes each state of a language model as a sum of a few of thousands of features.

    It is the sparse autoencoder with jumping rectifiers (Rajamanoharan, 2024; Gemma Scope, trained in JAX): thresholds get
    gradients from a small window around them, rows of the decoder keep the length one, and silent features are counted.
    """
    import optax

    b, n, m = pick(size, (2039, 1152, 16384), (173, 160, 1531), (5, 6, 17))
    dtype, window, aim = half(size), 0.05, 32.0

    @jax.custom_jvp
    def jumped(x, bar):
        return jnp.where(x > bar, x, 0.0)

    @jumped.defjvp
    def _jumped(primals, tangents):
        (x, bar), (dx, dbar) = primals, tangents
        near = (jnp.abs(x - bar) < 0.5 * window).astype(x.dtype)
        return jumped(x, bar), jnp.where(x > bar, dx, 0.0) - bar / window * near * dbar

    @jax.custom_jvp
    def over(x, bar):
        return (x > bar).astype(x.dtype)

    @over.defjvp
    def _over(primals, tangents):
        x, bar = primals
        near = (jnp.abs(x - bar) < 0.5 * window).astype(x.dtype)
        return over(x, bar), jnp.zeros_like(tangents[0]) - near / window * tangents[1]

    def loss(p, x, share):
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(jnp.sum(x * x, axis=-1)) / n)
        told = jnp.dot((x - p["centre"]).astype(dtype), p["in"].astype(dtype), preferred_element_type=jnp.float32)
        told, bar = jax.nn.relu(told + p["shift"]), jnp.exp(p["log_bar"])
        kept = jumped(told, bar)
        back = jnp.dot(kept.astype(dtype), p["out"].astype(dtype), preferred_element_type=jnp.float32) + p["centre"]
        wrong = jnp.sum((back - x) ** 2, axis=-1)
        count = jnp.sum(over(told, bar), axis=-1)
        missed = jnp.sum(wrong) / jnp.sum((x - jnp.mean(x, axis=0)) ** 2)
        value = jnp.mean(wrong) + share * jnp.mean((count / aim - 1) ** 2)
        used = jnp.any(kept > 0, axis=0)
        return value, (missed, jnp.mean(count), used, jnp.mean(kept, axis=0))

    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(7e-5, b1=0.0, b2=0.999))

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-9)

    def step(p, state, silent, x, share):
        p = p | {"out": unit(p["out"])}
        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(p, x, jax.nn.softplus(share))
        along = jnp.sum(grads["out"] * p["out"], axis=-1, keepdims=True)
        grads = grads | {"out": grads["out"] - along * p["out"]}
        changes, state = optimiser.update(grads, state, p)
        p = optax.apply_updates(p, changes)
        p = p | {"out": unit(p["out"])}
        silent = jnp.where(told[2], 0, silent + b)
        alike = jnp.mean(jnp.sum(p["out"] * unit(p["in"].T), axis=-1))
        return p, state, silent, value, told[:2], told[3], jnp.sum(silent > 5000), alike, optax.global_norm(grads)

    p = {"in": normal(n, m, scale=n**-0.5), "out": normal(m, n), "shift": normal(m, scale=0.1)}
    p |= {"centre": normal(n, scale=0.1), "log_bar": normal(m, scale=0.1, offset=0.5)}
    structs = jax.tree.map(lambda r: r.struct, p, is_leaf=lambda r: hasattr(r, "below"))
    state = jax.tree.map(
        lambda s: integers(*s.shape, below=1000) if s.dtype == jnp.int32 else normal(*s.shape, scale=1e-4, offset=1e-3),
        jax.eval_shape(optimiser.init, structs),
    )
    return Built(step, (p, state, integers(m, below=9999), normal(b, n, dtype=dtype, scale=3.0), normal()))


@program("a-world-of-drawn-classes-balanced-divergences-grad-linen", GROUP)
def _world(size: Size) -> Built:
    """This gives the gradients of a model of a world whose state is a memory and 32 drawn classes, learned from what robots saw.

    It is the world model of DreamerV3 (Hafner, 2023; danijar/dreamerv3, in JAX), with linen: classes keep one part in a hundred of
    evenness, divergences are balanced and clipped below, and rewards are told by shares of bins.
    """
    from flax import linen as nn

    b, t, seen, moves, memory, w, groups, classes = pick(
        size, (16, 47, 139, 21, 1024, 512, 32, 32), (3, 23, 67, 7, 128, 96, 16, 16), (2, 4, 5, 3, 8, 6, 2, 3)
    )
    dtype, bins = jnp.float32, 255

    def symlog(x):
        return jnp.sign(x) * jnp.log1p(jnp.abs(x))

    class Units(nn.Module):
        sizes: tuple[int, ...]
        out: int = 0

        @nn.compact
        def __call__(self, x):
            x = x.astype(dtype)
            for o in self.sizes:
                x = nn.silu(nn.RMSNorm(dtype=dtype)(nn.Dense(o, dtype=dtype)(x)))
            return nn.Dense(self.out)(x.astype(jnp.float32)) if self.out else x

    def logs(raw):
        """These are the logarithms of chances, a hundredth of which is spread evenly."""
        probs = jax.nn.softmax(raw.reshape(*raw.shape[:-1], groups, classes), axis=-1)
        return jnp.log(0.99 * probs + 0.01 / classes)

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, now):
            deep, drawn_at = carry
            told, move, begun, noise = now
            deep, drawn_at = jnp.where(begun, 0.0, deep), jnp.where(begun, 0.0, drawn_at)
            x = [Units((w,), name=k)(y) for k, y in (("deep", deep), ("drawn", drawn_at), ("move", move))]
            x = Units((memory,), name="mix")(jnp.concatenate(x, axis=-1))
            gates = nn.Dense(3 * memory, dtype=dtype, name="gates")(jnp.concatenate([x, deep.astype(dtype)], axis=-1))
            reset, fresh, change = jnp.split(nn.LayerNorm(name="norm")(gates.astype(jnp.float32)), 3, axis=-1)
            change = jax.nn.sigmoid(change - 1)
            deep = change * jnp.tanh(jax.nn.sigmoid(reset) * fresh) + (1 - change) * deep
            prior = logs(Units((w,), groups * classes, name="prior")(deep))
            after = logs(Units((w,), groups * classes, name="after")(jnp.concatenate([deep.astype(dtype), told], -1)))
            probs = jnp.exp(after)
            one = jax.nn.one_hot(jnp.argmax(after + noise, axis=-1), classes)
            one = (one + probs - lax.stop_gradient(probs)).reshape(b, -1)
            return (deep, one), (deep, one, prior, after)

    class World(nn.Module):
        @nn.compact
        def __call__(self, x, move, begun, noise):
            told = Units((w, w), name="enter")(symlog(x))
            cells = nn.scan(nn.remat(Cell), variable_broadcast="params", split_rngs={"params": False})
            start = (jnp.zeros((b, memory)), jnp.zeros((b, groups * classes)))
            _, (deep, one, prior, after) = cells(name="cells")(start, (told, move, begun[..., None], noise))
            both = jnp.concatenate([deep, one], axis=-1)
            outs = [Units((w, w), o, name=k)(both) for k, o in (("leave", seen), ("reward", bins), ("goes", 1))]
            return *outs, prior, after

    model = World()
    places = jnp.linspace(-20.0, 20.0, bins)

    def halves(x):
        """This shares a number between the two nearest bins."""
        above = jnp.clip(jnp.searchsorted(places, x), 1, bins - 1)
        part = (x - places[above - 1]) / (places[above] - places[above - 1])
        low = jax.nn.one_hot(above - 1, bins) * (1 - part)[..., None]
        return low + jax.nn.one_hot(above, bins) * part[..., None]

    def divergence(p, q):
        return jnp.maximum(jnp.sum(jnp.exp(p) * (p - q), axis=(-2, -1)), 1.0)

    def loss(p, x, move, begun, reward, goes, seed):
        noise = jax.random.gumbel(jax.random.key(seed), (t, b, groups, classes))
        out, bets, ahead, prior, after = model.apply(p, x, jnp.tanh(move), ~begun, noise)
        wrong = jnp.sum((out - symlog(x)) ** 2, axis=-1)
        bet = -jnp.sum(halves(symlog(5 * reward)) * jax.nn.log_softmax(bets, axis=-1), axis=-1)
        end = jnp.where(goes, jax.nn.softplus(-ahead[..., 0]), jax.nn.softplus(ahead[..., 0]))
        learn = divergence(lax.stop_gradient(after), prior)
        stay = divergence(after, lax.stop_gradient(prior))
        unsure = -jnp.mean(jnp.sum(jnp.exp(after) * after, axis=-1), axis=(0, 1))
        value = jnp.mean(wrong + bet + end + learn + 0.1 * stay)
        guess = jnp.sum(jax.nn.softmax(bets, axis=-1) * places, axis=-1)
        guess = jnp.sign(guess) * jnp.expm1(jnp.minimum(jnp.abs(guess), 15.0))
        return value, (jnp.mean(wrong, axis=1), jnp.mean(bet), jnp.mean(end), jnp.mean(learn), unsure, guess)

    inputs = (normal(t, b, seen, scale=2.0), normal(t, b, moves), booleans(t, b), normal(t, b), booleans(t, b))
    like_noise = jax.ShapeDtypeStruct((t, b, groups, classes), jnp.float32)
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs[:3]), like_noise)
    return Built(jax.value_and_grad(loss, has_aux=True), (drawn(structs), *inputs, integers(below=1000)))


@program("couplings-of-columns-of-related-proteins-pseudolikelihood-step", GROUP)
def _couplings(size: Size) -> Built:
    """This learns which columns of a family of related proteins change together, and so which residues touch.

    It is GREMLIN (Kamisetty, 2013; sokrypton/GREMLIN, also in JAX): sequences (here copies of eleven, with changes) count less
    where many are alike, each residue is told from all others, and contacts are lengths of tables less what rows and columns share.
    """
    count, length, letters = pick(size, (4093, 149, 21), (401, 47, 21), (7, 5, 4))
    dtype, cells = half(size), length * letters

    def loss(p, ones, weigh):
        w = p["pairs"].reshape(length, letters, length, letters)
        w = 0.5 * (w + w.transpose(2, 3, 0, 1)) * (1 - np.eye(length, dtype=np.float32))[:, None, :, None]
        flat = ones.reshape(count, cells)
        logits = jnp.dot(flat, w.reshape(cells, cells).astype(dtype), preferred_element_type=jnp.float32)
        logits = logits.reshape(count, length, letters) + p["single"]
        logp = jax.nn.log_softmax(logits, axis=-1)
        real = ones[..., : letters - 1]
        own = jnp.einsum("nla,nla->nl", real.astype(jnp.float32), logp[..., : letters - 1])
        value = -jnp.sum(weigh * jnp.sum(own, axis=-1))
        held = 0.01 * jnp.sum(p["single"] ** 2)
        held = held + 0.01 * (length - 1) * (letters - 1) * 0.5 * jnp.sum(w * w)
        right = jnp.argmax(logits, axis=-1) == jnp.argmax(ones, axis=-1)
        return value + held, (w, -jnp.sum(own, axis=-1), jnp.mean(right, axis=0))

    def step(p, moments, ancestors, text, age):
        text = jnp.where(text < letters, text, ancestors[jnp.arange(count) % ancestors.shape[0]])
        ones = jax.nn.one_hot(text, letters, dtype=dtype)
        flat = ones.reshape(count, cells)
        same = jnp.dot(flat, flat.T, preferred_element_type=jnp.float32)
        weigh = 1.0 / jnp.sum(same >= 0.8 * length, axis=-1)
        effective = jnp.sum(weigh)
        (value, (w, each, right)), grads = jax.value_and_grad(loss, has_aux=True)(p, ones, weigh)
        rate = 0.1 * jnp.log(effective) / length / (1 + age)

        def moved(x, g, m):
            first = 0.9 * m["first"] + 0.1 * g
            total = 0.999 * m["total"] + 0.001 * jnp.sum(g * g)
            return x - rate * first / (jnp.sqrt(jnp.abs(total)) + 1e-8), {"first": first, "total": total}

        fresh = {k: moved(p[k], grads[k], moments[k]) for k in p}
        near = jnp.sqrt(jnp.sum(w[:, : letters - 1, :, : letters - 1] ** 2, axis=(1, 3)) + 1e-12)
        near = near * (1 - jnp.eye(length))
        shared = jnp.sum(near, axis=0, keepdims=True) * jnp.sum(near, axis=1, keepdims=True) / jnp.sum(near)
        touch = (near - shared) * (1 - jnp.eye(length))
        mean, spread = jnp.mean(touch), jnp.std(touch)
        far = np.triu(np.ones((length, length), bool), min(6, length - 2))
        best, at = lax.top_k(jnp.where(far, (touch - mean) / spread, -jnp.inf).reshape(-1), length // 2)
        p, moments = ({k: f[j] for k, f in fresh.items()} for j in (0, 1))
        return p, moments, value, effective, each, right, best, at

    p = {"pairs": normal(cells, cells, scale=0.02), "single": normal(length, letters, scale=0.3)}
    moments = {k: {"first": normal(*r.shape, scale=0.01), "total": normal(offset=10.0)} for k, r in p.items()}
    inputs = (integers(11, length, below=letters), integers(count, length, below=9 * letters))
    return Built(step, (p, moments, *inputs, normal(scale=0.1, offset=1.0)))


@program("sentences-by-inside-sums-of-a-learned-grammar-likelihood-grad", GROUP)
def _grammar(size: Size) -> Built:
    """This gives the gradients of a grammar that is learned from plain sentences by summing over all their trees.

    It is the neural probabilistic grammar of Kim (2019), as in torch-struct and its ports to JAX: chances of rules come from
    vectors of symbols, a chart of spans is filled from short to long, and each width is computed again for the gradients.
    """
    b, t, names, leaves, w, words = pick(
        size, (48, 19, 30, 60, 256, 10007), (6, 13, 12, 24, 64, 2003), (2, 5, 3, 4, 6, 11)
    )
    both = names + leaves

    def deeper(q, x):
        for k in ("one", "two"):
            x = x + jax.nn.relu(dense(q[k]["b"], jax.nn.relu(dense(q[k]["a"], x))))
        return x

    @jax.checkpoint
    def joined(left, right, rules):
        """This sums over cuts [b, n, k, s] of both parts and over rules [names, s, s] in logarithms."""
        top_left = lax.stop_gradient(jnp.max(left, axis=-1, keepdims=True))
        top_right = lax.stop_gradient(jnp.max(right, axis=-1, keepdims=True))
        each = top_left + top_right
        top = jnp.max(each, axis=2, keepdims=True)
        one = jnp.exp(left - top_left) * jnp.exp(each - top)
        pairs = jnp.einsum("bnks,bnkr->bnsr", one, jnp.exp(right - top_right))
        total = jnp.einsum("bnsr,asr->bna", pairs, rules)
        return jnp.log(jnp.maximum(total, 1e-30)) + top[:, :, 0]

    def loss(p, text, length):
        first = jax.nn.log_softmax(deeper(p["first"], p["root"]) @ p["name_out"], axis=-1)
        rules = jax.nn.softmax(p["symbols"][:names] @ p["rules"]["w"] + p["rules"]["b"], axis=-1)
        rules = rules.reshape(names, both, both)
        letters = jax.nn.log_softmax(dense(p["word_out"], deeper(p["word"], p["symbols"][names:])), axis=-1)
        single = jnp.moveaxis(letters[:, text], 0, -1)
        low = jnp.full((b, t, names), -1e9)
        chart = {1: jnp.concatenate([low, single], axis=-1)}
        roots = [jax.nn.logsumexp(chart[1][:, 0, :names] + first, axis=-1)]
        for width in range(2, t + 1):
            n = t - width + 1
            left = jnp.stack([chart[k][:, :n] for k in range(1, width)], axis=2)
            right = jnp.stack([chart[width - k][:, k : k + n] for k in range(1, width)], axis=2)
            span = joined(left, right, rules)
            chart[width] = jnp.pad(span, ((0, 0), (0, 0), (0, leaves)), constant_values=-1e9)
            roots.append(jax.nn.logsumexp(span[:, 0] + first, axis=-1))
        length = jnp.clip(length, 2, t)
        logp = jnp.take_along_axis(jnp.stack(roots, axis=1), length[:, None] - 1, axis=1)[:, 0]
        unsure = -jnp.mean(jnp.sum(jax.scipy.special.xlogy(rules, rules), axis=(1, 2)))
        return -jnp.mean(logp), (jnp.exp(-jnp.sum(logp) / jnp.sum(length)), logp, unsure)

    def units():
        return {k: {"a": dense_of(w, w), "b": dense_of(w, w)} for k in ("one", "two")}

    p = {"symbols": normal(both, w), "root": normal(w), "name_out": normal(w, names, scale=w**-0.5)}
    p |= {"rules": dense_of(w, both * both), "word_out": dense_of(w, words), "first": units(), "word": units()}
    return Built(jax.value_and_grad(loss, has_aux=True), (p, integers(b, t, below=words), integers(b, below=t + 1)))
