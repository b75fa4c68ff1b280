"""Programs of geometry, molecules, finance and control, by an author who has seen no plan of the package: a fourth set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight

GROUP = "fourth"


@program("bundle-adjustment-normal-blocks", GROUP)
def _bundle(size: Size) -> Built:
    """A Levenberg step's blocks of bundle adjustment: quaternion cameras with distortion, Jacobians, robust weights, sums."""
    cameras, points, seen = pick(size, (256, 20000, 200000), (16, 400, 2400), (2, 5, 9))

    def rotate(q, x):
        q = q / jnp.linalg.norm(q)
        u, w = q[:3], q[3]
        t = 2.0 * jnp.cross(u, x)
        return x + w * t + jnp.cross(u, t)

    def residual(camera, point, pixel):
        x = rotate(camera[:4], point) + camera[4:7]
        depth = x[2] + 10.0
        xy = x[:2] / jnp.where(jnp.abs(depth) < 1.0, 1.0, depth)
        r2 = jnp.sum(xy**2)
        distortion = 1.0 + r2 * (camera[8] + r2 * camera[9])
        return (1.0 + camera[7]) * distortion * xy - pixel

    def inverse(m):
        a, b, c = m[0], m[1], m[2]
        rows = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)], axis=1)
        return rows / jnp.dot(a, jnp.cross(b, c))

    def step(camera, point, which_camera, which_point, pixel):
        c, p = camera[which_camera], point[which_point]
        r = jax.vmap(residual)(c, p, pixel)
        jc, jp = jax.vmap(jax.jacfwd(residual, argnums=(0, 1)))(c, p, pixel)
        size2 = jnp.sum(r**2, axis=-1)
        w = jnp.where(size2 < 0.25, 1.0, 0.5 / jnp.sqrt(jnp.maximum(size2, 1e-12)))
        jcw, jpw = jc * w[:, None, None], jp * w[:, None, None]
        u = jax.ops.segment_sum(jnp.einsum("nri,nrj->nij", jcw, jc), which_camera, cameras)
        v = jax.ops.segment_sum(jnp.einsum("nri,nrj->nij", jpw, jp), which_point, points)
        gc = jax.ops.segment_sum(jnp.einsum("nri,nr->ni", jcw, r), which_camera, cameras)
        gp = jax.ops.segment_sum(jnp.einsum("nri,nr->ni", jpw, r), which_point, points)
        v_inverse = jax.vmap(inverse)(v + 0.1 * jnp.eye(3))
        cross = jnp.einsum("nri,nrj->nij", jcw, jp)
        y = jnp.einsum("nij,njk->nik", cross, v_inverse[which_point])
        reduced = u - jax.ops.segment_sum(jnp.einsum("nij,nkj->nik", y, cross), which_camera, cameras)
        rhs = gc - jax.ops.segment_sum(jnp.einsum("nij,nj->ni", y, gp[which_point]), which_camera, cameras)
        cost = jnp.sum(jnp.where(size2 < 0.25, 0.5 * size2, 0.5 * (jnp.sqrt(size2 + 1e-12) - 0.25)))
        return cost, reduced, rhs, jnp.einsum("nij,nj->ni", v_inverse, gp)

    arguments = (normal(cameras, 10, scale=0.3), normal(points, 3))
    indices = (integers(seen, below=cameras), integers(seen, below=points, ramp=True))
    return Built(step, (*arguments, *indices, normal(seen, 2, scale=0.3)))


