"""Small systems of equations as loops over columns, against the libraries' own results."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions import systems
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.loop_calls import loops_as_kernels
from pallasfuse.recurrences import InLoops
from pallasfuse.targets import TRITON

RNG = np.random.default_rng(0)
BATCHES = [((), 2), ((), 7), ((5,), 3), ((2, 3), 4), ((4,), 16)]
LOOPS = {"scanned": systems._scanned, "in turn": systems._in_turn}


def matrices(batch, size):
    return jnp.asarray(RNG.normal(size=(*batch, size, size)), jnp.float32)


def positive(batch, size):
    a = matrices(batch, size)
    return a @ jnp.swapaxes(a, -1, -2) + 0.5 * jnp.eye(size)


def factor(a):
    return lax.linalg.cholesky(a, symmetrize_input=False)


def written(function, *args, loop=systems._scanned):
    """What the loop makes of the only system of a function."""
    jaxpr = jax.make_jaxpr(function)(*args)
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name in systems.RULES)
    run = systems.RULES[eqn.primitive.name](eqn, loop)
    return None if run is None else run(*args)


def close(got, want, tolerance=3e-5):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * float(jnp.abs(want).max()))


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("batch,size", BATCHES)
def test_factors_are_those_of_the_library(batch, size, loop):
    a = positive(batch, size)
    (got,) = written(factor, a, loop=LOOPS[loop])
    close(jnp.tril(got), jnp.tril(factor(a)))


def test_what_is_not_positive_has_no_factor():
    a = jnp.stack([positive((), 4), -positive((), 4), positive((), 4).at[3, 3].set(-1.0)])
    (got,) = written(factor, a)
    assert jnp.isnan(got[1:]).all()
    assert not jnp.isnan(got[0]).any()


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("batch,size", BATCHES)
def test_triangles_and_the_order_of_rows_are_those_of_the_library(batch, size, loop):
    a = matrices(batch, size)
    (triangles, pivots, order), want = written(lax.linalg.lu, a, loop=LOOPS[loop]), lax.linalg.lu(a)
    close(triangles, want[0])
    np.testing.assert_array_equal(pivots, want[1])
    np.testing.assert_array_equal(order, want[2])


def test_of_equal_rows_the_first_is_chosen():
    a = jnp.asarray(RNG.choice([-1.0, 1.0], size=(64, 5, 5)), jnp.float32)
    for got, want in zip(written(lax.linalg.lu, a), lax.linalg.lu(a), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_singular_matrices_and_those_with_nan():
    singular = jnp.zeros((4, 4)).at[0, 1].set(1.0)
    for got, want in zip(written(lax.linalg.lu, singular), lax.linalg.lu(singular), strict=True):
        np.testing.assert_array_equal(got, want)
    triangles, _, order = written(lax.linalg.lu, matrices((), 4).at[2, 1].set(jnp.nan))
    assert jnp.isnan(triangles).any()
    assert sorted(order.tolist()) == [0, 1, 2, 3]


WAYS = list(itertools.product([True, False], repeat=4))


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("left_side,lower,transpose_a,unit_diagonal", WAYS)
@pytest.mark.parametrize("batch,size", [((), 3), ((2, 3), 6)])
def test_triangular_systems_are_solved(batch, size, left_side, lower, transpose_a, unit_diagonal, loop):
    a = matrices(batch, size) + 4 * jnp.eye(size)
    b = jnp.asarray(RNG.normal(size=(*batch, size, 2) if left_side else (*batch, 2, size)), jnp.float32)

    def solve(a, b):
        return lax.linalg.triangular_solve(
            a, b, left_side=left_side, lower=lower, transpose_a=transpose_a, unit_diagonal=unit_diagonal
        )

    (got,) = written(solve, a, b, loop=LOOPS[loop])
    close(got, solve(a, b), 2e-4)


def test_what_a_right_side_lacks_is_not_made():
    """An infinity in the other half of the matrix, and one in an unknown that is not known yet, are in no sum."""
    a = jnp.asarray([[2.0, jnp.inf], [1.0, 4.0]])
    solve = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    for b in (jnp.asarray([[2.0], [3.0]]), jnp.asarray([[2.0], [jnp.inf]])):
        np.testing.assert_array_equal(written(solve, a, b)[0], solve(a, b))


@pytest.mark.parametrize("of", [jnp.zeros((65, 65)), jnp.zeros((4, 4), jnp.complex64), jnp.zeros((1, 1)),
                                jnp.zeros((0, 4, 4))], ids=["large", "complex", "a number", "none"])  # fmt: skip
def test_others_are_left_to_the_library(of):
    assert written(lax.linalg.lu, of) is None


def test_a_matrix_that_is_not_square_is_left_to_the_library():
    assert written(lax.linalg.lu, jnp.zeros((5, 3))) is None


def solved(a, b):
    return jnp.linalg.solve(a, b)


def test_systems_of_few_rows_are_written_out_and_others_stay():
    a, b = matrices((6,), 4) + 3 * jnp.eye(4), matrices((6,), 4)
    flat = flatten(jax.make_jaxpr(solved)(a, b))
    made = systems.in_columns(flat)
    assert not {"lu", "triangular_solve", "scan"} & {e.primitive.name for e in made.eqns}
    assert not made.consts
    (got,) = _compat.eval_jaxpr(made, made.consts, a, b)
    close(got, solved(a, b), 1e-4)
    large = flatten(jax.make_jaxpr(solved)(matrices((6,), 16), matrices((6,), 16)))
    assert systems.in_columns(large) is large


@pytest.mark.parametrize("name", sorted(systems.RULES))
@pytest.mark.parametrize("size", [2, 5, 24])
def test_each_becomes_one_kernel(name, size):
    of = {"lu": lax.linalg.lu, "cholesky": factor,
          "triangular_solve": lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True)}[name]  # fmt: skip
    args = (positive((7,), size), matrices((7,), size))[: 2 if name == "triangular_solve" else 1]
    jaxpr = jax.make_jaxpr(of)(*args)
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == name)
    rule = InLoops(TRITON.device, shortest=systems.FEWEST_ROWS, way=systems.RULES[name])
    run = rule(eqn)
    assert run is not None
    made = jax.make_jaxpr(run)(*args)
    (kernel,) = loops_as_kernels(made)
    assert kernel.trips == size


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", sorted(systems.RULES))
def test_types_are_those_of_the_library_where_64_bits_are_on(name):
    of = {"lu": lax.linalg.lu, "cholesky": factor,
          "triangular_solve": lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True)}[name]  # fmt: skip
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):
            a = positive((3,), 4).astype(dtype)
            args = (a, a)[: 2 if name == "triangular_solve" else 1]
            for loop in LOOPS.values():
                got, want = jax.tree.leaves(written(of, *args, loop=loop)), jax.tree.leaves(of(*args))
                assert [x.dtype for x in got] == [x.dtype for x in want]
