"""A first tile far from the others: at the frame exp(-|mean|) of that tile every term lost digits, which the repair multiplied."""

import jax.numpy as jnp
import numpy as np

from tests.property.programs import AXIS_NAMES

TILES = tuple((a, 1) for a in AXIS_NAMES)


def arguments():
    x = np.linspace(0.1, 0.9, 13) * [[2e-3], [2e-2], [0.2], [2.0], [200.0]]
    x[:, 0] = 4 * x[:, -1]
    means = np.array([60.0, 85, 87, 88, 740]), np.array([16.0, 14, 12, 10, 9])
    away = [np.outer(m, np.append(1.0, np.full(12, -0.8 / 12))) / x for m in means]
    return [x.astype(np.float32), away[0].astype(np.float32), x.astype(np.float16), away[1].astype(np.float16)]


def fn(x0, x1, x2, x3):
    def of(x, y):
        mean = jnp.mean(x * y, -1, keepdims=True)
        decay = jnp.exp(-jnp.abs(mean))
        sums = jnp.sum(jnp.exp(-jnp.abs(x * y)), -1, keepdims=True)
        return (
            jnp.max(x * decay, -1),
            jnp.min(-x / jnp.exp(jnp.abs(mean)), -1),
            jnp.max((x * decay) ** 2, -1),
            jnp.max((2.0 * x - mean) * decay, -1),
            jnp.max(x * sums, -1),
        )

    return of(x0, x1), of(x2, x3)[:2]