@program("multi-target-kalman-gating", GROUP)
def _tracks(size: Size) -> Built:
    """Frames of a tracker: every track's Kalman filter predicts, gates the detections, takes the nearest and updates."""
    tracks, found, frames = pick(size, (2048, 512, 16), (96, 48, 8), (3, 4, 2))
    dt, gate = 0.1, 9.21
    f = np.eye(6, dtype=np.float32) + np.diag([dt] * 4, 2) + np.diag([dt * dt / 2] * 2, 4)
    f = f.astype(np.float32)
    h = np.eye(2, 6, dtype=np.float32)

    def predict(x, p, q):
        return f @ x, f @ p @ f.T + q * jnp.eye(6)

    def innovation(x, p, z, r):
        s = h @ p @ h.T + r * jnp.eye(2)
        det = s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0]
        s_inverse = jnp.array([[s[1, 1], -s[0, 1]], [-s[1, 0], s[0, 0]]]) / det
        nu = z - h @ x
        d2 = jnp.einsum("ni,ij,nj->n", nu, s_inverse, nu)
        return nu, d2, s_inverse, jnp.log(det)

    def track(x, p, z, q, r):
        x, p = predict(x, p, q)
        nu, d2, s_inverse, logdet = innovation(x, p, z, r)
        best = jnp.argmin(d2)
        hit = d2[best] < gate
        k = p @ h.T @ s_inverse
        i_kh = jnp.eye(6) - k @ h
        x_new = x + k @ nu[best]
        p_new = i_kh @ p @ i_kh.T + r * (k @ k.T)
        score = jnp.where(hit, -0.5 * (d2[best] + logdet) - np.log(2 * np.pi), -3.0)
        return jnp.where(hit, x_new, x), jnp.where(hit, p_new, p), score, hit

    def run(x, detections, log_q, log_r):
        q, r = jnp.exp(log_q), jnp.exp(log_r)

        def frame(carry, z):
            x, p, total, missed = carry
            x, p, score, hit = jax.vmap(track, (0, 0, None, None, None))(x, p, z, q, r)
            missed = jnp.where(hit, 0, missed + 1)
            return (x, p, total + score, missed), x[:, :2]

        p = jnp.broadcast_to(jnp.eye(6), (tracks, 6, 6))
        start = (x, p, jnp.zeros(tracks), jnp.zeros(tracks, jnp.int32))
        (x, p, total, missed), paths = lax.scan(frame, start, detections)
        return x, jnp.trace(p[:, :2, :2], axis1=1, axis2=2), total, missed < 3, paths

    return Built(
        run, (normal(tracks, 6), normal(frames, found, 2, scale=2.0), normal(offset=-3.0), normal(offset=-2.0))
    )


@program("robot-arm-inverse-kinematics", GROUP)
def _arm(size: Size) -> Built:
    """Damped least squares for many poses of a seven-joint arm: Denavit-Hartenberg chains, Jacobians, 6 by 6 systems."""
    poses, rounds = pick(size, (4096, 6), (64, 4), (2, 2))
    alpha = np.array([0, -1, 1, 1, -1, -1, 1]) * np.pi / 2
    offset = np.array([0.333, 0.0, 0.316, 0.0, 0.384, 0.0, 0.107], np.float32)
    length = np.array([0, 0, 0, 0.0825, -0.0825, 0, 0.088], np.float32)
    limit = 2.8

    def link(theta, alpha, a, d):
        ct, st, ca, sa = jnp.cos(theta), jnp.sin(theta), np.cos(alpha), np.sin(alpha)
        return jnp.array(
            [
                [ct, -st, 0.0, a],
                [st * ca, ct * ca, -sa, -d * sa],
                [st * sa, ct * sa, ca, d * ca],
                [0.0, 0.0, 0.0, 1.0],
            ]
        )

    def forward(q):
        pose = jnp.eye(4)
        for i in range(7):
            pose = pose @ link(q[i], alpha[i], length[i], offset[i])
        return pose

    def error(q, target):
        pose = forward(q)
        turn = target[:3, :3] @ pose[:3, :3].T
        skew = 0.5 * jnp.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
        return jnp.concatenate([target[:3, 3] - pose[:3, 3], skew])

    def solve(q, goal):
        target = forward(goal)

        def body(_, q):
            e, j = error(q, target), -jax.jacfwd(error)(q, target)
            y = jax.scipy.linalg.solve(j @ j.T + 0.05 * jnp.eye(6), e, assume_a="pos")
            return jnp.clip(q + j.T @ y, -limit, limit)

        q = lax.fori_loop(0, rounds, body, q)
        return q, jnp.linalg.norm(error(q, target))

    return Built(jax.vmap(solve), (normal(poses, 7, scale=0.7), normal(poses, 7, scale=0.7)))


