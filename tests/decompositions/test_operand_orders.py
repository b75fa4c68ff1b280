"""Sums of products element by element with the operand of more rows first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.decompositions import Decomposer
from pallasfuse.device import assumed
from pallasfuse.jaxpr_frontend import flatten
from tests.decompositions.test_decomposer import decomposed


def drawn(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


ROW, COLUMN, MATRIX = drawn(4096), drawn(1024, 1, seed=1), drawn(1024, 4096, seed=2)
SHARED, BATCH = drawn(8, 1, 256), drawn(8, 512, 256, seed=3)
FEW, MANY = drawn(4, 1, 512, seed=4), drawn(1, 512, 512, seed=5)


def written(function, *args, liked=True):
    """Returns the program as it is written where the clock likes everything or nothing, and whether that is otherwise."""
    return decomposed(function, *args, clock=lambda *_: liked)


def first_operands(jaxpr):
    """Returns the shapes of the first operands of products element by element."""
    return [e.invars[0].aval.shape for e in flatten(jaxpr).eqns if e.primitive.name == "mul"]


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda v, w: (v * w).sum(-1), (ROW, MATRIX)),
        (lambda v, w: (v * jax.nn.relu(w)).mean(-1), (ROW, MATRIX)),
        (lambda v, w: (jnp.exp(v) * w).sum(-1), (ROW, MATRIX)),
        (lambda v, w: (jnp.broadcast_to(v, w.shape) * w).sum(-1), (ROW, MATRIX)),
        (lambda v, w: (v * w).sum(-1), (SHARED, BATCH)),
        (lambda v, w: (v * w).sum((0, -1)), (ROW[:256], BATCH)),
        (lambda v, w: (v * w).sum(-1), (FEW, MANY)),
        (lambda v, w: (v * w).sum((0, 2)), (drawn(64, 1, 256), drawn(1, 8, 256))),
        (lambda v, w: (jnp.broadcast_to(jnp.broadcast_to(v, (4, 4096)), (8, 4, 4096)) * w).sum(-1), (ROW, drawn(1, 4, 4096))),
    ],
)  # fmt: skip
def test_the_operand_of_more_rows_comes_first(function, args):
    made, is_changed = written(function, *args)
    before = jax.make_jaxpr(function)(*args)
    assert is_changed and not written(function, *args, liked=False)[1]
    (first,) = {e.invars[1].aval.shape for e in flatten(before).eqns if e.primitive.name == "mul"}
    assert first_operands(made) == [first]


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda v, w: (w * v).sum(-1), (ROW, MATRIX)),
        (lambda v, w: (v * w).sum(0), (ROW, MATRIX)),
        (lambda v, w: (v * w).sum(-1), (COLUMN, MATRIX)),
        (lambda v, w: (v * w).max(-1), (ROW, MATRIX)),
        (lambda v, w: (v * w).sum(-1), (ROW.astype("float16"), MATRIX.astype("float16"))),
        (lambda v, w: (v * w.T).sum(-1), (COLUMN[:, 0], MATRIX)),
        (lambda v, w: (v * jnp.exp(w.T)).sum(-1), (COLUMN[:, 0], MATRIX)),
        (lambda v, w: (v * jnp.broadcast_to(w.T, (2, *w.T.shape))).sum(-1), (COLUMN[:, 0], MATRIX)),
        (lambda v, w: (v * w).sum(-1), (drawn(8, 1, 1), BATCH)),
        (lambda v, w: [(m := v * w).sum(-1), m], (ROW, MATRIX)),
        (lambda v, w: (v * w).sum(-1), (ROW[:16], MATRIX[:16, :16])),
    ],
    ids=["more rows first", "not along neighbours", "one number for a row", "no sum", "half types", "transposed",
         "computed from what is transposed", "repeated after that", "no row", "somebody else reads it", "nobody would see it"],
)  # fmt: skip
def test_what_stays(function, args):
    assert not written(function, *args)[1]


@pytest.mark.parametrize(("platform", "changes"), [("cpu", True), ("gpu", False)])
def test_gpus_read_both_operands_where_they_are(platform, changes):
    shapes = jax.ShapeDtypeStruct((8192,), jnp.float32), jax.ShapeDtypeStruct((32768, 8192), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda v, w: (v * w).sum(-1))(*shapes)
    made = Decomposer(assumed(platform), (), 1.0, lambda *_: True).of(jaxpr)
    assert (made is not jaxpr) == changes
