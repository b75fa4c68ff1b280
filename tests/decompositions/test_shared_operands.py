"""Products that share an operand, in groups that XLA merges without copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse import device
from pallasfuse.decompositions import Decomposer
from pallasfuse.decompositions.shared_operands import MOST_MERGED, in_groups

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def every(x, *weights):
    y = jnp.tanh(x)
    return [jax.nn.relu(y @ w) for w in weights]


def grouped(function, *arguments, may=lambda eqn: True):
    return in_groups(jax.make_jaxpr(function)(*arguments).jaxpr, may, H100)


def shared(jaxpr):
    """The operands of products that others have, too, each with how many."""
    left = [e.invars[0] for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return sorted(left.count(v) for v in dict.fromkeys(left))


@pytest.mark.parametrize(("products", "groups"), [(4, [4]), (12, [4, 4, 4]), (14, [2, 4, 4, 4])])
def test_at_most_four_products_share_an_operand(products, groups):
    assert shared(grouped(every, struct(24, 1536), *[struct(1536, 1024)] * products)) == groups


def test_groups_compute_what_all_did():
    draw = np.random.default_rng(0).standard_normal
    arguments = [jnp.asarray(draw(s), "float32") for s in [(3, 512), *[(512, 512)] * 9]]
    found = grouped(every, *arguments)
    assert shared(found) == [1, 4, 4]
    for one, other in zip(jax.core.eval_jaxpr(found, [], *arguments), every(*arguments), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (every, [struct(24, 64), *[struct(64, 64)] * 12]),  # copies take no time
        (every, [struct(24, 4096), *[struct(4096, 8192)] * 6]),  # products that are too large to be merged
        (lambda x, *w: [x[n] @ v for n, v in enumerate(w)], [struct(12, 24, 1536), *[struct(1536, 1024)] * 12]),
        (lambda x, *w: [jnp.einsum("btk,bkn->btn", x, v) for v in w], [struct(2, 9, 512), *[struct(2, 512, 512)] * 12]),
    ],
    ids=["small", "large", "apart", "batches"],
)
def test_other_products_stay_as_they_are(function, arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    assert in_groups(jaxpr, lambda eqn: True, H100) is jaxpr


def test_what_the_user_leaves_to_xla_is_in_no_group():
    arguments = [struct(24, 1536), *[struct(1536, 1024)] * 12]
    left = grouped(every, *arguments, may=lambda eqn: False)
    assert shared(left) == [12]


def test_bodies_of_loops_are_grouped_on_a_gpu_only():
    def loop(x, *weights):
        return jax.lax.fori_loop(0, 5, lambda n, x: sum(every(x, *weights)), x)

    jaxpr = jax.make_jaxpr(loop)(struct(24, 1024), *[struct(1024, 1024)] * (2 * MOST_MERGED))
    for on, count in ((H100, 1), (device.assumed("cpu"), 0)):
        assert str(Decomposer(on, (), on.price_error).of(jaxpr)).count("optimization_barrier") == count
