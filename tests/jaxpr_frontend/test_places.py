"""Places of maxima and minima as nests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.fusion.inline import deduplicate
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.loop_program import External, Nest, as_xla_runs
from pallasfuse.jaxpr_frontend import convert
from tests.programs_by_name import program_of


def test_the_steps_of_a_place():
    assert str(program_of(lambda x: jnp.argmin(x, -1), (5, 7))).splitlines()[1:] == [
        "t0.extreme[i]: float32 min[j:7]= x[i, j]",
        "t0.first[i]: int32 min[j:7]= select(x[i, j] == t0.extreme[i], j, 2147483647)",
        "t0.unknown[i]: int32 min[j:7]= select(x[i, j] != x[i, j], j, 2147483647)",
        "t0[i]: int32 = select(t0.unknown[i] < 2147483647, t0.unknown[i], select(t0.first[i] < 2147483647, t0.first[i], 0))",
        "return t0",
    ]


def test_integers_are_always_numbers():
    loops = convert(jax.make_jaxpr(lambda x: jnp.argmax(x, 0))(np.zeros((5, 7), np.int32))).program
    assert [n.name for n in loops.nests] == ["t0.extreme", "t0.first", "t0"]
    assert not any(n.internal for n in deduplicate(loops).nests if n.name == "t0")


@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_places_are_those_of_numpy(function, axis):
    x = np.random.default_rng(0).integers(-2, 3, (4, 5, 6)).astype("float32")
    x[1, 2, 3], x[0, 0], x[3, :, 1] = np.nan, np.inf, -np.inf
    loops = program_of(lambda x: function(x, axis), x.shape)
    with np.errstate(invalid="ignore"):
        found = evaluate(loops, {"x": x})[loops.outputs[0]]
    np.testing.assert_array_equal(found.reshape(-1), np.asarray(function(x, axis)).reshape(-1))


@pytest.mark.parametrize("x", [np.zeros((5, 7), bool), np.zeros((5, 1), np.float32)], ids=["booleans", "one element"])
def test_what_has_no_steps_is_left_to_xla(x):
    loops = convert(jax.make_jaxpr(lambda x: jnp.argmax(x, -1))(x)).program
    assert not any(n.internal for n in loops.nests if isinstance(n, Nest))


def test_an_extremum_that_the_program_has_as_well_is_the_programs_own():
    loops = deduplicate(program_of(lambda x: (jnp.argmin(x, -1), jnp.min(x, -1)), (5, 7)))
    reductions = [n for n in loops.nests if isinstance(n, Nest) and n.is_reduction]
    assert [(n.name, n.internal) for n in reductions] == [("t1", False), ("t0.first", True), ("t0.unknown", True)]


# --- as XLA runs them


def test_xla_finds_a_place_in_one_pass_on_a_gpu():
    loops = program_of(lambda x: jnp.argmin(x * 2, -1), (5, 7))
    run = {n.name: n for n in as_xla_runs(loops, one_by_one=False).nests}
    assert run["t1"].reads == {"t1.first"}
    assert run["t1.first"].reads == {"t0"}


def test_xla_looks_at_one_element_after_the_other_on_a_cpu():
    loops = program_of(lambda x: jnp.argmin(x * 2, -1), (5, 7))
    last = as_xla_runs(loops, one_by_one=True).nests[-1]
    assert isinstance(last, External)
    assert last.operands == ("t0",)


def test_xla_looks_at_what_is_picked_alone():
    loops = program_of(lambda x, i: jnp.take_along_axis(x, i[:, None].astype(int), 1), (5, 7), (5,))
    (picked,) = [n for n in as_xla_runs(loops, one_by_one=False).nests if isinstance(n, Nest) and n.picks]
    assert [a.extent for a in picked.reduced] == [1]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_xla_runs_is_run_as_it_is(one_by_one):
    loops = program_of(
        lambda x, i: (jnp.argmin(x * 2, -1), jnp.take_along_axis(x, i[:, None].astype(int), 1)), (5, 7), (5,)
    )
    once = as_xla_runs(loops, one_by_one=one_by_one)
    assert as_xla_runs(once, one_by_one=one_by_one) == once


def test_a_program_without_either_is_the_same():
    loops = program_of(lambda x: jnp.max(x, -1), (5, 7))
    assert as_xla_runs(loops, one_by_one=False) is loops
