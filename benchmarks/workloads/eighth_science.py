"""A flock of birds and the modes of an image's pixels, both by pairs, of the eighth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, normal, pick, program

GROUP = "eighth"


@program("boids-flock-by-energy-steps", GROUP)
def _boids(size: Size) -> Built:
    """This gives the places and headings of a flock of birds after some steps, by the energy of JAX MD's example of flocking.

    Birds that are near each other avoid each other, turn into one direction, and turn to the middle of the birds they see; they
    avoid round obstacles too. Forces and torques are gradients of this energy in a periodic box.
    """
    birds, obstacles, steps, box = pick(size, (3000, 12, 4, 1600.0), (300, 6, 4, 600.0), (5, 2, 2, 60.0))
    speed, dt, sight, turn = 1.0, 0.1, np.float32(np.cos(np.pi * 0.75)), 0.05

    def heading(angle):
        return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)

    def periodic(apart):
        return jnp.mod(apart + box * 0.5, box) - box * 0.5

    def length(v, axis=-1):
        squared = jnp.sum(v * v, axis=axis)
        return jnp.where(squared > 0.0, jnp.sqrt(jnp.where(squared > 0.0, squared, 1.0)), 0.0)

    def ramp(r, reach, power):
        return jnp.where(r < reach, jnp.maximum(1.0 - r / reach, 0.0) ** power / power, 0.0)

    def energy(place, angle, centre, radius):
        to = heading(angle)
        apart = periodic(place[None, :, :] - place[:, None, :])
        r = length(apart)
        other = ~jnp.eye(birds, dtype=bool)
        avoid = 12.5 * jnp.sum(jnp.where(other, ramp(r, 30.0, 3.0), 0.0))
        unlike = (1.0 - jnp.sum(to[:, None] * to[None, :], axis=-1)) ** 2
        align = 6.0 * jnp.sum(jnp.where(other, ramp(r, 45.0, 2.0) * unlike, 0.0))
        direction = apart / jnp.maximum(r, 1e-6)[..., None]
        seen = other & (r < 40.0) & (jnp.sum(direction * to[:, None], axis=-1) > sight)
        count = jnp.sum(seen, axis=1)
        middle = jnp.sum(jnp.where(seen[..., None], apart, 0.0), axis=1) / jnp.maximum(count, 1)[:, None]
        towards = middle / (length(middle)[:, None] + 1e-3)
        gather = 0.0025 * jnp.sum(jnp.where(count > 0, (1.0 - jnp.sum(towards * to, axis=-1)) ** 2, 0.0))
        away = periodic(centre[None, :, :] - place[:, None, :])
        gap = jnp.maximum(length(away) - radius[None, :], 0.0)
        ahead = jnp.sum(away * to[:, None], axis=-1) > 0.0
        blocked = 1000.0 * jnp.sum(jnp.where(ahead, ramp(gap, 70.0, 3.0), 0.0))
        return 0.5 * (avoid + align) + gather + blocked

    def run(place, angle, centre, radius):
        place, centre, radius = place % box, centre % box, 10.0 + jnp.abs(radius)

        def step(state, _):
            place, angle = state
            value, (force, torque) = jax.value_and_grad(energy, argnums=(0, 1))(place, angle, centre, radius)
            to = heading(angle)
            place = jnp.mod(place + dt * (speed * to - force), box)
            angle = angle - turn * jnp.clip(torque, -10.0, 10.0)
            order = jnp.linalg.norm(jnp.mean(to, axis=0))
            return (place, angle), (value, order)

        return lax.scan(step, (place, angle), None, length=steps)

    spread = box / 2
    flock = (normal(birds, 2, scale=spread), normal(birds, scale=3.0))
    return Built(run, (*flock, normal(obstacles, 2, scale=spread), normal(obstacles, scale=10.0)))


@program("mean-shift-colour-and-place-modes", GROUP)
def _mean_shift(size: Size) -> Built:
    """This gives the mode that each pixel of an image climbs to by Gaussian mean shift in colour and place, to segment it.

    Each step moves every pixel's copy to the mean of all pixels, weighted by a Gaussian of their distance. The results are the
    modes, the density there, and how many other modes are so near that they are the same segment.
    """
    side, colours, steps = pick(size, (80, 3, 5), (22, 3, 5), (3, 2, 2))
    pixels, colour_width, place_width = side * side, 0.35, 0.2

    def squared(x, y):
        return jnp.sum((x[:, None, :] - y[None, :, :]) ** 2, axis=-1)

    def segment(image):
        grid = jnp.linspace(-1.0, 1.0, side)
        rows, columns = jnp.meshgrid(grid, grid, indexing="ij")
        places = jnp.stack([rows, columns], axis=-1) / place_width
        points = jnp.concatenate([places, image / colour_width], axis=-1).reshape(pixels, colours + 2)

        def step(modes, _):
            kernel = jnp.exp(-0.5 * squared(modes, points))
            moved = kernel @ points / jnp.sum(kernel, axis=1, keepdims=True)
            return moved, jnp.max(jnp.sum((moved - modes) ** 2, axis=1))

        modes, shifts = lax.scan(step, points, None, length=steps)
        density = jax.nn.logsumexp(-0.5 * squared(modes, points), axis=1) - np.log(pixels)
        near = jnp.sum(squared(modes, modes) < 1.0, axis=1)
        smooth = modes[:, 2:].reshape(image.shape) * colour_width
        return modes, smooth, density, near, jnp.sqrt(shifts)

    return Built(segment, (normal(side, side, colours, scale=0.5),))