@program("bonded-force-field-forces", GROUP)
def _bonded(size: Size) -> Built:
    """Energies and forces of chains of atoms: bonds, angles, dihedrals by atan2, impropers, and scaled 1-4 charges."""
    replicas, n = pick(size, (64, 4000), (2, 600), (1, 7))

    def unit(v):
        return v / jnp.sqrt(jnp.sum(v**2, axis=-1, keepdims=True) + 1e-8)

    def dihedral(x, quad):
        a, b, c, d = (x[quad[:, i]] for i in range(4))
        b0, b1, b2 = b - a, c - b, d - c
        n1, n2 = jnp.cross(b0, b1), jnp.cross(b1, b2)
        m = jnp.cross(n1, unit(b1))
        return jnp.arctan2(jnp.sum(m * n2, axis=-1), jnp.sum(n1 * n2, axis=-1) + 1e-6)

    def energy(x, p, order):
        bonds = jnp.stack([order[:-1], order[1:]], axis=1)
        angles = jnp.stack([order[:-2], order[1:-1], order[2:]], axis=1)
        quads = jnp.stack([order[i : n - 3 + i] for i in range(4)], axis=1)
        r = jnp.sqrt(jnp.sum((x[bonds[:, 0]] - x[bonds[:, 1]]) ** 2, axis=-1) + 1e-8)
        bond = jnp.sum(p["k_bond"] * (r - p["r0"]) ** 2)
        u, v = unit(x[angles[:, 0]] - x[angles[:, 1]]), unit(x[angles[:, 2]] - x[angles[:, 1]])
        theta = jnp.arccos(jnp.clip(jnp.sum(u * v, axis=-1), -1 + 1e-5, 1 - 1e-5))
        angle = jnp.sum(p["k_angle"] * (theta - p["theta0"]) ** 2)
        phi = dihedral(x, quads)
        turns = jnp.arange(1, 4, dtype=phi.dtype)
        torsion = jnp.sum(p["k_torsion"] * (1 + jnp.cos(turns * phi[:, None] - p["phase"])))
        improper = jnp.sum(0.5 * (1 - jnp.cos(2 * dihedral(x, quads[:, jnp.array([1, 0, 2, 3])]))))
        r14 = jnp.sqrt(jnp.sum((x[quads[:, 0]] - x[quads[:, 3]]) ** 2, axis=-1) + 1e-2)
        coulomb = jnp.sum(p["charge"][quads[:, 0]] * p["charge"][quads[:, 3]] / r14) * (332.06 / 1.2)
        return bond + angle + torsion + improper + coulomb, (bond, angle, torsion)

    def forces(x, p, order):
        (total, parts), slope = jax.vmap(jax.value_and_grad(energy, has_aux=True), (0, None, None))(x, p, order)
        return total, parts, -slope

    params = {
        "k_bond": normal(n - 1, scale=10.0, offset=300.0),
        "r0": normal(n - 1, scale=0.05, offset=1.5),
        "k_angle": normal(n - 2, scale=5.0, offset=60.0),
        "theta0": normal(n - 2, scale=0.05, offset=1.9),
        "k_torsion": normal(n - 3, 3, scale=0.5),
        "phase": normal(n - 3, 3),
        "charge": normal(n, scale=0.2),
    }
    return Built(forces, (normal(replicas, n, 3, scale=2.0), params, integers(n, below=n, distinct=True)))


@program("protein-fape-lddt-loss-grad", GROUP)
def _protein(size: Size) -> Built:
    """The gradient of a structure loss: frames of a backbone by Gram-Schmidt, clamped aligned errors, smooth lDDT, clashes."""
    b, n = pick(size, (4, 384), (1, 96), (1, 5))

    def frames(x):
        nitrogen, alpha, carbon = x[:, 0], x[:, 1], x[:, 2]
        e1 = carbon - alpha
        e1 = e1 / jnp.sqrt(jnp.sum(e1**2, -1, keepdims=True) + 1e-8)
        v = nitrogen - alpha
        e2 = v - jnp.sum(e1 * v, -1, keepdims=True) * e1
        e2 = e2 / jnp.sqrt(jnp.sum(e2**2, -1, keepdims=True) + 1e-8)
        return jnp.stack([e1, e2, jnp.cross(e1, e2)], axis=-1), alpha

    def local(x):
        rotation, origin = frames(x)
        atoms = x.reshape(-1, 3)
        return jnp.einsum("fij,fai->faj", rotation, atoms[None] - origin[:, None])

    def distances(x):
        return jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, axis=-1) + 1e-8)

    def one(predicted, true, mask):
        pair = mask[:, None] * jnp.repeat(mask, 3)[None, :]
        error = jnp.sqrt(jnp.sum((local(predicted) - local(true)) ** 2, axis=-1) + 1e-4)
        fape = jnp.sum(pair * jnp.minimum(error, 10.0)) / 10.0 / (jnp.sum(pair) + 1e-8)
        dp, dt = distances(predicted[:, 1]), distances(true[:, 1])
        near = (dt < 15.0) * (1.0 - jnp.eye(n)) * mask[:, None] * mask[None, :]
        off = jnp.abs(dp - dt)[..., None]
        score = jnp.mean(jax.nn.sigmoid(jnp.array([0.5, 1.0, 2.0, 4.0]) - off), axis=-1)
        lddt = jnp.sum(near * score, axis=-1) / (jnp.sum(near, axis=-1) + 1e-8)
        apart = jnp.abs(jnp.arange(n)[:, None] - jnp.arange(n)[None, :]) > 2
        clash = jnp.sum(jnp.where(apart, jax.nn.relu(3.0 - dp), 0.0)) / n
        return fape + (1.0 - jnp.sum(mask * lddt) / jnp.sum(mask)) + 0.1 * clash, lddt

    def loss(predicted, true, keep):
        mask = jax.nn.sigmoid(4.0 * keep)
        value, lddt = jax.vmap(one)(predicted, true, mask)
        return jnp.mean(value), lddt

    chain = normal(b, n, 3, 3, scale=8.0)
    return Built(jax.value_and_grad(loss, has_aux=True), (chain, chain, normal(b, n, offset=1.0)))


