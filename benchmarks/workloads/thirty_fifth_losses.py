"""Means of pictures, skewed students, clicks, endless mixtures and near places, the thirty-fifth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of

GROUP = "thirty-fifth"


@program("pictures-between-pictures-by-least-haul-of-mass-along-rows-then-columns", GROUP)
def _between(size: Size) -> Built:
    """This program finds pictures that lie between given ones, so that hauling their mass to all of those costs least.

    It is the convolutional Wasserstein barycentre (Solomon, 2015; `convolutional_barycenter2d` of POT, with logarithms): the bell
    of costs is applied along rows and then along columns, and scales of both sides are renewed in a loop.
    """
    blends, k, side, rounds = pick(size, (8, 4, 64, 20), (3, 3, 36, 16), (2, 2, 6, 3))
    eps = 0.004

    def run(picture, blend):
        """This gives pictures in between, what they cost, and how far the scales move at each round."""
        mass = jax.nn.log_softmax(2.0 * picture.reshape(k, -1)).reshape(k, side, side)
        weigh = jax.nn.softmax(blend, axis=-1)[..., None, None]
        line = jnp.linspace(0.0, 1.0, side)
        cost = -jnp.square(line[:, None] - line) / eps

        def spread(x):
            """This applies the bell to logarithms [blends, k, rows, columns]."""
            x = jax.nn.logsumexp(x[..., None, :] + cost, axis=-1)
            return jax.nn.logsumexp(x[..., None, :, :] + cost[..., None], axis=-2)

        def one_round(carry, _):
            """This renews the scales of both sides."""
            g, before = carry
            f = mass - spread(g)
            far = spread(f)
            middle = jnp.sum(weigh * far, axis=1)
            g = middle[:, None] - far
            moved = jnp.mean(jnp.abs(jnp.exp(middle) - jnp.exp(before)), axis=(1, 2))
            return (g, middle), moved

        start = jnp.zeros((blends, k, side, side)), jnp.full((blends, side, side), -2 * float(np.log(side)))
        (g, middle), moved = lax.scan(one_round, start, None, length=rounds)
        f = mass - spread(g)
        haul = jnp.sum(jnp.exp(mass) * f, axis=(2, 3)) + jnp.sum(jnp.exp(middle)[:, None] * g, axis=(2, 3))
        return jnp.exp(middle), eps * haul, moved

    return Built(run, (normal(k, side, side), normal(blends, k)))


@program("students-and-teachers-compared-with-skewed-blends-of-both-in-chunks-grad", GROUP)
def _skewed(size: Size) -> Built:
    """This program gives gradients of a student's last layer that should come near a teacher in both skewed directions.

    It is the loss of DistiLLM (Ko, 2024; jongwooko/distillm): divergences from each side to a blend of both keep slopes small;
    both heads are applied to chunks of words, which are made anew on the way back.
    """
    t, chunk, n, m, words = pick(size, (2048, 512, 1024, 2048, 32000), (96, 32, 96, 128, 4001), (6, 3, 4, 6, 11))
    dtype, skew = half(size), 0.1

    def run(state, head, teacher_state, teacher_head, label):
        """This gives the loss with its parts, and slopes of states and of the head."""
        mask = (label > 0).astype(jnp.float32)

        @jax.checkpoint
        def of_chunk(state, teacher_state, label, mask, head):
            """These are sums over one chunk of words."""
            q = jax.nn.log_softmax((state @ head).astype(jnp.float32))
            p = jax.nn.log_softmax((teacher_state @ teacher_head).astype(jnp.float32))
            toward = jnp.logaddexp(p + float(np.log(skew)), q + float(np.log1p(-skew)))
            back = jnp.logaddexp(q + float(np.log(skew)), p + float(np.log1p(-skew)))
            one = jnp.sum(jnp.exp(p) * (p - toward), axis=-1)
            two = jnp.sum(jnp.exp(q) * (q - back), axis=-1)
            miss = -jnp.take_along_axis(q, label[:, None], axis=-1)[:, 0]
            return jnp.stack([jnp.sum(z * mask) for z in (one, two, miss)])

        def loss(state, head):
            """This is the loss of all words."""
            parts = [z.reshape(t // chunk, chunk, *z.shape[1:]) for z in (state, teacher_state, label, mask)]
            _, sums = lax.scan(lambda carry, z: (carry, of_chunk(*z, head)), None, tuple(parts))
            one, two, miss = jnp.sum(sums, axis=0) / jnp.maximum(jnp.sum(mask), 1.0)
            return 0.5 * (one + two) + 0.1 * miss, (one, two, miss)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state, head)

    inputs = normal(t, n, dtype=dtype), normal(n, words, dtype=dtype, scale=n**-0.5)
    teacher = normal(t, m, dtype=dtype), normal(m, words, dtype=dtype, scale=2 * m**-0.5)
    return Built(run, (*inputs, *teacher, integers(t, below=words)))


@program("lists-learned-from-clicks-with-looks-by-place-taken-out-and-graded", GROUP)
def _clicks(size: Size) -> Built:
    """This program scores lists of documents, and tells losses from clicks and how good the lists are by grades.

    It is counterfactual learning to rank (Joachims, 2017; Ai, 2018; as in google/rax and ULTRA): chances of looks come from a
    learned bias per place and weigh clicks, beside likelihoods of whole orders, pairs that are wrong, and measures of grades.
    """
    lists, docs, f, w, first = pick(size, (2048, 100, 136, 512, 10), (96, 60, 136, 96, 10), (3, 5, 4, 6, 2))

    def run(p, feature, place_bias, click, grade, short):
        """This gives three losses per list, chances of looks, and four measures of the lists."""
        real = jnp.arange(docs) < docs - short[:, None]
        x = jnp.sign(feature) * jnp.log1p(jnp.abs(feature))
        for k in range(3):
            x = jax.nn.elu(dense(p[f"dense{k}"], x))
        score = jnp.where(real, dense(p["last"], x)[..., 0], -1e9)
        look = jax.nn.softmax(place_bias)
        weigh = jnp.minimum(look[0] / look, 10.0)
        clicked = jnp.where(real & (click == 0), 1.0, 0.0)
        logp = jax.nn.log_softmax(score, axis=-1)
        softmax_loss = -jnp.sum(jnp.where(real, clicked * weigh * logp, 0.0), axis=-1)

        grade = jnp.where(real, grade, -1)
        ideal = jnp.argsort(-(grade + 1e-3 * jnp.arange(docs)[::-1] / docs), axis=-1)
        in_order = jnp.take_along_axis(score, ideal, axis=-1)
        in_real = jnp.take_along_axis(real, ideal, axis=-1)
        top = jnp.max(in_order, axis=-1, keepdims=True)
        after = jnp.cumsum(jnp.exp(in_order - top)[:, ::-1], axis=-1)[:, ::-1]
        mle = jnp.sum(jnp.where(in_real, jnp.log(after + 1e-12) + top - in_order, 0.0), axis=-1)

        better = (grade[:, :, None] > grade[:, None]) & real[:, :, None] & real[:, None]
        apart = jnp.where(better, score[:, :, None] - score[:, None], 0.0)
        pairs = jnp.where(better, jax.nn.softplus(-apart), 0.0)
        pair_loss = jnp.sum(pairs, axis=(1, 2)) / jnp.maximum(jnp.sum(better, axis=(1, 2)), 1)

        def gains(order):
            """This gives grades in an order, and their discounted gains."""
            found = jnp.maximum(jnp.take_along_axis(grade, order, axis=-1), 0)
            discount = 1.0 / jnp.log2(jnp.arange(docs) + 2.0)
            gain = jnp.where(jnp.arange(docs) < first, (2.0**found - 1) * discount, 0.0)
            return found, jnp.sum(gain, axis=-1)

        found, gain = gains(jnp.argsort(-score, axis=-1))
        ndcg = gain / jnp.maximum(gains(ideal)[1], 1e-9)
        good = (found > 1).astype(jnp.float32)
        rank = jnp.arange(1.0, docs + 1)
        average = jnp.sum(good * jnp.cumsum(good, axis=-1) / rank, axis=-1) / jnp.maximum(jnp.sum(good, axis=-1), 1.0)
        first_good = jnp.max(good / rank, axis=-1)
        stop = (2.0**found - 1) / 16.0
        going = jnp.cumprod(1 - stop, axis=-1)
        going = jnp.concatenate([jnp.ones((lists, 1)), going[:, :-1]], axis=-1)
        err = jnp.sum(stop * going / rank, axis=-1)
        measures = jnp.stack([jnp.mean(z) for z in (ndcg, average, first_good, err)])
        return softmax_loss, mle, pair_loss, look, measures

    widths = (f, w, w // 2, w // 4)
    p = {f"dense{k}": dense_of(widths[k], widths[k + 1]) for k in range(3)} | {"last": dense_of(w // 4, 1)}
    inputs = normal(lists, docs, f), normal(docs), integers(lists, docs, below=8), integers(lists, docs, below=5)
    return Built(run, (p, *inputs, integers(lists, below=docs // 2)))


@program("mixtures-with-no-set-number-of-bells-by-rounds-of-sticks", GROUP)
def _endless(size: Size) -> Built:
    """This program sorts points into bells of any shape, of which as many stay in use as the points ask for.

    It is variational inference of a Dirichlet process of Gaussians (Blei, 2006; as `BayesianGaussianMixture` in scikit-learn):
    sticks are broken, means and precisions have a prior, and rounds renew both and what points owe to bells.
    """
    n, d, k, kinds, rounds = pick(size, (65536, 16, 32, 12, 6), (6144, 8, 16, 6, 6), (12, 2, 3, 2, 2))
    alpha, kappa, freedom = 1.0, 0.1, d + 2.0

    def run(centre, kind, noise, start):
        """This gives weights, means and spreads of bells, mean likelihoods by round, and how sure points are."""
        x = 2.0 * centre[kind] + noise @ (jnp.eye(d) + 0.3 * jnp.roll(jnp.eye(d), 1, axis=1))
        middle = jnp.mean(x, axis=0)
        prior = jnp.cov(x, rowvar=False)

        def maximise(resp):
            """This renews all bells from what points owe to them."""
            many = jnp.sum(resp, axis=0) + 1e-4
            mean = resp.T @ x / many[:, None]
            off = x[:, None] - mean
            spread = jnp.einsum("nk,nki,nkj->kij", resp, off, off) / many[:, None, None]
            spread = spread + 1e-4 * jnp.eye(d)
            after = jnp.concatenate([jnp.cumsum(many[::-1])[::-1][1:], jnp.zeros(1)])
            sticks = 1.0 + many, alpha + after
            strong, free = kappa + many, freedom + many
            mean_ = (kappa * middle + many[:, None] * mean) / strong[:, None]
            gap = mean - middle
            scatter = prior + many[:, None, None] * spread
            scatter = scatter + (many * kappa / strong)[:, None, None] * gap[:, :, None] * gap[:, None]
            cov = scatter / free[:, None, None]
            chol = jnp.linalg.cholesky(cov)
            eye = jnp.broadcast_to(jnp.eye(d), (k, d, d))
            root = jax.vmap(lambda c, e: jax.scipy.linalg.solve_triangular(c, e, lower=True).T)(chol, eye)
            return sticks, strong, free, mean_, cov, root

        def expect(bells):
            """This gives logarithms of what bells give to points."""
            (one, two), strong, free, mean, _, root = bells
            whole = jax.scipy.special.digamma(one + two)
            stick = jax.scipy.special.digamma(one) - whole
            rest = jnp.cumsum(jax.scipy.special.digamma(two) - whole)
            share = stick + jnp.concatenate([jnp.zeros(1), rest[:-1]])
            y = jnp.einsum("nd,kde->nke", x, root) - jnp.einsum("kd,kde->ke", mean, root)
            log_det = jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)), axis=-1)
            bell = -0.5 * (d * float(np.log(2 * np.pi)) + jnp.sum(y * y, axis=-1)) + log_det
            bell = bell - 0.5 * d * jnp.log(free)
            halves = jax.scipy.special.digamma(0.5 * (free - jnp.arange(d)[:, None]))
            lam = d * float(np.log(2.0)) + jnp.sum(halves, axis=0)
            return share + bell + 0.5 * (lam - d / strong)

        def one_round(_, carry):
            """This is one round of both steps."""
            k, logp, likes = carry
            resp = jnp.exp(logp - jax.nn.logsumexp(logp, axis=1, keepdims=True))
            logp = expect(maximise(resp))
            return k + 1, logp, likes.at[k].set(jnp.mean(jax.nn.logsumexp(logp, axis=1)))

        begin = 2.0 * centre[jnp.arange(k) % kinds] + start
        far = jnp.sum(jnp.square(x), axis=1, keepdims=True) - 2 * x @ begin.T + jnp.sum(jnp.square(begin), axis=1)
        _, logp, likes = lax.fori_loop(0, rounds, one_round, (0, -0.1 * far, jnp.zeros(rounds)))
        log_resp = jax.nn.log_softmax(logp, axis=1)
        bells = maximise(jnp.exp(log_resp))
        one, two = bells[0]
        weigh = one / (one + two)
        weigh = weigh * jnp.concatenate([jnp.ones(1), jnp.cumprod(1 - weigh)[:-1]])
        doubt = -jnp.sum(jnp.exp(log_resp) * log_resp, axis=1)
        return weigh / jnp.sum(weigh), bells[3], bells[4], likes, doubt

    return Built(run, (normal(kinds, d), integers(n, below=kinds), normal(n, d), normal(k, d)))


@program("random-field-likelihood-from-nearest-earlier-places-grad", GROUP)
def _earlier(size: Size) -> Built:
    """This program tells how likely measured values are under a random field in which each place knows a few earlier ones.

    It is the approximation of Vecchia (1988; Datta, 2016; as GpGp and spNNGP): nearest earlier places are found by distances, small
    systems of a Matern kernel are solved for all places at once, and slopes of kernel and trend come by backpropagation.
    """
    n, near, covariates = pick(size, (4096, 16, 8), (1024, 8, 4), (9, 3, 2))

    def matern(apart, reach):
        """This is Matern's kernel of smoothness three halves."""
        scaled = float(np.sqrt(3.0)) * apart / reach
        return (1 + scaled) * jnp.exp(-scaled)

    def length(x):
        """This is the length of differences, with slopes at nought."""
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1) + 1e-10)

    def run(p, place, table, noise):
        """This gives the likelihood, slopes, and standardised errors of foretelling each place."""
        place = jax.nn.sigmoid(1.5 * place)
        goal = table @ p["trend"] * 0.8 + jnp.sin(6 * place[:, 0]) * jnp.cos(5 * place[:, 1]) + 0.3 * noise
        apart = length(place[:, None] - place)
        earlier = jnp.tril(jnp.ones((n, n), bool), -1)
        far, index = lax.top_k(jnp.where(earlier, -apart, -1e6), near)
        valid = far > -1e5

        def loss(p):
            """This is minus the mean of logarithms of densities."""
            reach, sill, nugget = (
                0.1 + 0.2 * jnp.exp(0.3 * p["reach"]),
                jnp.exp(0.3 * p["sill"]),
                0.1 + jnp.exp(p["nugget"] - 2),
            )
            left = goal - table @ p["trend"]

            def of_place(here, mine, index, valid):
                """This foretells one place from its neighbours."""
                there = place[index]
                both = valid[:, None] & valid
                k = sill * matern(length(there[:, None] - there), reach) + nugget * jnp.eye(near)
                k = jnp.where(both, k, jnp.eye(near))
                cross = jnp.where(valid, sill * matern(length(here - there), reach), 0.0)
                chol = jnp.linalg.cholesky(k)
                half = jax.scipy.linalg.solve_triangular(chol, cross, lower=True)
                known = jax.scipy.linalg.solve_triangular(chol, jnp.where(valid, left[index], 0.0), lower=True)
                mean, var = half @ known, sill + nugget - half @ half
                return (mine - mean) / jnp.sqrt(var), jnp.log(var)

            error, log_var = jax.vmap(of_place)(place, left, index, valid)
            return 0.5 * jnp.mean(jnp.square(error) + log_var + float(np.log(2 * np.pi))), error

        (value, error), slope = jax.value_and_grad(loss, has_aux=True)(p)
        return value, slope, error

    p = {"trend": normal(covariates), "reach": normal(), "sill": normal(), "nugget": normal(scale=0.3)}
    return Built(run, (p, normal(n, 2), normal(n, covariates), normal(n)))
