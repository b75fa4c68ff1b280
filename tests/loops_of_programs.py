"""Loops that users write, by name: each with a state that the next trip needs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


def normal(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def words(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32))


def moving_average(first, x):
    def trip(state, row):
        count, mean = state
        mean = mean + (row - mean) / (count + 1).astype(jnp.float32)
        return (count + 1, mean), mean

    return jax.lax.scan(trip, (jnp.int32(0), first), x)


def selective_state_space(a, h, x, dt, b, c):
    def trip(h, row):
        x, dt, b, c = row
        h = jnp.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None, :]
        return h, jnp.sum(h * c[:, None, :], -1)

    return jax.lax.scan(trip, h, (x, dt, b, c))


def delta_rule(s, k, v, beta, decay):
    def trip(s, row):
        k, v, beta, decay = row
        s = decay[..., None] * s
        error = v - jnp.einsum("bhij,bhi->bhj", s, k)
        s = s + beta[..., None, None] * k[..., :, None] * error[..., None, :]
        return s, jnp.einsum("bhij,bhi->bhj", s, k)

    return jax.lax.scan(trip, s, (k, v, beta, decay))


def forward_algorithm(transitions, alpha, emissions, valid):
    def trip(alpha, row):
        emission, valid = row
        new = jax.nn.logsumexp(alpha[:, :, None] + transitions, axis=1) + emission
        return jnp.where(valid[:, None], new, alpha), alpha

    return jax.lax.scan(trip, alpha, (emissions, valid), reverse=True)


def best_paths(transitions, alpha, emissions):
    def trip(alpha, emission):
        scores = alpha[:, :, None] + transitions
        return scores.max(1) + emission, jnp.argmax(scores, 1)

    return jax.lax.scan(trip, alpha, emissions)


def recurrent_network(w, h, x):
    def trip(h, row):
        h = jnp.tanh(h @ w + row)
        return h, h

    return jax.lax.scan(trip, h, x)


def two_layers(w, v, x):
    """A state that two matrices turn in every trip."""
    return jax.lax.scan(lambda s, _: (s + 0.1 * jnp.tanh(jnp.tanh(s @ w) @ v), None), x, length=32)[0]


def gated_unit(w, h, x):
    def trip(h, row):
        update, reset, new = jnp.split(row, 3, -1)
        old_update, old_reset, old_new = jnp.split(h @ w, 3, -1)
        z, r = jax.nn.sigmoid(update + old_update), jax.nn.sigmoid(reset + old_reset)
        h = (1 - z) * jnp.tanh(new + r * old_new) + z * h
        return h, h

    return jax.lax.scan(trip, h, x)


def edit_distance(row, costs):
    """One row of the table after the other, all but the dependence along a row."""

    def trip(row, cost):
        shifted = jnp.concatenate([jnp.full((row.shape[0], 1), 1e4), row[:, :-1]], 1)
        new = jnp.minimum(row + 1, shifted + cost)
        return new, new[:, -1]

    return jax.lax.scan(trip, row, costs)


def discounted_backwards(last, rewards, done):
    def trip(value, row):
        reward, done = row
        value = reward + 0.99 * jnp.where(done, 0.0, value)
        return value, value

    return jax.lax.scan(trip, last, (rewards, done), reverse=True)


def row_search(x, target):
    """Bisection for the temperature at which each row has an entropy: whole rows stay in the kernel."""

    def trip(ends, _):
        low, high = ends
        middle = 0.5 * (low + high)
        p = jax.nn.softmax(x * middle[:, None], -1)
        entropy = -jnp.sum(p * jnp.log(p + 1e-9), -1)
        below = entropy < target
        return (jnp.where(below, low, middle), jnp.where(below, middle, high)), None

    rows = x.shape[0]
    return jax.lax.scan(trip, (jnp.zeros(rows), jnp.full(rows, 9.0)), None, length=12)


def states_swap(a, b, x):
    def trip(state, row):
        a, b = state
        return (b + row, a * 0.5), a - b

    return jax.lax.scan(trip, (a, b), x)


def states_rotate(a, b, c, x):
    """What a trip hands on of two states is what it was handed of others."""

    def trip(state, row):
        a, b, c = state
        return (b, c, a * row), a - b

    return jax.lax.scan(trip, (a, b, c), x)


def each_row(scale, x):
    """A map: no trip needs another one."""
    return jax.lax.map(lambda row: jax.nn.softmax(row * scale) @ row.T, x)


def repeated(x):
    return jax.lax.fori_loop(0, 9, lambda _, x: jnp.cos(x) * 0.5 + x[:, ::-1] * 0.25, x)


def turned(x, rows):
    return jax.lax.scan(lambda x, row: (jnp.sin(x.T) + row, x[0]), x, rows)


def farthest_points(points):
    """Each cloud's points, of which each is the farthest from all that were taken before."""

    def of_cloud(points):
        def trip(k, state):
            apart, at, taken = state
            apart = jnp.minimum(apart, jnp.sum(jnp.square(points - points[at]), -1))
            return apart, jnp.argmax(apart).astype(jnp.int32), taken.at[k].set(at)

        begin = jnp.full(points.shape[0], jnp.inf), jnp.int32(3), jnp.full(6, -1, jnp.int32)
        return jax.lax.fori_loop(0, 6, trip, begin)

    return jax.vmap(of_cloud)(points)