@program("ray-triangle-nearest-hit", GROUP)
def _rays(size: Size) -> Built:
    """Moller and Trumbore's test of every ray with every triangle, the nearest hit, smooth normals and a light."""
    rays, triangles, vertices = pick(size, (16384, 1024, 600), (512, 96, 60), (5, 4, 5))

    def hit(origin, direction, a, e1, e2):
        p = jnp.cross(direction, e2)
        det = jnp.dot(e1, p)
        small = jnp.abs(det) < 1e-7
        inverse = 1.0 / jnp.where(small, 1.0, det)
        s = origin - a
        u = jnp.dot(s, p) * inverse
        q = jnp.cross(s, e1)
        v = jnp.dot(direction, q) * inverse
        t = jnp.dot(e2, q) * inverse
        inside = ~small & (u >= 0) & (v >= 0) & (u + v <= 1) & (t > 1e-4)
        return jnp.where(inside, t, jnp.inf), u, v

    def shade(vertex, normals, faces, origins, directions, light):
        directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
        a, b, c = (vertex[faces[:, i]] for i in range(3))
        test = jax.vmap(jax.vmap(hit, (None, None, 0, 0, 0)), (0, 0, None, None, None))
        t, u, v = test(origins, directions, a, b - a, c - a)
        which = jnp.argmin(t, axis=1)
        at = jnp.arange(rays)
        t, u, v = t[at, which], u[at, which], v[at, which]
        n0, n1, n2 = (normals[faces[which, i]] for i in range(3))
        normal_ = (1 - u - v)[:, None] * n0 + u[:, None] * n1 + v[:, None] * n2
        normal_ = normal_ / (jnp.linalg.norm(normal_, axis=-1, keepdims=True) + 1e-8)
        found = jnp.isfinite(t)
        point = origins + jnp.where(found, t, 0.0)[:, None] * directions
        to_light = light - point
        far = jnp.linalg.norm(to_light, axis=-1)
        lambert = jnp.abs(jnp.sum(normal_ * to_light, axis=-1)) / (far**3 + 1e-3)
        return jnp.where(found, 0.05 + lambert, 0.0), jnp.where(found, t, 0.0), jnp.where(found, which, -1)

    mesh = (normal(vertices, 3), normal(vertices, 3), integers(triangles, 3, below=vertices))
    return Built(shade, (*mesh, normal(rays, 3, scale=3.0), normal(rays, 3), normal(3, scale=4.0)))


