"""Factorisations and linear systems, of one matrix and of many: what they take by the price, beside what they took."""

import json
import statistics
from pathlib import Path

import jax
import pytest

from benchmarks import linear_systems
from pallasfuse import device
from pallasfuse.ir.plain_work import Elimination
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.plain_gpu import price_plain
from pallasfuse.price.xla import price_xla
from pallasfuse.price.xla_forms import Opaque

H200 = device.find("NVIDIA H200", "gpu")
MEASURED = Path(linear_systems.__file__).parent / "results" / "xla_alone_h200.json"


def price_us(function, structs):
    return price_xla(convert(flatten(jax.make_jaxpr(function)(*structs))).program, H200).us


def test_prices_are_near_what_was_measured():
    """Before there were numbers for many matrices at a time, 48% were within a factor of 1.6."""
    measured = {label: us for label, us, _ in json.loads(MEASURED.read_text())["rows"] if label.startswith("systems")}
    cases = {case.label: case for case in linear_systems.systems("gpu")}
    assert cases.keys() == measured.keys()
    found = {label: price_us(case.function, case.structs) / measured[label] for label, case in cases.items()}
    assert 0.9 < statistics.geometric_mean(found.values()) < 1.15
    assert sum(0.6 < r < 1.6 for r in found.values()) >= 0.85 * len(found)
    assert min(found.values()) > 0.4 and max(found.values()) < 2.2


def waits_us(kind, matrices, size, sides=0, rows=0):
    work = Elimination(size, matrices * size**3 / 3.0, 0.0, kind, matrices, sides, rows=rows or size)
    price = price_plain(Opaque("x", 0.0, 0.0, work=work), work, H200)
    return next(t.us for t in price.terms if t.name == "columns")


@pytest.mark.parametrize("kind", ["factored", "pivoted", "solved"])
def test_many_matrices_wait_for_room_and_few_for_their_columns(kind):
    few, more, most = (waits_us(kind, n, 8, 1) for n in (16, 128, 1 << 17))
    assert few == more
    assert waits_us(kind, 1 << 18, 8, 1) == pytest.approx(2 * most)
    assert most > 4 * more


def test_several_right_sides_take_longer_where_there_are_many_matrices():
    assert waits_us("solved", 1 << 17, 8, 4) > 1.5 * waits_us("solved", 1 << 17, 8, 1)
    assert waits_us("solved", 64, 8, 4) == waits_us("solved", 64, 8, 1)


def test_a_column_by_reflections_waits_for_its_rows():
    assert waits_us("reflected", 64, 128) > 16 * waits_us("reflected", 64, 16)
    assert waits_us("reflected", 64, 16, rows=512) > 8 * waits_us("reflected", 64, 16)


@pytest.mark.parametrize("kind", ["factored", "pivoted", "solved", "reflected"])
@pytest.mark.parametrize("size", [16, 256, 2048])
def test_two_matrices_take_no_longer_than_twice_one(kind, size):
    assert 0.6 * waits_us(kind, 1, size, 4) < waits_us(kind, 2, size, 4) <= 2.001 * waits_us(kind, 1, size, 4)