def joined_groups(one, two, length):
    """Groups that edges join one after the other, unless they are long."""

    def trip(k, group):
        low, high = jnp.minimum(group[one[k]], group[two[k]]), jnp.maximum(group[one[k]], group[two[k]])
        return jnp.where((group == high) & (length[k] < 1.0), low, group)

    return jax.lax.fori_loop(0, one.shape[0], trip, jnp.arange(9))


def filtered_tracks(mean, spread, seen):
    """A Kalman filter of tracks with three coordinates, of which two are seen."""
    move, noise = jnp.eye(3) + 0.1 * jnp.eye(3, k=1), 0.1 * jnp.eye(3)

    def trip(state, y):
        mean, spread = state
        mean, spread = jnp.einsum("ij,bj->bi", move, mean), move @ spread @ move.T + noise
        of_seen = spread[:, :2, :2] + 0.2 * jnp.eye(2)
        gain = jnp.swapaxes(jnp.linalg.solve(of_seen, spread[:, :2]), -1, -2)
        mean = mean + jnp.einsum("bij,bj->bi", gain, y - mean[:, :2])
        return (mean, spread - gain @ spread[:, :2]), mean

    return jax.lax.scan(trip, (mean, spread), seen)


def newton_steps(x, matrix, right):
    def trip(x, _):
        left = jnp.einsum("bij,bj->bi", matrix, x) + x**3 - right
        slope = matrix + 3 * x[:, :, None] ** 2 * jnp.eye(x.shape[-1])
        return x - jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(slope), True), left[..., None])[..., 0], None

    return jax.lax.scan(trip, x, None, length=5)[0]


def positive(seed: int, *shape: int) -> Array:
    x = normal(seed, *shape, shape[-1])
    return x @ jnp.swapaxes(x, -1, -2) + jnp.eye(shape[-1])


def mixed_words(words, constants):
    def turn(x, n):
        return (x >> n) | (x << (32 - n))

    def trip(state, constant):
        a, b, c, d = state
        first = d + (turn(a, 6) ^ turn(a, 11) ^ turn(a, 25)) + ((a & b) ^ (~a & c)) + constant
        return (first, a, b + first, c ^ (a >> 3)), first << 1

    return jax.lax.scan(trip, tuple(words), constants)