@program("mesh-cotangent-taubin-smoothing", GROUP)
def _mesh(size: Size) -> Built:
    """Taubin's smoothing of a triangle mesh with cotangent weights over the faces, then areas, normals and the volume."""
    vertices, faces, rounds = pick(size, (100_000, 200_000, 6), (1500, 3000, 4), (6, 8, 2))

    def corners(x, face):
        return x[face[:, 0]], x[face[:, 1]], x[face[:, 2]]

    def cotangents(x, face):
        a, b, c = corners(x, face)

        def at(p, q, r):
            u, v = q - p, r - p
            area = jnp.sqrt(jnp.sum(jnp.cross(u, v) ** 2, axis=-1) + 1e-8)
            return jnp.clip(jnp.sum(u * v, axis=-1) / area, 1e-2, 10.0)

        return jnp.stack([at(a, b, c), at(b, c, a), at(c, a, b)], axis=-1)

    def laplacian(x, face, w):
        start = jnp.concatenate([face[:, 1], face[:, 2], face[:, 2], face[:, 0], face[:, 0], face[:, 1]])
        end = jnp.concatenate([face[:, 2], face[:, 1], face[:, 0], face[:, 2], face[:, 1], face[:, 0]])
        each = jnp.concatenate([w[:, 0], w[:, 0], w[:, 1], w[:, 1], w[:, 2], w[:, 2]])
        total = jax.ops.segment_sum(each, start, vertices)
        moved = jax.ops.segment_sum(each[:, None] * (x[end] - x[start]), start, vertices)
        return moved / jnp.maximum(total, 1e-6)[:, None]

    def smooth(x, face):
        w = cotangents(x, face)

        def body(_, x):
            x = x + 0.5 * laplacian(x, face, w)
            return x - 0.53 * laplacian(x, face, w)

        x = lax.fori_loop(0, rounds, body, x)
        a, b, c = corners(x, face)
        normals = jnp.cross(b - a, c - a)
        vertex = jnp.zeros_like(x).at[face.reshape(-1)].add(jnp.repeat(normals, 3, axis=0))
        vertex = vertex / (jnp.linalg.norm(vertex, axis=-1, keepdims=True) + 1e-8)
        area = 0.5 * jnp.sum(jnp.linalg.norm(normals, axis=-1))
        volume = jnp.sum(jnp.sum(a * jnp.cross(b, c), axis=-1)) / 6.0
        return x, vertex, area, volume

    return Built(smooth, (normal(vertices, 3), integers(faces, 3, below=vertices)))


@program("asian-barrier-basket-greeks", GROUP)
def _option(size: Size) -> Built:
    """The price of a basket option with a softened barrier and its Greeks: correlated antithetic paths by cumulative sums."""
    paths, steps, assets = pick(size, (32768, 128, 4), (512, 48, 4), (3, 4, 2))
    dt = np.float32(1.0 / steps)

    def price(market, z):
        vol, rate = jax.nn.softplus(market["vol"]), market["rate"]
        corr = 0.5 * jnp.ones((assets, assets)) + 0.5 * jnp.eye(assets)
        z = jnp.concatenate([z, -z]) @ jnp.linalg.cholesky(corr).T
        moves = (rate - 0.5 * vol**2) * dt + vol * jnp.sqrt(dt) * z
        path = jnp.exp(market["log_spot"] + jnp.cumsum(moves, axis=1))
        basket = path @ jax.nn.softmax(market["weights"])
        average = jnp.mean(basket, axis=1)
        lowest = lax.cummin(basket, axis=1)[:, -1]
        alive = jax.nn.sigmoid((lowest - market["barrier"]) / 0.02)
        discount = jnp.exp(-rate)
        payoff = discount * alive * jax.nn.relu(average - market["strike"])
        control = discount * (basket[:, -1] - jnp.mean(basket[:, -1]))
        beta = lax.stop_gradient(jnp.mean(payoff * control) / (jnp.mean(control**2) + 1e-8))
        payoff = payoff - beta * control
        return jnp.mean(payoff), jnp.std(payoff) / np.sqrt(2 * paths)

    def greeks(market, seed):
        z = jax.random.normal(jax.random.key(seed), (paths, steps, assets))
        return jax.value_and_grad(price, has_aux=True)(market, z)

    market = {
        "log_spot": normal(assets, scale=0.05),
        "vol": normal(assets, scale=0.1, offset=-1.2),
        "weights": normal(assets, scale=0.2),
        "rate": normal(scale=0.01, offset=0.03),
        "strike": normal(scale=0.02, offset=1.0),
        "barrier": normal(scale=0.02, offset=0.7),
    }
    return Built(greeks, (market, integers(below=1000)))


