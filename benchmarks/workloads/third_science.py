"""Programs of physics, statistics and classical algorithms, by an author who knew nothing of the package: a third set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "third"


@program("ewald-sum-forces-grad", GROUP)
def _ewald(size: Size) -> Built:
    """Forces of point charges in a periodic box by Ewald's sum, as molecular dynamics codes write it."""
    n, top = pick(size, (3000, 5), (400, 3), (7, 1))
    line = np.arange(-top, top + 1)
    waves = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1).reshape(-1, 3)
    waves = waves[np.any(waves != 0, axis=1)].astype(np.float32)
    box, alpha = 10.0, 0.6

    def energy(positions, charges):
        charges = charges - jnp.mean(charges)
        delta = positions[:, None, :] - positions[None, :, :]
        delta = delta - box * jnp.round(delta / box)
        same = jnp.eye(n, dtype=bool)
        r2 = jnp.where(same, 1.0, jnp.sum(delta**2, axis=-1) + 1e-3)
        r = jnp.sqrt(r2)
        pair = jnp.where(same | (r > box / 2), 0.0, jax.scipy.special.erfc(alpha * r) / r)
        real = 0.5 * jnp.sum(charges[:, None] * charges[None, :] * pair)
        k = 2 * jnp.pi / box * waves
        k2 = jnp.sum(k**2, axis=-1)
        phase = positions @ k.T
        c, s = charges @ jnp.cos(phase), charges @ jnp.sin(phase)
        far = 2 * jnp.pi / box**3 * jnp.sum(jnp.exp(-k2 / (4 * alpha**2)) / k2 * (c**2 + s**2))
        return real + far - alpha / jnp.sqrt(jnp.pi) * jnp.sum(charges**2)

    def forces(positions, charges):
        value, grad = jax.value_and_grad(energy)(positions, charges)
        return value, -grad

    return Built(forces, (normal(n, 3, scale=3.0), normal(n)))


@program("gaussian-process-evidence-grad", GROUP)
def _evidence(size: Size) -> Built:
    """The gradient of a Gaussian process's log marginal likelihood in its lengths, amplitude and noise."""
    n, d = pick(size, (1024, 16), (160, 8), (6, 2))

    def kernel(p, a, b):
        a, b = a / jnp.exp(p["lengths"]), b / jnp.exp(p["lengths"])
        d2 = jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1)[None] - 2 * a @ b.T
        return jnp.exp(2 * p["amplitude"]) * jnp.exp(-0.5 * jnp.maximum(d2, 0.0))

    def loss(p, x, y):
        k = kernel(p, x, x) + (jnp.exp(2 * p["noise"]) + 1e-4) * jnp.eye(n)
        factor = jnp.linalg.cholesky(k)
        alpha = jax.scipy.linalg.cho_solve((factor, True), y)
        return 0.5 * y @ alpha + jnp.sum(jnp.log(jnp.diag(factor))) + 0.5 * n * np.log(2 * np.pi)

    params = {"lengths": normal(d, scale=0.1, offset=1.0), "amplitude": normal(), "noise": normal(scale=0.1)}
    return Built(jax.value_and_grad(loss), (params, normal(n, d), normal(n)))


@program("loopy-belief-propagation-grid", GROUP)
def _belief(size: Size) -> Built:
    """Stereo by belief propagation on a grid: messages in log space with a truncated linear smoothness."""
    rows, columns, labels, rounds = pick(size, (240, 320, 32, 8), (40, 56, 12, 5), (4, 5, 3, 2))
    line = np.arange(labels)
    smooth = -np.minimum(np.abs(line[:, None] - line[None, :]) * 0.5, 2.0).astype(np.float32)

    def send(h):
        m = jax.nn.logsumexp(h[..., :, None] + smooth, axis=-2)
        return m - jnp.mean(m, axis=-1, keepdims=True)

    def shift(m, by, axis):
        moved = jnp.roll(m, by, axis=axis)
        edge = 0 if by > 0 else m.shape[axis] - 1
        at = lax.broadcasted_iota(jnp.int32, m.shape, axis)
        return jnp.where(at == edge, 0.0, moved)

    def solve(left, right):
        shifted = jnp.stack([jnp.roll(right, d, axis=1) for d in range(labels)], axis=-1)
        unary = -jnp.minimum(jnp.abs(left[..., None] - shifted), 3.0)

        def body(_, messages):
            up, down, west, east = messages
            total = unary + up + down + west + east
            return (
                shift(send(total - down), -1, 0),
                shift(send(total - up), 1, 0),
                shift(send(total - east), -1, 1),
                shift(send(total - west), 1, 1),
            )

        messages = lax.fori_loop(0, rounds, body, (jnp.zeros_like(unary),) * 4)
        belief = jax.nn.softmax(unary + sum(messages), axis=-1)
        return belief @ jnp.arange(labels, dtype=jnp.float32), jnp.argmax(belief, axis=-1)

    return Built(solve, (normal(rows, columns), normal(rows, columns)))


