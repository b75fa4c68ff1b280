"""Concatenations as choices between padded arrays, and when that is faster."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from benchmarks import xla_alone
from pallasfuse.decompositions import Decomposer, joins
from pallasfuse.device import find
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import price_xla
from tests.decompositions.test_operations import decomposed
from tests.decompositions.test_windows import drawn

H100 = find("NVIDIA H100 80GB HBM3", "gpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "xla_alone_h100.json"


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    axis=st.integers(0, 2),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "uint32", "bool", "complex64"]),
)
def test_a_choice_is_exact(part, lengths, axis, dtype):
    shapes = [[n if d == axis else d + 2 for d in range(3)] for n in lengths]
    arrays = [(100 * drawn(shape, seed=n)).astype(dtype) for n, shape in enumerate(shapes)]
    arrays[0] = arrays[0].at[0].set(-0.0 if dtype in ("float32", "bfloat16") else 1)
    found = decomposed(joins.choice, lambda *a: jnp.concatenate(a, axis), *arrays)
    wanted = np.concatenate(arrays, axis)
    np.testing.assert_array_equal(found, wanted, strict=True)
    if wanted.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize(
    ("shapes", "dtype"), [([(2, 3)] * 5, "float32"), ([(2, 0), (2, 3)], "float32"), ([(2, 3)] * 2, "key<fry>")]
)
def test_other_joins_stay(shapes, dtype):
    structs = [jax.ShapeDtypeStruct(s, jax.random.key(0).dtype if "key" in dtype else dtype) for s in shapes]
    (eqn,) = jax.make_jaxpr(lambda *a: lax.concatenate(a, 1))(*structs).eqns
    assert joins.choice(eqn) is None


MEASURED = [
    ((16384,), (1, 26), (128,), "bfloat16", 257.2, 80.1),
    ((16384,), (13, 14), (128,), "bfloat16", 139.6, 79.7),
    ((16384,), (16, 16), (128,), "bfloat16", 89.2, 94.0),
    ((16384,), (1, 26), (128,), "float32", 258.1, 151.5),
    ((16384,), (2, 24), (64,), "bfloat16", 60.4, 40.0),
    ((64,), (1, 576), (1024,), "bfloat16", 178.5, 54.4),
    ((32,), (1000, 48), (1024,), "bfloat16", 47.2, 50.1),
    ((16384,), (128, 351), (), "bfloat16", 28.1, 10.5),
    ((8,), (3, 64), (128, 128), "float32", 40.8, 24.5),
    ((100000,), (100, 100, 100), (), "float32", 84.1, 83.4),
]
"""What XLA took on an H100 for a concatenation, and for the choice, in microseconds."""


@pytest.mark.parametrize(("before", "lengths", "behind", "dtype", "joined_us", "chosen_us"), MEASURED)
def test_the_price_knows_what_lengths_cost(before, lengths, behind, dtype, joined_us, chosen_us):
    structs = [jax.ShapeDtypeStruct((*before, n, *behind), dtype) for n in lengths]
    jaxpr = jax.make_jaxpr(lambda *a: jnp.concatenate(a, len(before)))(*structs)
    chosen = jax.make_jaxpr(joins.choice(jaxpr.eqns[0]))(*structs)
    for one, measured in ((jaxpr, joined_us), (chosen, chosen_us)):
        assert price_xla(convert(flatten(one)).program, H100).us == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("gathered", "joined"), [(True, True), (False, False)])
def test_rows_that_gathers_take_are_priced_with_them(gathered, joined):
    """A choice finds the rows of both for each element: 107 us on an H100, the concatenation 92; of arrays 75 and 92."""

    def function(x, y, column, i, j):
        pair = (x[i], y[j]) if gathered else (x, y)
        return jnp.concatenate([*pair, column], axis=1)

    rows = jax.ShapeDtypeStruct((9001 if gathered else 150_000, 128), "bfloat16")
    places = jax.ShapeDtypeStruct((150_000,), "int32")
    jaxpr = jax.make_jaxpr(function)(rows, rows, jax.ShapeDtypeStruct((150_000, 1), "bfloat16"), places, places)
    made = Decomposer(H100, (), H100.price_error).of(jaxpr)
    assert ("concatenate" in {eqn.primitive.name for eqn in made.eqns}) == joined


JOINS = {case.label: case for case in xla_alone.joins("gpu")}


def test_joins_of_gathers_take_what_was_measured():
    """All are within a third, but for the concatenation that takes two thirds of its price."""
    measured = {label: us for label, us, _ in json.loads(RESULTS.read_text())["rows"] if label.startswith("joins")}
    assert measured.keys() == JOINS.keys()
    ratios = {
        label: price_xla(convert(flatten(jax.make_jaxpr(case.function)(*case.structs))).program, H100).us
        / measured[label]
        for label, case in JOINS.items()
    }
    assert [label for label, r in ratios.items() if not 0.66 <= r <= 1.34] == [
        "joins two gathers concatenated 9001x128 bfloat16"
    ]