@program("cardiac-aliev-panfilov-tissue", GROUP)
def _cardiac(size: Size) -> Built:
    """Steps of Aliev and Panfilov's heart tissue: anisotropic diffusion with sealed edges, two ions, an electrode's signal."""
    n, steps = pick(size, (1024, 16), (192, 8), (8, 2))
    a, k, mu1, mu2, eps, dt, dx = 0.15, 8.0, 0.2, 0.3, 0.002, 0.02, 0.6
    y, x = np.mgrid[:n, :n].astype(np.float32)
    lead = 1.0 / np.sqrt((x - n / 2) ** 2 + (y + 5.0) ** 2 + 9.0)

    def diffusion(u, dxx, dyy, dxy):
        p = jnp.pad(u, 1, mode="edge")
        xx = p[1:-1, 2:] - 2 * u + p[1:-1, :-2]
        yy = p[2:, 1:-1] - 2 * u + p[:-2, 1:-1]
        xy = (p[2:, 2:] - p[2:, :-2] - p[:-2, 2:] + p[:-2, :-2]) / 4
        return (dxx * xx + dyy * yy + 2 * dxy * xy) / dx**2

    def run(u, v, angle, scar):
        u, v = jnp.clip(u, 0.0, 1.0), jnp.abs(v)
        c, s = jnp.cos(angle), jnp.sin(angle)
        alive = jnp.where(scar > 1.5, 0.0, 1.0)
        dxx, dyy, dxy = 0.25 + 0.75 * c**2, 0.25 + 0.75 * s**2, 0.75 * c * s

        def step(state, _):
            u, v = state
            spread = diffusion(u, dxx * alive, dyy * alive, dxy * alive)
            rate = eps + mu1 * v / (u + mu2)
            du = spread - k * u * (u - a) * (u - 1) - u * v
            dv = -rate * (v + k * u * (u - a - 1))
            u = jnp.clip(u + dt * du, 0.0, 1.2)
            return (u, v + dt * dv), jnp.sum(lead * spread)

        (u, v), signal = lax.scan(step, (u, v), None, length=steps)
        return u, v, signal

    field = normal(n, n, scale=0.4)
    return Built(run, (field, field, normal(n, n, scale=0.3), normal(n, n)))


@program("crf-tagger-viterbi-loss-grad", GROUP)
def _crf(size: Size) -> Built:
    """A tagger's conditional random field: the gradient of its loss over padded sentences, and the best path of each."""
    b, t, tags, d = pick(size, (64, 96, 32, 768), (16, 48, 12, 64), (2, 4, 3, 5))
    dtype = half(size)

    def emissions(p, x):
        return (x @ p["kernel"]).astype(jnp.float32) + p["bias"]

    def nll(p, x, tag, length):
        scores = emissions(p, x)
        mask = jnp.arange(t) < length
        path = jnp.take_along_axis(scores, tag[:, None], axis=1)[:, 0]
        moves = p["transition"][tag[:-1], tag[1:]]
        gold = p["start"][tag[0]] + jnp.sum(path * mask) + jnp.sum(moves * mask[1:]) + p["end"][tag[length - 1]]

        def forward(alpha, xs):
            score, keep = xs
            new = jax.nn.logsumexp(alpha[:, None] + p["transition"], axis=0) + score
            return jnp.where(keep, new, alpha), None

        alpha, _ = lax.scan(forward, p["start"] + scores[0], (scores[1:], mask[1:]))
        return jax.nn.logsumexp(alpha + p["end"]) - gold

    def viterbi(p, x, length):
        scores = emissions(p, x)
        mask = jnp.arange(1, t) < length

        def forward(best, xs):
            score, keep = xs
            through = best[:, None] + p["transition"]
            new = jnp.max(through, axis=0) + score
            back = jnp.where(keep, jnp.argmax(through, axis=0), jnp.arange(tags))
            return jnp.where(keep, new, best), back

        best, backs = lax.scan(forward, p["start"] + scores[0], (scores[1:], mask))
        last = jnp.argmax(best + p["end"])
        first, tail = lax.scan(lambda at, back: (back[at], at), last, backs, reverse=True)
        return jnp.concatenate([first[None], tail])

    def loss(p, x, tag, length):
        length = jnp.maximum(length, 1)
        value = jnp.mean(jax.vmap(nll, (None, 0, 0, 0))(p, x, tag, length))
        decoded = jax.vmap(viterbi, (None, 0, 0))(p, x, length)
        right = (decoded == tag) & (jnp.arange(t) < length[:, None])
        return value, (decoded, jnp.sum(right) / jnp.sum(length))

    params = {"kernel": weight(d, tags, dtype=dtype), "bias": normal(tags, scale=0.1), "start": normal(tags)}
    params |= {"end": normal(tags), "transition": normal(tags, tags, scale=0.5)}
    arguments = (params, normal(b, t, d, dtype=dtype), integers(b, t, below=tags), integers(b, below=t + 1))
    return Built(jax.value_and_grad(loss, has_aux=True), arguments)