@program("lattice-boltzmann-channel", GROUP)
def _lattice(size: Size) -> Built:
    """Steps of a D2Q9 lattice Boltzmann flow around a cylinder: collide, stream, bounce back."""
    rows, columns, steps = pick(size, (512, 1024, 10), (96, 192, 4), (8, 12, 2))
    cx = np.array([0, 1, 0, -1, 0, 1, -1, -1, 1])
    cy = np.array([0, 0, 1, 0, -1, 1, 1, -1, -1])
    opposite = np.array([0, 3, 4, 1, 2, 7, 8, 5, 6])
    w = np.array([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4, np.float32)
    y, x = np.mgrid[:rows, :columns]
    solid = (x - columns // 4) ** 2 + (y - rows // 2) ** 2 < (rows // 9) ** 2
    solid |= (y == 0) | (y == rows - 1)

    def equilibrium(rho, u, v):
        cu = 3.0 * (cx[:, None, None] * u + cy[:, None, None] * v)
        return w[:, None, None] * rho * (1.0 + cu + 0.5 * cu**2 - 1.5 * (u**2 + v**2))

    def moments(f):
        rho = jnp.sum(f, axis=0)
        return (
            rho,
            jnp.einsum("q,qyx->yx", cx.astype(f.dtype), f) / rho,
            jnp.einsum("q,qyx->yx", cy.astype(f.dtype), f) / rho,
        )

    def step(f, _):
        rho, u, v = moments(f)
        out = f - (f - equilibrium(rho, u, v)) / 0.6
        out = jnp.where(solid, f[opposite], out)
        out = jnp.stack([jnp.roll(out[q], (cy[q], cx[q]), axis=(0, 1)) for q in range(9)])
        inlet = equilibrium(jnp.ones((rows, 1)), jnp.full((rows, 1), 0.08), jnp.zeros((rows, 1)))
        out = out.at[:, :, 0].set(inlet[:, :, 0])
        return out, jnp.mean(u)

    def run(u, v):
        f = equilibrium(jnp.ones_like(u), u, v)
        f, drift = lax.scan(step, f, None, length=steps)
        _, u, v = moments(f)
        vorticity = (jnp.roll(v, -1, 1) - jnp.roll(v, 1, 1)) - (jnp.roll(u, -1, 0) - jnp.roll(u, 1, 0))
        return jnp.where(solid, 0.0, vorticity), drift

    return Built(run, (normal(rows, columns, scale=0.01, offset=0.08), normal(rows, columns, scale=0.01)))


@program("maxwell-fdtd-absorbing-steps", GROUP)
def _fdtd(size: Size) -> Built:
    """Steps of a two-dimensional Maxwell solver on Yee's grid, with a source and a lossy border."""
    n, steps = pick(size, (1024, 20), (256, 8), (12, 3))
    edge = np.minimum(np.arange(n), np.arange(n)[::-1])
    loss = np.clip(1.0 - edge / (n / 10), 0.0, 1.0) ** 3 * 0.3
    loss = np.maximum(loss[:, None], loss[None, :]).astype(np.float32)
    courant = 0.5

    def run(ez, hx, hy, permittivity):
        ce = courant / (1.0 + jnp.abs(permittivity))

        def step(fields, time):
            ez, hx, hy = fields
            hx = hx.at[:, :-1].add(-courant * (ez[:, 1:] - ez[:, :-1])) * (1 - loss)
            hy = hy.at[:-1, :].add(courant * (ez[1:, :] - ez[:-1, :])) * (1 - loss)
            curl = (hy[1:, 1:] - hy[:-1, 1:]) - (hx[1:, 1:] - hx[1:, :-1])
            ez = ez.at[1:, 1:].add(ce[1:, 1:] * curl) * (1 - loss)
            ez = ez.at[n // 3, n // 2].add(jnp.exp(-(((time - 10.0) / 4.0) ** 2)))
            return (ez, hx, hy), 0.5 * jnp.sum(ez**2 + hx**2 + hy**2)

        return lax.scan(step, (ez, hx, hy), jnp.arange(steps, dtype=jnp.float32))

    field = normal(n, n, scale=0.1)
    return Built(run, (field, field, field, normal(n, n, scale=0.3)))


@program("ising-checkerboard-sweeps", GROUP)
def _ising(size: Size) -> Built:
    """Metropolis sweeps of replicas of an Ising model, a colour of the checkerboard at a time, one temperature each."""
    replicas, n, sweeps = pick(size, (16, 256, 10), (4, 64, 5), (2, 6, 2))
    board = (np.add.outer(np.arange(n), np.arange(n)) % 2).astype(bool)

    def half_sweep(key, spins, beta, colour):
        around = sum(jnp.roll(spins, by, axis) for by in (-1, 1) for axis in (0, 1))
        accept = jax.random.uniform(key, spins.shape) < jnp.exp(-2.0 * beta * spins * around)
        return jnp.where(accept & (board == colour), -spins, spins)

    def chain(key, noise, beta):
        def sweep(spins, key):
            first, second = jax.random.split(key)
            spins = half_sweep(first, spins, beta, False)
            spins = half_sweep(second, spins, beta, True)
            energy = -jnp.mean(spins * (jnp.roll(spins, 1, 0) + jnp.roll(spins, 1, 1)))
            return spins, (jnp.mean(spins), energy)

        spins = jnp.where(noise > 0, 1.0, -1.0)
        spins, (magnet, energy) = lax.scan(sweep, spins, jax.random.split(key, sweeps))
        return spins, jnp.mean(jnp.abs(magnet)), jnp.var(energy) * beta**2

    def run(seed, noise, log_beta):
        keys = jax.random.split(jax.random.key(seed), replicas)
        return jax.vmap(chain)(keys, noise, jnp.exp(log_beta))

    return Built(run, (integers(below=1000), normal(replicas, n, n), normal(replicas, scale=0.2, offset=-0.8)))


@program("rauch-tung-striebel-smoother", GROUP)
def _smoother(size: Size) -> Built:
    """A Kalman filter forward and a Rauch-Tung-Striebel smoother backward over a batch of series."""
    batch, t, n, m = pick(size, (1024, 16, 8, 4), (32, 48, 6, 3), (2, 4, 3, 2))

    def smooth(a, h, log_q, log_r, ys):
        a = jnp.eye(n) + 0.1 * a
        q, r = jnp.diag(jnp.exp(log_q)), jnp.diag(jnp.exp(log_r))

        def forward(carry, y):
            mean, cov = carry
            mean_p, cov_p = a @ mean, a @ cov @ a.T + q
            s = h @ cov_p @ h.T + r
            gain = jnp.linalg.solve(s, h @ cov_p).T
            innovation = y - h @ mean_p
            mean = mean_p + gain @ innovation
            i_kh = jnp.eye(n) - gain @ h
            cov = i_kh @ cov_p @ i_kh.T + gain @ r @ gain.T
            _, logdet = jnp.linalg.slogdet(s)
            ll = -0.5 * (innovation @ jnp.linalg.solve(s, innovation) + logdet + m * np.log(2 * np.pi))
            return (mean, cov), (mean, cov, mean_p, cov_p, ll)

        def backward(carry, xs):
            mean_s, cov_s = carry
            mean, cov, mean_p, cov_p = xs
            g = jnp.linalg.solve(cov_p, a @ cov).T
            mean_s = mean + g @ (mean_s - mean_p)
            cov_s = cov + g @ (cov_s - cov_p) @ g.T
            return (mean_s, cov_s), (mean_s, jnp.diag(cov_s))

        _, (mean, cov, mean_p, cov_p, ll) = lax.scan(forward, (jnp.zeros(n), jnp.eye(n)), ys)
        last = (mean[-1], cov[-1])
        _, out = lax.scan(backward, last, (mean[:-1], cov[:-1], mean_p[1:], cov_p[1:]), reverse=True)
        return out, jnp.sum(ll)

    args = (normal(n, n), normal(m, n), normal(n, offset=-2.0), normal(m), normal(batch, t, m))
    return Built(jax.vmap(smooth, in_axes=(None, None, None, None, 0)), args)


@program("spectral-embedding-subspace", GROUP)
def _spectral(size: Size) -> Built:
    """Spectral clustering: a self-tuning affinity, a normalised Laplacian, orthogonal iterations, unit rows."""
    n, d, k, rounds = pick(size, (4096, 64, 10, 3), (600, 16, 5, 4), (8, 3, 2, 2))

    def embed(x, start):
        norms = jnp.sum(x**2, axis=-1)
        d2 = jnp.maximum(norms[:, None] + norms[None, :] - 2.0 * x @ x.T, 0.0)
        local = jnp.sqrt(-lax.top_k(-d2, 7)[0][:, -1])
        affinity = jnp.exp(-d2 / (local[:, None] * local[None, :]))
        affinity = jnp.where(jnp.eye(n, dtype=bool), 0.0, affinity)
        scale = lax.rsqrt(jnp.sum(affinity, axis=1) + 1e-8)
        laplacian = scale[:, None] * affinity * scale[None, :]

        def body(_, v):
            q, _ = jnp.linalg.qr(laplacian @ v + v)
            return q

        v = lax.fori_loop(0, rounds, body, start)
        values = jnp.diag(v.T @ laplacian @ v)
        return v / (jnp.linalg.norm(v, axis=1, keepdims=True) + 1e-8), values

    return Built(embed, (normal(n, d), normal(n, k)))


@program("signed-distance-sphere-tracing", GROUP)
def _tracing(size: Size) -> Built:
    """Ray marching of smoothly joined spheres over a floor, with normals by gradients and a soft shadow."""
    rows, columns, balls, steps = pick(size, (540, 960, 12, 32), (48, 64, 6, 12), (4, 5, 2, 3))

    def distance(scene, at):
        centres, radii = scene
        each = jnp.linalg.norm(at - centres, axis=-1) - jnp.abs(radii)
        joined = -jax.nn.logsumexp(-8.0 * each) / 8.0
        return jnp.minimum(joined, at[1] + 2.0)

    def march(scene, origin, direction):
        def body(_, far):
            return jnp.minimum(far + distance(scene, origin + far * direction), 30.0)

        return lax.fori_loop(0, steps, body, 0.0)

    def shadow(scene, at, light):
        def body(i, carry):
            far, lit = carry
            near = distance(scene, at + far * light)
            return far + jnp.clip(near, 0.02, 0.5), jnp.minimum(lit, 8.0 * near / far)

        return jnp.clip(lax.fori_loop(0, steps // 2, body, (0.05, 1.0))[1], 0.0, 1.0)

    def pixel(scene, light, eye, xy):
        direction = jnp.array([xy[0], xy[1], 1.5])
        direction = direction / jnp.linalg.norm(direction)
        far = march(scene, eye, direction)
        at = eye + far * direction
        normal_ = jax.grad(distance, argnums=1)(scene, at)
        normal_ = normal_ / (jnp.linalg.norm(normal_) + 1e-6)
        lambert = jnp.maximum(normal_ @ light, 0.0)
        colour = 0.1 + 0.9 * lambert * shadow(scene, at + 0.02 * normal_, light)
        return jnp.where(far < 30.0, colour, 0.5 + 0.3 * direction[1])

    def render(centres, radii, light, eye):
        y, x = jnp.meshgrid(jnp.linspace(0.6, -0.6, rows), jnp.linspace(-1.0, 1.0, columns), indexing="ij")
        xy = jnp.stack([x, y], axis=-1).reshape(-1, 2)
        light = light / jnp.linalg.norm(light)
        return jax.vmap(lambda one: pixel((centres, radii), light, eye, one))(xy).reshape(rows, columns)

    return Built(
        render,
        (
            normal(balls, 3),
            normal(balls, scale=0.2, offset=0.6),
            normal(3, offset=1.0),
            normal(3, scale=0.1, offset=-4.0),
        ),
    )


@program("canny-edges-non-maximum", GROUP)
def _canny(size: Size) -> Built:
    """Canny's detector as image libraries port it: a Gaussian blur, Sobel slopes, non-maximum suppression, hysteresis."""
    b, rows, columns, rounds = pick(size, (16, 720, 1280, 4), (2, 128, 160, 3), (1, 8, 10, 2))
    taps = np.exp(-0.5 * (np.arange(-3, 4) / 1.4) ** 2)
    taps = (taps / taps.sum()).astype(np.float32)
    sobel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32)

    def filtered(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x[..., None], kernel[:, :, None, None], (1, 1), "SAME", dimension_numbers=dims)[
            ..., 0
        ]

    def canny(rgb):
        grey = rgb @ jnp.array([0.299, 0.587, 0.114])
        x = filtered(filtered(grey, taps[:, None]), taps[None, :])
        gx, gy = filtered(x, sobel), filtered(x, sobel.T)
        size_ = jnp.hypot(gx, gy)
        sector = jnp.round(jnp.arctan2(gy, gx) / (jnp.pi / 4)).astype(jnp.int32) % 4
        keep = jnp.zeros(size_.shape, bool)
        for s, (dy, dx) in enumerate([(0, 1), (1, 1), (1, 0), (1, -1)]):
            ahead = jnp.roll(size_, (-dy, -dx), axis=(1, 2))
            behind = jnp.roll(size_, (dy, dx), axis=(1, 2))
            keep = keep | ((sector == s) & (size_ >= ahead) & (size_ >= behind))
        thin = jnp.where(keep, size_, 0.0)
        top = jnp.max(thin, axis=(1, 2), keepdims=True)
        strong, weak = thin > 0.3 * top, thin > 0.1 * top

        def grow(_, edges):
            near = lax.reduce_window(edges.astype(jnp.float32), -jnp.inf, lax.max, (1, 3, 3), (1, 1, 1), "SAME")
            return edges | (weak & (near > 0))

        return lax.fori_loop(0, rounds, grow, strong), thin / (top + 1e-6)

    return Built(canny, (normal(b, rows, columns, 3, scale=0.2, offset=0.5),))
