"""Ordinary programs of simulation, statistics and search, the twelfth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "twelfth"


@program("antithetic-evolution-of-pendulum-policies", GROUP)
def _evolution(size: Size) -> Built:
    """This gives one generation of evolution strategies on small policies that swing up a pendulum.

    Each direction of noise is tried with both signs, all policies are run in all environments by a scan of mapped steps, returns
    are turned into centred ranks, and the estimated gradient goes through a step of momentum with weight decay.
    """
    pairs, worlds, steps, hidden = pick(size, (512, 7, 50, 24), (128, 5, 50, 24), (3, 2, 4, 5))
    shapes = {"w1": (3, hidden), "b1": (hidden,), "w2": (hidden, hidden), "b2": (hidden,), "w3": (hidden, 1)}
    dt, sigma, rate, decay = 0.05, 0.1, 0.02, 0.005

    def policy(p, seen):
        x = jnp.tanh(seen @ p["w1"] + p["b1"])
        x = jnp.tanh(x @ p["w2"] + p["b2"])
        return 2.0 * jnp.tanh(x @ p["w3"])[0]

    def environment(state, force):
        angle, speed = state
        wrapped = jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
        reward = -(wrapped**2 + 0.1 * speed**2 + 0.001 * force**2)
        speed = jnp.clip(speed + (15.0 * jnp.sin(angle) + 3.0 * force) * dt, -8.0, 8.0)
        return (angle + speed * dt, speed), reward

    def rollout(p, angle, speed):
        def step(state, _):
            seen = jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1] / 8.0])
            return environment(state, policy(p, seen))

        _, rewards = lax.scan(step, (angle, speed), None, length=steps)
        return jnp.sum(rewards)

    def generation(mean, momentum, angles, speeds, seed):
        keys = dict(zip(mean, jax.random.split(jax.random.key(seed), len(mean)), strict=True))
        noise = {name: jax.random.normal(keys[name], (pairs, *leaf.shape)) for name, leaf in mean.items()}
        both = jax.tree.map(lambda m, e: m + sigma * jnp.concatenate([e, -e]), mean, noise)
        worldwide = jax.vmap(rollout, in_axes=(None, 0, 0))
        fitness = jax.vmap(worldwide, in_axes=(0, None, None))(both, 3.0 * angles, speeds).mean(axis=1)
        ranks = jnp.argsort(jnp.argsort(fitness)) / (2 * pairs - 1) - 0.5
        share = ranks[:pairs] - ranks[pairs:]
        grads = jax.tree.map(lambda e: jnp.tensordot(share, e, axes=1) / (2 * pairs * sigma), noise)
        momentum = jax.tree.map(lambda m, g, x: 0.9 * m + g - decay * x, momentum, grads, mean)
        mean = jax.tree.map(lambda x, m: x + rate * m, mean, momentum)
        return mean, momentum, jnp.max(fitness), jnp.mean(fitness)

    mean = {k: normal(*s, scale=s[0] ** -0.5 if len(s) > 1 else 0.02) for k, s in shapes.items()}
    momentum = {k: normal(*s, scale=0.01) for k, s in shapes.items()}
    return Built(generation, (mean, momentum, normal(worlds), normal(worlds), integers(below=2**31 - 1)))


@program("neural-spline-couplings-likelihood-grad-equinox", GROUP)
def _splines(size: Size) -> Built:
    """This gives the loss and gradient of a normalising flow with rational-quadratic splines.

    In each coupling a multilayer perceptron reads half of the features and gives the bins' widths, heights and slopes for the other
    half; outside of the box the flow is the identity, and the features are reversed between couplings.
    """
    import equinox as eqx

    b, n, bins, couplings, wide = pick(size, (3000, 10, 8, 4, 96), (1000, 10, 8, 4, 96), (3, 4, 3, 4, 6))
    kept, box, least = n // 2, 3.0, 1e-3

    def knots(raw):
        sizes = least + (1 - least * bins) * jax.nn.softmax(raw, axis=-1)
        edges = jnp.pad(jnp.cumsum(sizes, axis=-1), ((0, 0), (1, 0)))
        return 2 * box * edges - box

    def spline(x, raw):
        xs, ys = knots(raw[:, :bins]), knots(raw[:, bins : 2 * bins])
        slopes = jnp.pad(least + jax.nn.softplus(raw[:, 2 * bins :]), ((0, 0), (1, 1)), constant_values=1.0)
        inside = jnp.clip(x, -box, box)
        k = jnp.clip(jnp.sum(inside[:, None] >= xs, axis=-1) - 1, 0, bins - 1)[:, None]

        def at(a, shift=0):
            return jnp.take_along_axis(a, k + shift, axis=-1)[:, 0]

        width, height = at(xs, 1) - at(xs), at(ys, 1) - at(ys)
        s, d0, d1 = height / width, at(slopes), at(slopes, 1)
        u = (inside - at(xs)) / width
        v = u * (1 - u)
        below = s + (d1 + d0 - 2 * s) * v
        y = at(ys) + height * (s * u**2 + d0 * v) / below
        log_det = 2 * jnp.log(s) + jnp.log(d1 * u**2 + 2 * s * v + d0 * (1 - u) ** 2) - 2 * jnp.log(below)
        within = jnp.abs(x) < box
        return jnp.where(within, y, x), jnp.where(within, log_det, 0.0)

    class Flow(eqx.Module):
        nets: list

        def __init__(self, key):
            keys = jax.random.split(key, couplings)
            outputs = (n - kept) * (3 * bins - 1)
            self.nets = [eqx.nn.MLP(kept, outputs, wide, 2, activation=jax.nn.silu, key=k) for k in keys]

        def log_prob(self, x):
            total = 0.0
            for net in self.nets:
                first, second = x[:kept], x[kept:]
                second, log_det = spline(second, net(first).reshape(n - kept, -1))
                x = jnp.concatenate([first, second])[::-1]
                total = total + jnp.sum(log_det)
            return total + jnp.sum(jax.scipy.stats.norm.logpdf(x))

    module = eqx.filter_eval_shape(Flow, jax.random.key(0))
    structs, rest = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(arrays, x):
        return -jnp.mean(jax.vmap(eqx.combine(arrays, rest).log_prob)(x))

    def graded(*arguments):
        value, slopes = jax.value_and_grad(loss)(*arguments)
        return value, jax.tree.leaves(slopes)

    return Built(graded, (module_weights(structs, jnp.float32), normal(b, n)))


@program("mesh-graph-network-passes-haiku", GROUP)
def _mesh(size: Size) -> Built:
    """This gives the accelerations that a network like MeshGraphNets predicts for the nodes of a mesh.

    Edges know the vector between their ends and its length, edges and nodes are updated in turn by perceptrons that end with a
    layer norm and are added to what was there, and messages are summed by segment.
    """
    import haiku as hk

    nodes, edges, n, passes, kinds = pick(size, (1885, 10848, 128, 4, 9), (777, 4321, 72, 3, 9), (5, 11, 6, 2, 3))

    def mlp(x, name, out=n, norm=True):
        x = hk.nets.MLP([n, n, out], name=name)(x)
        return hk.LayerNorm(-1, True, True, name=f"{name}_norm")(x) if norm else x

    def model(places, velocity, kind, senders, receivers):
        features = jnp.concatenate([velocity, jax.nn.one_hot(kind, kinds)], axis=-1)
        along = places[senders] - places[receivers]
        length = jnp.linalg.norm(along + 1e-8, axis=-1, keepdims=True)
        node = mlp(features, "encode_nodes")
        edge = mlp(jnp.concatenate([along, length], axis=-1), "encode_edges")
        for i in range(passes):
            joined = jnp.concatenate([edge, node[senders], node[receivers]], axis=-1)
            edge = edge + mlp(joined, f"edges_{i}")
            inbox = jax.ops.segment_sum(edge, receivers, num_segments=nodes)
            node = node + mlp(jnp.concatenate([node, inbox], axis=-1), f"nodes_{i}")
        out = mlp(node, "decode", 2, norm=False)
        free = (kind == 0) | (kind > kinds // 2)
        return places + jnp.where(free[:, None], velocity + 0.01 * out, 0.0), out

    inputs = (normal(nodes, 2), normal(nodes, 2), integers(nodes, below=kinds))
    inputs += (integers(edges, below=nodes), integers(edges, below=nodes, ramp=True))
    pure = hk.without_apply_rng(hk.transform(model))
    structs = jax.eval_shape(lambda *xs: pure.init(jax.random.key(0), *xs), *(r.struct for r in inputs))
    return Built(pure.apply, (module_weights(structs, jnp.float32), *inputs))


@program("replica-exchange-many-modes-langevin", GROUP)
def _replicas(size: Size) -> Built:
    """This gives chains at a ladder of temperatures that explore a mixture of many modes and trade places.

    Each sweep takes a Langevin proposal along the gradient of the tempered density with a Metropolis correction, after which
    neighbouring temperatures swap their states, even pairs and odd pairs in turn.
    """
    chains, ladder, d, modes, sweeps = pick(size, (128, 12, 10, 333, 8), (64, 10, 8, 197, 8), (2, 4, 3, 5, 2))

    def run(x, means, log_weights, seed):
        betas = jnp.geomspace(1.0, 0.05, ladder)
        paces = 0.15 / betas

        def log_density(y):
            near = -0.5 * jnp.sum((y - 3.0 * means) ** 2, axis=-1)
            return jax.nn.logsumexp(jax.nn.log_softmax(log_weights) + near) - 0.005 * jnp.sum(y**2)

        both = jax.vmap(jax.vmap(jax.value_and_grad(log_density)))

        def forward(to, at, grad):
            drift = at + 0.5 * paces[:, None] * betas[:, None] * grad
            return -jnp.sum((to - drift) ** 2, axis=-1) / (2 * paces)

        def sweep(carry, key):
            x, value, grad, turn = carry
            k1, k2, k3 = jax.random.split(key, 3)
            noise = jax.random.normal(k1, x.shape)
            y = x + 0.5 * (paces * betas)[:, None] * grad + jnp.sqrt(paces)[:, None] * noise
            new_value, new_grad = both(y)
            ratio = betas * (new_value - value) + forward(x, y, new_grad) - forward(y, x, grad)
            accept = jnp.log(jax.random.uniform(k2, ratio.shape, minval=1e-7)) < ratio
            x, grad = jnp.where(accept[..., None], y, x), jnp.where(accept[..., None], new_grad, grad)
            value = jnp.where(accept, new_value, value)

            place = jnp.arange(ladder)
            partner = jnp.clip(jnp.where((place + turn) % 2 == 0, place + 1, place - 1), 0, ladder - 1)
            low = jnp.minimum(place, partner)
            gain = (betas - betas[partner]) * (value[:, partner] - value)
            u = jnp.log(jax.random.uniform(k3, (chains, ladder), minval=1e-7))[:, low]
            source = jnp.where(u < gain, partner, place)
            value = jnp.take_along_axis(value, source, axis=1)
            x = jnp.take_along_axis(x, source[..., None], axis=1)
            grad = jnp.take_along_axis(grad, source[..., None], axis=1)
            stats = (jnp.mean(accept, axis=0), jnp.mean(source != place, axis=0))
            return (x, value, grad, 1 - turn), (x[:, 0], stats)

        start = (x, *both(x), jnp.int32(0))
        (x, value, _, _), (cold, stats) = lax.scan(sweep, start, jax.random.split(jax.random.key(seed), sweeps))
        return x, value, cold.mean(axis=(0, 1)), stats

    inputs = (normal(chains, ladder, d, scale=3.0), normal(modes, d), normal(modes), integers(below=2**31 - 1))
    return Built(run, inputs)


@program("forced-turbulence-spectral-vorticity-steps", GROUP)
def _turbulence(size: Size) -> Built:
    """This gives the vorticity of forced two-dimensional turbulence after a few steps in Fourier space.

    Velocities come from the stream function, the product of velocity and slope is formed on the grid and cut off at two thirds, and
    a low-storage Runge-Kutta method treats advection explicitly and viscosity implicitly, as JAX-CFD does.
    """
    b, side, steps = pick(size, (4, 240, 3), (2, 144, 3), (2, 8, 2))
    dt, viscosity, drag, wave = 0.002, 1e-3, 0.1, 4
    kx, ky = np.meshgrid(np.fft.fftfreq(side, 1 / side), np.fft.rfftfreq(side, 1 / side), indexing="ij")
    kx, ky = kx.astype(np.float32), ky.astype(np.float32)
    square = kx**2 + ky**2
    inverse = np.where(square == 0, 0.0, 1.0 / np.where(square == 0, 1.0, square)).astype(np.float32)
    keep = ((np.abs(kx) < side / 3) & (np.abs(ky) < side / 3)).astype(np.float32)
    linear = (-viscosity * square - drag).astype(np.float32)
    y = np.arange(side, dtype=np.float32) * 2 * np.pi / side
    forcing = np.broadcast_to(-wave * np.cos(wave * y), (side, side)).astype(np.float32)

    def back(f):
        return jnp.fft.irfft2(f, s=(side, side))

    def explicit(w):
        stream = w * inverse
        u, v = back(1j * ky * stream), back(-1j * kx * stream)
        advected = u * back(1j * kx * w) + v * back(1j * ky * w)
        return jnp.fft.rfft2(forcing - advected) * keep

    def step(w, _):
        alphas = (0.0, 0.1496590219993, 0.3704009573644, 0.6222557631345, 0.9582821306748, 1.0)
        betas = (0.0, -0.4178904745, -1.192151694643, -1.697784692471, -1.514183444257)
        gammas = (0.1496590219993, 0.3792103129999, 0.8229550293869, 0.6994504559488, 0.1530572479681)
        h = 0.0
        for k in range(5):
            h = explicit(w) + betas[k] * h
            mu = 0.5 * dt * (alphas[k + 1] - alphas[k])
            w = (w + gammas[k] * dt * h + mu * linear * w) / (1.0 - mu * linear)
        energy = jnp.sum(jnp.abs(w) ** 2 * inverse, axis=(-2, -1)) / float(side) ** 4
        return w, energy

    def run(vorticity):
        smooth = jnp.fft.rfft2(vorticity) * keep * np.exp(-square / 50.0)
        w, energies = lax.scan(step, smooth, None, length=steps)
        return back(w), energies

    return Built(jax.vmap(run), (normal(b, side, side, scale=5.0),))


@program("two-compartment-decay-fits-levenberg-marquardt", GROUP)
def _fits(size: Size) -> Built:
    """This gives fits of a sum of two decays to the echoes of every voxel of a magnetic resonance image.

    Each voxel runs a few Levenberg-Marquardt iterations with a Jacobian by forward mode; a trial step that lowers the error is
    taken and relaxes the damping, another one is thrown away and stiffens it, and standard errors come from the last Jacobian.
    """
    voxels, echoes, rounds = pick(size, (20000, 24, 6), (3000, 24, 6), (5, 6, 3))
    times = np.linspace(0.1, 4.0, echoes).astype(np.float32)

    def model(p):
        first, second = jnp.exp(p[0]), jnp.exp(p[1])
        slow = jnp.exp(p[2])
        fast = slow + jnp.exp(p[3])
        return first * jnp.exp(-slow * times) + second * jnp.exp(-fast * times)

    def fit(start, truth, noise):
        signal = model(truth) + 0.02 * noise

        def residual(p):
            return model(p) - signal

        def round_(carry, _):
            p, damping, error = carry
            r, jacobian = residual(p), jax.jacfwd(residual)(p)
            normal_matrix, slope = jacobian.T @ jacobian, jacobian.T @ r
            system = normal_matrix + damping * jnp.diag(jnp.diag(normal_matrix) + 1e-3)
            trial = p - jnp.clip(jnp.linalg.solve(system, slope), -1.0, 1.0)
            new_error = jnp.sum(residual(trial) ** 2)
            better = new_error < error
            p = jnp.where(better, trial, p)
            damping = jnp.clip(jnp.where(better, damping / 3.0, damping * 4.0), 1e-4, 1e4)
            return (p, damping, jnp.minimum(error, new_error)), error

        first = (start, jnp.float32(0.1), jnp.sum(residual(start) ** 2))
        (p, _, error), history = lax.scan(round_, first, None, length=rounds)
        jacobian = jax.jacfwd(residual)(p)
        covariance = jnp.linalg.inv(jacobian.T @ jacobian + 1e-3 * jnp.eye(4)) * error / max(echoes - 4, 1)
        return p, jnp.sqrt(jnp.diag(covariance)), history

    inputs = (normal(voxels, 4, scale=0.2), normal(voxels, 4, scale=0.3), normal(voxels, echoes))
    return Built(jax.vmap(fit), inputs)
