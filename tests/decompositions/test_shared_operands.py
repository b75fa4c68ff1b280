"""Products that share an operand, in groups that XLA merges without copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse import device
from pallasfuse.decompositions import Decomposer
from pallasfuse.decompositions.shared_operands import MOST_MERGED, with_fewer_merges
from pallasfuse.jaxpr_frontend.conversion import convert
from pallasfuse.price.xla import price_xla

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def every(x, *weights):
    y = jnp.tanh(x)
    return [jax.nn.relu(y @ w) for w in weights]


def grouped(jaxpr, may=lambda eqn: True):
    return with_fewer_merges(
        jaxpr.jaxpr, may, H100, lambda part: price_xla(convert(part).program, H100), H100.price_error
    )


def shared(jaxpr):
    """The operands of products that others have, too, each with how many."""
    left = [e.invars[0] for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return sorted(left.count(v) for v in dict.fromkeys(left))


@pytest.mark.parametrize(
    ("rows", "width", "products", "groups"),
    [
        (24, 1024, 4, [4]),  # a kernel reads them where they lie
        (24, 1024, 12, [4, 4, 4]),
        (24, 1024, 14, [2, 4, 4, 4]),
        (2048, 2752, 2, [1, 1]),  # a copy takes longer than what two of the library's products lose
        (2048, 512, 3, [3]),
        (24, 64, 12, [12]),  # copies take no time
        (8192, 1024, 2, [2]),  # XLA does not merge products that are so large
    ],
)
def test_products_share_an_operand_where_merging_them_is_faster(rows, width, products, groups):
    jaxpr = jax.make_jaxpr(every)(struct(rows, 1024), *[struct(1024, width)] * products)
    assert shared(grouped(jaxpr)) == groups


def test_groups_compute_what_all_did():
    draw = np.random.default_rng(0).standard_normal
    arguments = [jnp.asarray(draw(s), "float32") for s in [(3, 1024), *[(1024, 1024)] * 9]]
    found = grouped(jax.make_jaxpr(every)(*arguments))
    assert shared(found) == [1, 4, 4]
    for one, other in zip(jax.core.eval_jaxpr(found, [], *arguments), every(*arguments), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shared_first", [True, False])
def test_operands_are_shared_on_either_side(shared_first):
    def gradients(x, *others):
        pairs = [(x, y) if shared_first else (y, x) for y in others]
        return [jax.lax.dot_general(*pair, (((0,), (0,)), ((), ()))) for pair in pairs]

    jaxpr = jax.make_jaxpr(gradients)(struct(8192, 512), *[struct(8192, 1024)] * 2)
    products = [e for e in grouped(jaxpr).eqns if e.primitive.name == "dot_general"]
    assert len({e.invars[0 if shared_first else 1] for e in products}) == 2
    assert [e.outvars[0].aval for e in products] == [v.aval for v in jaxpr.jaxpr.outvars]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, *w: [x[n] @ v for n, v in enumerate(w)], [struct(12, 24, 1536), *[struct(1536, 1024)] * 12]),
        (lambda x, *w: [jnp.einsum("btk,bkn->btn", x, v) for v in w], [struct(2, 9, 512), *[struct(2, 512, 512)] * 12]),
    ],
    ids=["no operand is shared", "batches"],
)
def test_other_products_stay_as_they_are(function, arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    assert grouped(jaxpr) is jaxpr.jaxpr


def test_equal_products_stay_equal():
    """XLA computes them once; with values of their own they would be computed twice."""

    def twice(x, *weights):
        return [jnp.tanh(x @ w) + n for w in weights for n in range(2)]

    jaxpr = jax.make_jaxpr(twice)(struct(24, 1024), *[struct(1024, 1024)] * 8)
    products = [tuple(e.invars) for e in grouped(jaxpr).eqns if e.primitive.name == "dot_general"]
    assert (len(products), len(set(products))) == (16, 8)
    assert shared(grouped(jaxpr)) == [8, 8]
    (same,) = [
        jax.make_jaxpr(lambda x, w: [jnp.tanh(x @ w) + n for n in range(6)])(struct(24, 1024), struct(1024, 1024))
    ]
    assert grouped(same) is same.jaxpr


def test_products_that_are_computed_from_each_other_are_not_merged_anyway():
    def steps(x, w):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return x

    jaxpr = jax.make_jaxpr(steps)(struct(2048, 1024), struct(1024, 1024))
    assert grouped(jaxpr) is jaxpr.jaxpr


@pytest.mark.parametrize(("rows", "groups"), [(24, [1, 1, 1]), (2048, [3])])
def test_operands_that_are_computed_are_not_stored_to_be_merged(rows, groups):
    """A kernel of XLA computes weights of bytes inside of one product, but not of merged ones; the library needs them stored."""
    jaxpr = jax.make_jaxpr(lambda x, *w: [x @ (v.astype(x.dtype) * 0.5) for v in w])(
        struct(rows, 2048), *[struct(2048, 2048, dtype=jnp.int8)] * 3
    )
    assert shared(grouped(jaxpr)) == groups


@pytest.mark.parametrize("function", [lambda x, w: (x @ x.T, x @ w), lambda x, w: (x @ x, x.T @ x, x @ w)])
def test_an_operand_on_both_sides(function):
    arguments = [jnp.asarray(np.random.default_rng(n).standard_normal((64, 64)), "float32") for n in range(2)]
    jaxpr = jax.make_jaxpr(function)(*arguments)
    found = with_fewer_merges(
        jaxpr.jaxpr, lambda eqn: True, H100, lambda part: price_xla(convert(part).program, H100), 0.0
    )
    for one, other in zip(jax.core.eval_jaxpr(found, [], *arguments), function(*arguments), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_the_user_leaves_to_xla_is_in_no_group():
    jaxpr = jax.make_jaxpr(every)(struct(24, 1024), *[struct(1024, 1024)] * 12)
    assert grouped(jaxpr, may=lambda eqn: False) is jaxpr.jaxpr


def test_bodies_of_loops_are_grouped_on_a_gpu_only():
    def loop(x, *weights):
        return jax.lax.fori_loop(0, 5, lambda n, x: sum(every(x, *weights)), x)

    jaxpr = jax.make_jaxpr(loop)(struct(24, 1024), *[struct(1024, 1024)] * (2 * MOST_MERGED))
    for on, count in ((H100, 1), (device.assumed("cpu"), 0)):
        assert str(Decomposer(on, (), on.price_error).of(jaxpr)).count("optimization_barrier") == count
