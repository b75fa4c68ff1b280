"""What stands around an operation in a program, and the forms of products that are chosen by it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallasfuse import device
from pallasfuse.decompositions import Decomposer
from pallasfuse.decompositions.neighbours import Neighbours, neighbours

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")


def around(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jnp.ones(s) for s in shapes)).jaxpr
    (product,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return neighbours(jaxpr)(product)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: x @ w, ((False, False), False)),
        (lambda x, w: jnp.exp(x) @ w, ((True, False), False)),
        (lambda x, w: jnp.sum(jnp.exp(x @ w), -1), ((False, False), True)),
        (lambda x, w: jnp.sum((x @ w).reshape(2, 2, 3), -1), ((False, False), True)),
        (lambda x, w: (x @ w).reshape(2, 2, 3), ((False, False), False)),
        (lambda x, w: (x @ w)[None], ((False, False), False)),
        (lambda x, w: jnp.squeeze(x[None] @ w, 0), ((False, False), False)),
        (lambda x, w: checkpoint_name(x @ w, "kept"), ((False, False), False)),
        (lambda x, w: jnp.copy(x @ w), ((False, False), False)),
        (lambda x, w: jnp.max(checkpoint_name(x @ w, "kept")[None], -1), ((False, False), True)),
        (
            lambda x, w: functools.reduce(lambda y, _: y.reshape(y.shape[::-1]), range(400), x @ w),
            ((False, False), False),
        ),
        (lambda x, w: checkpoint_name(x, "kept") @ w, ((False, False), False)),
        (lambda x, w: lax.stop_gradient(x) @ w, ((False, False), False)),
        (lambda x, w: checkpoint_name(jnp.exp(x), "kept").reshape(4, 5) @ w, ((True, False), False)),
        (lambda x, w: jnp.sort(x @ w), ((False, False), False)),  # takes it whole
        (lambda x, w: (jnp.sum(y := x @ w, -1), y), ((False, False), False)),
        (lambda x, w: (jnp.exp(x) @ w, jnp.exp(x)), ((True, False), False)),
        (lambda x, w: ((y := jnp.exp(x)) @ w, y), ((False, False), False)),  # stored for somebody else, too
        (lambda x, w: jnp.sort(x) @ w, ((False, False), False)),  # stored as it is
    ],
)
def test_what_stands_around_a_product(function, expected):
    assert around(function, (4, 5), (5, 3)) == Neighbours(*expected)


def test_stand_ins_keep_what_is_computed_between_them():
    x, w = (np.random.default_rng(0).standard_normal(s, "float32") for s in ((4, 5), (5, 3)))
    run = Neighbours((True, False), True).around(lambda a, b: [a @ b])
    np.testing.assert_allclose(run(x, w)[0], np.sum(-x @ w, -1), rtol=1e-5)

    def own(a, b):
        return [a @ b]

    assert Neighbours((False, False), False).around(own) is own


def is_padded(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, d) for s, d in arguments)).jaxpr
    found = Decomposer(H100, (), H100.price_error).of(jaxpr)
    return any(e.primitive.name == "pad" for e in found.eqns)


@pytest.mark.parametrize(
    ("dtype", "rows", "summed", "columns", "padded"),
    [
        ("bfloat16", 788, 1024, 50257, True),  # 425 us on an H100; 250 us with longer rows
        ("bfloat16", 4096, 1024, 50257, True),  # 1746; 844
        ("bfloat16", 64, 768, 50257, False),  # 63; 103
        ("bfloat16", 2048, 768, 50304, False),  # has whole rows
        ("float32", 4096, 1024, 50257, True),  # 3172; 1635
    ],
)
def test_rows_are_made_longer_where_that_takes_less_time(dtype, rows, summed, columns, padded):
    """The largest of each row of a product is asked for: no part of the longer rows is copied."""
    operands = ((rows, summed), dtype), ((summed, columns), dtype)
    assert is_padded(lambda x, w: jnp.max(x @ w, -1), *operands) == padded


def test_longer_rows_count_as_copies_where_they_are_stored():
    operands = ((4096, 1024), "float32"), ((50257, 1024), "float32")
    tied = (((1,), (1,)), ((), ()))
    assert is_padded(lambda x, w: jnp.max(lax.dot_general(x, w, tied), -1), *operands)  # 2,247 us on an H100; 1,535
    assert not is_padded(lambda x, w: lax.dot_general(x, w, tied), *operands)  # 1,907; 1,808
