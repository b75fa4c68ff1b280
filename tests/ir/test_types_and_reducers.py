"""Element types and reducers."""

import math

import ml_dtypes
import numpy as np
import pytest

from pallasfuse.ir import dtypes
from pallasfuse.ir.reducers import REDUCERS

NUMPY = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in dtypes.SUPPORTED}
FLOATS = sorted(d for d in dtypes.SUPPORTED if dtypes.is_float(d))


def samples(dtype: str) -> np.ndarray:
    """Values of a type that are hard to represent in others."""
    if dtype == "bool":
        return np.array([False, True])
    if dtypes.is_integer(dtype):
        info = np.iinfo(dtype)
        return np.array(sorted({info.min, info.max, info.max - 1, 0, 1, info.max // 3}), dtype)
    info = ml_dtypes.finfo(NUMPY[dtype])
    one = NUMPY[dtype].type(1)
    values = [0, -0.0, np.inf, -np.inf, np.nan, float(info.max), float(info.tiny), float(info.smallest_subnormal),
              float(one + info.eps)]  # fmt: skip
    return np.array(values).astype(NUMPY[dtype])


@pytest.mark.parametrize("dtype", sorted(dtypes.SUPPORTED))
def test_sizes_and_kinds(dtype):
    assert dtypes.itemsize_bytes(dtype) == NUMPY[dtype].itemsize
    kinds = [dtypes.is_float(dtype), dtypes.is_integer(dtype), dtype == "bool"]
    assert sum(kinds) == 1


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("complex64", 8), ("complex128", 16), ("float8_e4m3fn", 1), ("float4_e2m1fn", 1), ("int4", 1), ("key<fry>", 8)],
)
def test_other_types_have_a_size_and_no_kind(dtype, size):
    assert dtype not in dtypes.SUPPORTED
    assert dtypes.itemsize_bytes(dtype) == size
    assert not dtypes.is_float(dtype)
    assert not dtypes.is_integer(dtype)


@pytest.mark.parametrize("target", sorted(dtypes.SUPPORTED))
@pytest.mark.parametrize("source", sorted(dtypes.SUPPORTED))
def test_an_exact_cast_keeps_every_value(source, target):
    """What is called exact is exact; between floats, what is not called exact is not."""
    values = samples(source)
    with np.errstate(all="ignore"):
        back = values.astype(NUMPY[target]).astype(NUMPY[source])
    pairs = zip(values.tolist(), back.tolist(), strict=True)
    exact = all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
    claimed = dtypes.is_exact_cast(source, target)
    assert exact or not claimed
    if source in FLOATS and target in FLOATS:
        assert exact == claimed


INTEGERS = [d for d in sorted(dtypes.SUPPORTED) if dtypes.is_integer(d)]


@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_a_cast_between_integers_is_exact_where_the_range_is_inside(source, target):
    inner, outer = np.iinfo(source), np.iinfo(target)
    assert dtypes.is_exact_cast(source, target) == (outer.min <= inner.min and inner.max <= outer.max)


def test_half_types_accumulate_in_single_precision():
    got = {d: dtypes.accumulator(d) for d in ("float16", "bfloat16", "float32", "float64", "int32", "bool")}
    assert got == {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64",
                   "int32": "int32", "bool": "bool"}  # fmt: skip


NUMERIC = ["float32", "float64", "float16", "int8", "int32", "int64", "uint8"]


@pytest.mark.parametrize("dtype", NUMERIC)
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min"])
def test_the_identity_changes_no_value(name, dtype):
    reducer = REDUCERS[name]
    identity = np.dtype(dtype).type(reducer.identity(dtype))
    for value in samples(dtype):
        got = (
            reducer.reduce(np.array([identity, value], dtype), dtype=dtype)
            if name in ("sum", "prod")
            else reducer.reduce(np.array([identity, value], dtype))
        )
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("name", ["and", "or", "max", "min"])
def test_the_identity_changes_no_truth_value(name):
    reducer = REDUCERS[name]
    for value in (False, True):
        assert bool(reducer.reduce(np.array([reducer.identity("bool"), value]))) is value


def test_the_identity_is_what_nothing_reduces_to():
    for name in ("sum", "prod", "and", "or"):
        assert REDUCERS[name].reduce(np.array([], float)) == REDUCERS[name].identity("float32")


@pytest.mark.parametrize("name", sorted(REDUCERS))
def test_combine_joins_two_halves(name):
    from pallasfuse.ir.ops import OPS

    reducer = REDUCERS[name]
    data = np.random.default_rng(0).random((2, 6))
    data = data > 0.5 if name in ("and", "or") else data
    halves = [reducer.reduce(half) for half in data]
    np.testing.assert_allclose(OPS[reducer.combine].evaluate(*halves), reducer.reduce(data))
