"""The maps that XLA stores on a CPU, as its own compiler says."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.instruction_fusion import stored
from pallasfuse.price.xla import kernels_on
from pallasfuse.price.xla_buffers import temporary_bytes
from pallasfuse.price.xla_forms import LibraryProduct
from pallasfuse.targets import XLA_CPU

N = 512


def program(function, *shapes):
    return convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))).program


def loops_of(function, *shapes):
    """The loops of a program without reductions, beside its results."""
    of = program(function, *shapes)
    return stored(of.nests, {n.name for n in of.nests}, of.outputs) - set(of.outputs)


def periodic(x):
    """A distance around a box, whose difference is read by two operations of one loop."""
    d = x[:, None] - x[None]
    return d - jnp.round(d / 3.0) * 3.0


def divided_twice(x, y):
    """A division that two results read: too expensive to compute twice."""
    q = x / y
    return q + 1, q * 2


def added_twice(x, y):
    """A sum of two arrays that two results read: both loops may take it, so both compute it."""
    s = x + y
    return s * 2, jnp.exp(s)


def doubled_twice(x):
    """A product with a constant that two results read: it is computed in both loops."""
    s = x * 2
    return s + 1, jnp.exp(s)


def repeated_root(x):
    """A root that a loop would compute once for every column."""
    return jnp.sqrt(x)[:, None] * jnp.ones(N)


def repeated_double(x):
    """A product that a loop computes for every column, as it is cheap."""
    return (x * 2)[:, None] + jnp.ones(N)


def met_again(x, y):
    """A sum of two arrays that two operations of one loop read."""
    s = x + y
    return jnp.maximum(s, 0) + jnp.minimum(s, 1) * 3


def parted_by_a_division(x, y):
    """The same, but something expensive that others need, too, lies on one of the ways."""
    s = x + y
    r = 1 / s
    return r * s, jnp.sin(r)


@pytest.mark.parametrize(("function", "shapes", "loops"), [
    (periodic, [(N,)], 0),
    (divided_twice, [(N, N)] * 2, 1),
    (added_twice, [(N, N)] * 2, 0),
    (doubled_twice, [(N, N)], 0),
    (repeated_root, [(N,)], 1),
    (repeated_double, [(N,)], 0),
    (met_again, [(N, N)] * 2, 0),
    (parted_by_a_division, [(N, N)] * 2, 2),
])  # fmt: skip
def test_a_loop_takes_what_it_may(function, shapes, loops):
    assert len(loops_of(function, *shapes)) == loops


@pytest.mark.parametrize(("function", "shapes", "loops"), [
    (periodic, [(N,)], 1), (divided_twice, [(N, N)] * 2, 3), (doubled_twice, [(N, N)], 2), (repeated_root, [(N,)], 2),
    (repeated_double, [(N,)], 1), (met_again, [(N, N)] * 2, 1), (added_twice, [(N, N)] * 2, 2),
])  # fmt: skip
def test_xla_compiles_as_many_loops(function, shapes, loops):
    text = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()
    lines = text[text.index("ENTRY") :].splitlines()[1:]
    made = [
        line
        for line in lines
        if " = " in line and not any(f" {op}(" in line for op in ("parameter", "constant", "tuple"))
    ]
    assert len(made) == loops


def gradient_of_distances(x):
    def energy(x):
        d = periodic(x)
        r2 = jnp.sum(d * d, -1)
        near = (r2 < 1.0) & (jnp.arange(len(x))[:, None] != jnp.arange(len(x)))
        inverse = 1 / jnp.where(near, jnp.maximum(r2, 0.1), 1.0)
        return jnp.sum(jnp.where(near, inverse**3 * (inverse**3 - 1), 0.0))

    return jax.grad(energy)(x)


def difference_in_two_calls(x, w):
    """Two calls of the library read one difference: neither can keep it to itself."""
    d = x[None] - x[:, None]
    r = jax.lax.rsqrt(jnp.sum(d * d, -1) + 0.1)
    return jnp.sum(w[None, :, None] * d * r[..., None] ** 3, 1)


@pytest.mark.parametrize(("function", "shapes"), [
    (gradient_of_distances, [(N, 3)]), (difference_in_two_calls, [(N, 3), (N,)]),
])  # fmt: skip
def test_the_temporary_memory_is_xla_s(function, shapes):
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    real = jax.jit(function).lower(*structs).compile().memory_analysis().temp_size_in_bytes
    of = program(function, *shapes)
    assert temporary_bytes(kernels_on(XLA_CPU.device, of), of.outputs) == pytest.approx(real, rel=0.1)


def dequantised(scores, values, scale):
    return jnp.max(scores @ (values.astype(jnp.float32) * scale[:, None]), 1)


def test_the_library_converts_bytes_by_itself():
    structs = [
        jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((N, 8 * N), jnp.int8),
        jax.ShapeDtypeStruct((N,), jnp.float32),
    ]  # fmt: skip
    of = convert(jax.make_jaxpr(dequantised)(*structs)).program
    (product,) = (k for k in kernels_on(XLA_CPU.device, of) if isinstance(k, LibraryProduct))
    assert product.written_bytes == 0


def test_long_chains_are_no_recursion():
    def steps(x, y):
        s = x + y
        for _ in range(1500):
            s = s * 1.5 + x
        return s + y

    assert not loops_of(steps, (N,), (N,))