LOOPS: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    "moving_average": (moving_average, (normal(0, 5, 37), normal(1, 20, 5, 37))),
    "selective_state_space": (selective_state_space, (
        -jnp.exp(normal(0, 24, 5)), normal(1, 3, 24, 5), normal(2, 9, 3, 24), jnp.exp(normal(3, 9, 3, 24)), normal(4, 9, 3, 5),
        normal(5, 9, 3, 5),
    )),
    "delta_rule": (delta_rule, (
        normal(0, 2, 3, 8, 6), normal(1, 7, 2, 3, 8, scale=0.3), normal(2, 7, 2, 3, 6), jax.nn.sigmoid(normal(3, 7, 2, 3)),
        jax.nn.sigmoid(normal(4, 7, 2, 3, 8)),
    )),
    "mixed_words": (mixed_words, (words(0, 4, 3, 24), words(1, 12))),
    "forward_algorithm": (forward_algorithm, (normal(0, 10, 10), normal(1, 4, 10), normal(2, 12, 4, 10), normal(3, 12, 4) > 0)),
    "best_paths": (best_paths, (normal(0, 6, 6), normal(1, 3, 6), normal(2, 11, 3, 6))),
    "recurrent_network": (recurrent_network, (normal(0, 12, 12, scale=0.2), normal(1, 5, 12), normal(2, 8, 5, 12))),
    "gated_unit": (gated_unit, (normal(0, 9, 27, scale=0.2), normal(1, 4, 9), normal(2, 8, 4, 27))),
    "edit_distance": (edit_distance, (normal(0, 4, 13), normal(1, 10, 4, 13))),
    "discounted_backwards": (discounted_backwards, (normal(0, 33), normal(1, 15, 33), normal(2, 15, 33) > 1)),
    "row_search": (row_search, (normal(0, 7, 19), 1.0 + normal(1, 7, scale=0.1))),
    "each_row": (each_row, (normal(0, 4), normal(1, 6, 3, 4))),
    "turned": (turned, (normal(0, 6, 6), normal(1, 5, 6, 6))),
    "repeated": (repeated, (normal(0, 5, 7),)),
    "states_swap": (states_swap, (normal(0, 6), normal(1, 6), normal(2, 9, 6))),
    "farthest_points": (farthest_points, (normal(0, 3, 11, 3),)),
    "joined_groups": (joined_groups, (jnp.asarray([0, 3, 8, 8, 5, 1]), jnp.asarray([2, 8, 1, 0, 4, 6]), jnp.abs(normal(0, 6)))),
    "states_rotate": (states_rotate, (normal(0, 6), normal(1, 6), normal(2, 6), normal(3, 8, 6))),
    "two_layers": (two_layers, (normal(0, 32, 32, scale=0.2), normal(1, 32, 32, scale=0.2), normal(2, 48, 32))),
}  # fmt: skip

WITH_SYSTEMS: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    "filtered_tracks": (filtered_tracks, (normal(0, 7, 3), positive(1, 7, 3), normal(2, 6, 7, 2))),
    "newton_steps": (newton_steps, (normal(0, 6, 4, scale=0.3), positive(1, 6, 4), normal(2, 6, 4))),
}
"""Loops that solve small systems of equations in each trip."""


def noisy_steps(key, x):
    """Steps of a process with noise of two kinds, whose key is split in each trip."""

    def trip(state, _):
        key, x = state
        key, first, second = jax.random.split(key, 3)
        x = 0.9 * x + 0.1 * jax.random.normal(first, x.shape) - jax.random.uniform(second, x.shape)
        return (key, x), jnp.sum(x, -1)

    return jax.lax.scan(trip, (key, x), None, length=6)


def steps_with_given_keys(key, x):
    def trip(x, key):
        drawn = jax.random.gumbel(key, x.shape)
        return jnp.where(x + drawn > 0.5, x - 0.25, x + 0.125), jnp.max(x + drawn, -1)

    return jax.lax.scan(trip, x, jax.random.split(key, 6))


def steps_with_numbered_keys(key, x):
    """Walks whose key is made of one key and the number of the trip; walkers jump together and by themselves."""

    def trip(x, n):
        own, together = jax.random.split(jax.random.fold_in(key, n))
        jumps = jax.random.bernoulli(own, 0.3, x.shape) & jax.random.bernoulli(together, 0.6)
        return jnp.where(jumps, -x, x) + 0.25 * jax.random.randint(own, x.shape, 0, 9), jnp.sum(jumps)

    return jax.lax.scan(trip, x, jnp.arange(6))


def chains_with_own_keys(keys, x):
    """Chains that are run side by side, each with a key of its own."""

    def chain(key, x):
        def trip(state, _):
            key, x = state
            key, to_move, to_accept = jax.random.split(key, 3)
            to = x + jax.random.uniform(to_move, x.shape, minval=-1.0)
            ratio = jnp.exp(0.5 * jnp.sum(x * x - to * to))
            x = jnp.where(jax.random.uniform(to_accept) < ratio, to, x)
            return (key, x), x

        return jax.lax.scan(trip, (key, x), None, length=5)

    return jax.vmap(chain)(keys, x)


WITH_KEYS: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    "noisy_steps": (noisy_steps, (jax.random.key(0), normal(0, 6, 5))),
    "noisy_steps, words": (noisy_steps, (jax.random.PRNGKey(1), normal(0, 6, 5))),
    "steps_with_given_keys": (steps_with_given_keys, (jax.random.key(2), normal(1, 7, 9))),
    "steps_with_numbered_keys": (steps_with_numbered_keys, (jax.random.key(3), normal(2, 6, 5))),
    "chains_with_own_keys": (chains_with_own_keys, (jax.random.split(jax.random.key(4), 6), normal(3, 6, 3))),
}
"""Loops that draw random numbers in each trip."""
