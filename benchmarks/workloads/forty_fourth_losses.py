"""Surprise weighed by trust, mistakes on a tree of species, clusters that many samples agree on: their author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, layer_norm, norm_of, rms_norm

GROUP = "forty-fourth"


@program("dynamic-fine-tuning-surprise-weighed-by-the-own-chance-of-words-bent-scores-smoothed-tied-table-grad", GROUP)
def _weighed(size: Size) -> Built:
    """This program tunes the end of a language model where each word counts by how likely the model finds it already.

    It is dynamic fine-tuning (Wu, 2025; yongliang-wu/DFT) at the head of Gemma 2: scores of a tied table are bent by a tangent,
    words are smoothed and squares of logarithms of sums added, prompts do not count, and answers weigh alike whatever their length.
    """
    b, long, n, words, bend = pick(size, (2, 512, 2304, 256000, 30.0), (2, 80, 128, 4003, 30.0), (2, 5, 8, 13, 30.0))
    dtype, smooth, square = half(size), 0.05, 1e-4

    def run(p, state, word, ease, prompt, short):
        """This gives the loss and parts, slopes for all, surprises, own chances, ranks, and hits in ten bands of trust."""
        line = jnp.arange(long)
        real = (line >= prompt[:, None]) & (line < (long - short)[:, None])
        level = jnp.log(float(words)) * (1.0 + 0.35 * ease)
        state = state + (level[..., None] * p["table"][word].astype(jnp.float32)).astype(dtype)
        count = jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1)
        share = real / count / b

        def loss(p, state):
            """This is the weighed surprise and the squares."""
            x = rms_norm(1 + p["norm"], state)
            scores = jnp.einsum("btn,wn->btw", x, p["table"], preferred_element_type=jnp.float32)
            scores = bend * jnp.tanh(scores / bend)
            total = jax.nn.logsumexp(scores, axis=-1)
            own = jnp.take_along_axis(scores, word[..., None], axis=-1)[..., 0]
            surprise = total - own
            trust = lax.stop_gradient(jnp.exp(-surprise))
            soft = (1 - smooth) * surprise + smooth * (total - jnp.mean(scores, axis=-1))
            parts = jnp.stack([jnp.sum(share * trust * soft), square * jnp.sum(share * total**2)])
            rank = jnp.sum(scores > own[..., None], axis=-1)
            entropy = total - jnp.sum(jnp.exp(scores - total[..., None]) * scores, axis=-1)
            return jnp.sum(parts), (parts, surprise, trust, rank, entropy)

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(p, state)
        (value, (parts, surprise, trust, rank, entropy)), slopes = both
        long_ = jnp.sqrt(sum(jnp.sum(jnp.square(z.astype(jnp.float32))) for z in jax.tree.leaves(slopes[0])))
        band = jax.nn.one_hot(jnp.minimum(trust * 10, 9).astype(jnp.int32), 10) * real[..., None]
        many = jnp.maximum(jnp.sum(band, axis=(0, 1)), 1)
        hits = jnp.einsum("bt,btk->k", (rank == 0).astype(jnp.float32), band) / many
        text = jnp.sum(surprise * real, axis=1, keepdims=True) / count
        plain = jnp.stack([jnp.mean(text), jnp.sum(share * entropy)])
        return value, parts, slopes, long_, surprise * real, trust, rank, hits, plain

    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "norm": normal(n, dtype=dtype, scale=0.1)}
    inputs = normal(b, long, n, dtype=dtype), integers(b, long, below=words), normal(b, long)
    return Built(run, (p, *inputs, integers(b, below=long // 3), integers(b, below=long // 3)))


@program("better-mistakes-surprise-summed-up-a-tree-of-species-and-choices-of-least-expected-height-grad", GROUP)
def _species(size: Size) -> Built:
    """This program learns to name species so that mistakes are at least near relatives, on a tree with seven levels.

    It is the hierarchical cross-entropy of Bertinetto (2020; fiveai/making-better-mistakes) on iNaturalist: chances of species are
    summed up the tree, levels count for less the higher they are, and choices of least expected height (Karthik, 2021) compared.
    """
    m, n, wide, sizes, fade = pick(
        size,
        (512, 2048, 1024, (5089, 1103, 273, 60, 24, 9, 3), 0.3),
        (96, 128, 96, (500, 120, 40, 16, 8, 4, 2), 0.3),
        (5, 6, 4, (11, 6, 4, 3, 2, 2, 2), 0.3),
    )
    dtype, kinds, levels = half(size), sizes[0], len(sizes)
    weigh = np.exp(-fade * np.arange(levels)).astype(np.float32)

    def run(p, x, middle, pull, label, parents):
        """This gives the loss by level, slopes, heights of mistakes for both choices, hits by level, and chances of levels."""
        above = [jnp.arange(kinds)]
        for parent in parents:
            above.append(parent[above[-1]])
        above = jnp.stack(above)
        apart = jnp.sum(above[:, :, None] != above[:, None, :], axis=0)
        signs = sum(z[a] for z, a in zip(middle, above, strict=True)) * levels**-0.5
        x = (x + jnp.exp(0.5 * pull)[:, None] * signs[label]).astype(dtype)

        def loss(p):
            """This is the surprise of each ancestor given the one above."""
            y = jax.nn.relu(layer_norm(p["norm"], dense(p["first"], x)))
            logits = dense(p["last"], y).astype(jnp.float32)
            logp = jax.nn.log_softmax(3 * logits, axis=-1)
            chance = jnp.exp(logp)
            told, sums = [jnp.take_along_axis(logp, label[:, None], axis=1)[:, 0]], chance
            for k, parent in enumerate(parents):
                sums = jax.ops.segment_sum(sums.T, parent, sizes[k + 1], indices_are_sorted=True).T
                mine = jnp.take_along_axis(sums, above[k + 1][label][:, None], axis=1)[:, 0]
                told.append(jnp.log(jnp.maximum(mine, 1e-12)))
            told = jnp.stack(told)
            steps = jnp.concatenate([told[1:] - told[:-1], -told[-1:]])
            parts = weigh * jnp.mean(steps, axis=1)
            return jnp.sum(parts), (parts, told, logp, chance)

        (value, (parts, told, logp, chance)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        cost = chance @ apart.astype(jnp.float32)
        plain, careful = jnp.argmax(chance, axis=1), jnp.argmin(cost, axis=1)
        truth = above[:, label]
        hits = jnp.stack([jnp.mean(above[:, z] == truth, axis=1) for z in (plain, careful)])
        heights = jnp.stack([apart[label, z] for z in (plain, careful)])
        wrong = jnp.sum(heights, axis=1) / jnp.maximum(jnp.sum(heights > 0, axis=1), 1)
        _, best = lax.top_k(chance, min(20, kinds))
        far = apart[label[:, None], best]
        spread = jnp.cumsum(far, axis=1) / jnp.arange(1, far.shape[1] + 1)
        table = jnp.zeros((sizes[-2], sizes[-2]), jnp.int32).at[truth[-2], above[-2][plain]].add(1)
        entropy = -jnp.sum(chance * logp, axis=1)
        return value, parts, slopes, heights, wrong, hits, jnp.mean(spread, axis=0), jnp.exp(told), table, entropy

    p = {"norm": norm_of(wide, dtype), "first": dense_of(n, wide, dtype), "last": dense_of(wide, kinds, dtype)}
    parents = tuple(integers(i, below=o, ramp=True) for i, o in itertools.pairwise(sizes))
    middle = tuple(normal(k, n, scale=0.7) for k in sizes)
    return Built(run, (p, normal(m, n), middle, normal(m), integers(m, below=kinds), parents))


@program("consensus-of-clusters-of-patients-over-many-samples-and-counts-areas-and-doubtful-pairs-choose", GROUP)
def _agreed(size: Size) -> Built:
    """This program asks how many sorts of patients there are by how steadily pairs fall together when some are left out.

    It is consensus clustering (Monti, 2003; ConsensusClusterPlus): for each count of clusters many samples are clustered, tables
    tell how often pairs agree, and areas below curves and shares of doubtful pairs (Senbabaoglu, 2014) choose the count.
    """
    n, d, samples, least, most, rounds, kinds = pick(
        size, (1024, 1000, 50, 2, 8, 10, 5), (240, 60, 12, 2, 5, 6, 3), (12, 4, 3, 2, 3, 3, 2)
    )
    bins = 100

    def run(kind, middle, noise, level, drawn, first):
        """This gives curves, areas, doubtful shares, the count, groups, how steady patients and groups are, and purity."""
        x = 0.6 * middle[kind] * jnp.exp(0.3 * level)[:, None] + noise
        x = (x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-3)
        x = x - jnp.mean(x, axis=1, keepdims=True)
        x = x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True))
        weight = drawn.astype(jnp.float32)
        seen = weight.T @ weight

        def clustered(weight, first, count):
            """This clusters one sample by rounds of means with unit length, and names all patients."""
            there = jnp.arange(most) < count

            def once(_, mean):
                """This is one round."""
                near = jnp.where(there, x @ mean.T, -9.0)
                member = jax.nn.one_hot(jnp.argmax(near, axis=1), most) * weight[:, None]
                total = member.T @ x
                fresh = total * lax.rsqrt(jnp.sum(total**2, axis=1, keepdims=True) + 1e-9)
                return jnp.where(jnp.sum(member, axis=0)[:, None] > 0, fresh, mean)

            mean = lax.fori_loop(0, rounds, once, x[first])
            near = jnp.where(there, x @ mean.T, -9.0)
            return jnp.argmax(near, axis=1), jnp.sum(jnp.max(near, axis=1) * weight) / jnp.sum(weight)

        def agreed(count):
            """This is the table of agreement and its curve for one count of clusters."""
            group, fit = jax.vmap(clustered, in_axes=(0, 0, None))(weight, first, count)
            hot = jax.nn.one_hot(group, most) * weight[..., None]
            both = jnp.einsum("snk,smk->nm", hot, hot)
            table = both / jnp.maximum(seen, 1.0)
            upper = jnp.triu(jnp.ones((n, n)), 1)
            at = jnp.minimum(table * bins, bins - 1).astype(jnp.int32)
            curve = jnp.zeros(bins).at[at.reshape(-1)].add(upper.reshape(-1))
            return table, jnp.cumsum(curve) / jnp.sum(upper), jnp.mean(fit), group

        tables, curves, fits, groups = lax.map(agreed, jnp.arange(least, most + 1))
        area = jnp.mean(curves, axis=1)
        growth = jnp.concatenate([area[:1], (area[1:] - area[:-1]) / area[:-1]])
        doubt = curves[:, int(0.9 * bins) - 1] - curves[:, int(0.1 * bins) - 1]
        best = jnp.argmin(doubt)
        table = tables[best]

        def moved(_, group):
            """This moves each patient to the group with which it agrees most."""
            hot = jax.nn.one_hot(group, most)
            many = jnp.sum(hot, axis=0)
            return jnp.argmax(jnp.where(many > 0, table @ hot / jnp.maximum(many, 1), -1.0), axis=1)

        group = lax.fori_loop(0, 5, moved, groups[best, 0])
        hot = jax.nn.one_hot(group, most)
        many = jnp.sum(hot, axis=0)
        away = table * (1 - jnp.eye(n))
        steady = away @ hot / jnp.maximum(many - hot, 1)
        own = jnp.take_along_axis(steady, group[:, None], axis=1)[:, 0]
        by_group = own @ hot / jnp.maximum(many, 1)
        shared = jnp.zeros((kinds, most)).at[kind, group].add(1.0)
        pure = jnp.sum(jnp.max(shared, axis=0)) / n
        return curves, area, growth, doubt, fits, best + least, group, steady, by_group, shared, pure

    inputs = integers(n, below=kinds), normal(kinds, d), normal(n, d), normal(n)
    return Built(run, (*inputs, booleans(samples, n), integers(samples, most, below=n)))
