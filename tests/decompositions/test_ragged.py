"""Products of ragged groups of rows as products of blocks of rows, and when kernels make that faster."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pallasfuse as pf
from pallasfuse.decompositions.ragged import in_blocks
from pallasfuse.index_ranges import index_ranges
from tests.decompositions.test_operations import decomposed
from tests.decompositions.test_windows import drawn


def operands(groups, count, *, k=5, n=3, dtype="float32", whole=True):
    """Rows, matrices and the lengths of groups, some of which have no rows. whole: every row belongs to a group."""
    rng = np.random.default_rng(groups + 7 * count)
    ends = np.sort(rng.integers(0, count + 1, groups))
    ends[-1] = count if whole else ends[-1]
    sizes = np.diff(ends, prepend=0).astype("int32")
    return drawn((count, k)).astype(dtype), drawn((groups, k, n), seed=1).astype(dtype), jnp.asarray(sizes)


@settings(max_examples=12, deadline=None)
@given(groups=st.sampled_from([1, 2, 9]), count=st.sampled_from([1, 37, 150]), whole=st.booleans())
def test_it_is_the_product_of_each_row_with_the_matrix_of_its_group(groups, count, whole):
    x, w, sizes = operands(groups, count, whole=whole)
    found = decomposed(in_blocks, lax.ragged_dot, x, w, sizes)
    group = np.repeat(np.arange(groups), sizes)
    wanted = np.zeros((count, w.shape[-1]))
    wanted[: len(group)] = np.einsum("mk,mkn->mn", np.float64(x[: len(group)]), np.float64(w)[group])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_array_equal(found[len(group) :], 0)


@pytest.mark.parametrize("lengths", [(0, 0, 40), (40, 0, 0), (0, 40, 0), (0, 0, 0), (17, 16, 7)])
def test_groups_without_rows(lengths):
    x, w, _ = operands(3, 40)
    sizes = jnp.asarray(lengths, "int32")
    np.testing.assert_allclose(
        decomposed(in_blocks, lax.ragged_dot, x, w, sizes), lax.ragged_dot(x, w, sizes), atol=1e-5
    )


def test_types_and_gradients():
    x, w, sizes = operands(4, 60, dtype="bfloat16")

    def product(x, w, sizes):
        return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)

    found = decomposed(in_blocks, product, x, w, sizes)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, product(x, w, sizes), atol=1e-5)
    # the gradient of the rows is such a product with turned matrices
    turned = jax.make_jaxpr(jax.grad(lambda x: lax.ragged_dot(x, w, sizes).astype(jnp.float32).sum()))(x)
    equations = [e for e in turned.eqns if e.primitive.name == "ragged_dot_general"]
    assert any(in_blocks(e) is not None for e in equations)


def test_ragged_sums_stay():
    x, w, sizes = operands(4, 60)
    of_matrices = jax.make_jaxpr(jax.grad(lambda w: lax.ragged_dot(x, w, sizes).sum()))(w)
    ragged = [
        e for e in of_matrices.eqns
        if e.primitive.name == "ragged_dot_general"
        and not e.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    ]  # fmt: skip
    assert ragged
    assert all(in_blocks(e) is None for e in ragged)


EXPERTS = [
    jax.ShapeDtypeStruct((1536, 512), "bfloat16"), jax.ShapeDtypeStruct((64, 512, 384), "bfloat16"),
    jax.ShapeDtypeStruct((64,), "int32"),
]  # fmt: skip


def test_a_kernel_reads_the_matrices_where_they_lie():
    plan = pf.fuse(lax.ragged_dot, options=pf.FuseOptions(target="triton", check=False, price=True)).explain(*EXPERTS)
    (kernel,) = [k for k in plan.kernels if any(p.program.lookups for p in k.phases)]
    assert kernel.price.us < kernel.replaced.us / 2


def test_without_a_kernel_it_stays_as_it_is():
    """XLA would write the matrices of all blocks anew."""
    few = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((4096, 512), "bfloat16"), ((2, 512, 384), "bfloat16"), ((2,), "int32"))
    ]
    plan = pf.fuse(lax.ragged_dot, options=pf.FuseOptions(target="triton", check=False, price=True)).explain(*few)
    assert not plan.kernels
    assert "ragged_dot_general" in {e.primitive.name for e in plan.converted.jaxpr.eqns}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_sizes_of_small_types_are_numbers_of_rows(dtype):
    x, w, _ = operands(20, 240)
    sizes = jnp.full(20, 12, dtype)
    np.testing.assert_allclose(
        decomposed(in_blocks, lax.ragged_dot, x, w, sizes), lax.ragged_dot(x, w, sizes.astype("int32")), atol=1e-5
    )


def layer(x, up, down, sizes):
    return lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x, up, sizes)), down, sizes)


def test_a_layer_of_experts_on_a_cpu():
    x, up, sizes = operands(8, 512, k=64, n=128)
    down = drawn((8, 128, 64), seed=2)
    fused = pf.fuse(layer, options=pf.FuseOptions(target="xla", check=False, price=True))
    primitives = {e.primitive.name for e in fused.explain(x, up, down, sizes).converted.jaxpr.eqns}
    assert "ragged_dot_general" not in primitives
    # sums of 128 terms of up to 200 in another order: sixteen units in the last place
    np.testing.assert_allclose(fused(x, up, down, sizes), layer(x, up, down, sizes), rtol=2e-6, atol=1e-4)


def test_integers_of_another_configuration_leave_it_as_it_is():
    x, w, sizes = operands(20, 240, k=256, n=128)
    with jax.enable_x64(True):
        long = jnp.asarray(np.asarray(sizes), "int64")
    fused = pf.fuse(lax.ragged_dot, options=pf.FuseOptions(target="xla", check=False, price=True))
    np.testing.assert_allclose(fused(x, w, long), lax.ragged_dot(x, w, sizes), atol=1e-3)


def test_matrices_that_are_computed_are_not_written_for_every_block():
    def cast(x, w, sizes):
        return lax.ragged_dot(x, w.astype(jnp.bfloat16), sizes)

    x, w, sizes = (
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((256, 2048), "bfloat16"), ((16, 2048, 2048), "float32"), ((16,), "int32"))
    )
    plan = pf.fuse(cast, options=pf.FuseOptions(target="triton", check=False, price=True)).explain(x, w, sizes)
    assert "ragged_dot_general" in {e.primitive.name for e in plan.converted.jaxpr.eqns}


def test_the_plan_names_the_lines_of_the_program():
    plan = pf.fuse(layer, options=pf.FuseOptions(target="triton", check=False, price=True)).explain(
        jax.ShapeDtypeStruct((1536, 512), "bfloat16"), jax.ShapeDtypeStruct((64, 512, 384), "bfloat16"),
        jax.ShapeDtypeStruct((64, 384, 512), "bfloat16"), jax.ShapeDtypeStruct((64,), "int32"),
    )  # fmt: skip
    assert "ragged_dot_general" not in {e.primitive.name for e in plan.converted.jaxpr.eqns}
    assert "test_ragged.py" in plan.text
    assert "ragged.py:" not in plan.text.replace("test_ragged.py:", "")


def test_drawn_sizes_have_about_as_many_rows_as_there_are():
    jaxpr = jax.make_jaxpr(lax.ragged_dot)(*EXPERTS)
    assert index_ranges(jaxpr.eqns, jaxpr.jaxpr.invars) == [None, None, 2 * 1536 // 64 + 1]
