"""Pieces that are read and changed anywhere, as measured on an H100 and an H200."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.xla_alone import gathers
from pallasfuse import device
from pallasfuse.ir.loop_program import External
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.scattered import (
    Pieces,
    cached_change,
    cached_read,
    changed_in_memory,
    contended_us,
    read_from_memory,
)
from pallasfuse.price.xla import kernels_on, price_xla

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
H200 = device.find("NVIDIA H200", "gpu")
MANY = 1 << 24
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "xla_alone_h100.json"


def us(cached=0.0, moved=0.0):
    return max(1e-3 * cached / H100.cache_gb_s, 1e-3 * moved / H100.memory_gb_s)


@pytest.mark.parametrize(
    ("width", "source_bytes", "measured_us"),
    [(1, 1 << 22, 149.0), (1, 1 << 26, 401.0), (2, 1 << 26, 215.0), (4, 1 << 26, 131.0)],
)
def test_pieces_that_are_read(width, source_bytes, measured_us):
    """So many floats of each; 16 million together are written, and take 40 us by themselves."""
    pieces = Pieces(MANY / width, 4.0 * width, float(source_bytes))
    predicted = us(cached_read(pieces, H100), read_from_memory(pieces, H100) + min(source_bytes, 4 * MANY) + 4 * MANY)
    assert 0.6 < predicted / measured_us < 1.4


def test_small_tables_are_near():
    assert cached_read(Pieces(MANY, 4.0, 1024.0), H100) == 0.0 == read_from_memory(Pieces(MANY, 4.0, 1024.0), H100)


@pytest.mark.parametrize(
    ("width", "size", "target_bytes", "measured_us"),
    [(1, 4, 1 << 22, 238.0), (1, 4, 1 << 26, 852.0), (4, 4, 1 << 22, 80.0), (1, 2, 1 << 22, 310.0)],
)
def test_pieces_that_are_changed(width, size, target_bytes, measured_us):
    pieces = Pieces(MANY / width, float(size * width), float(target_bytes), width if size < 4 else 0.0)
    predicted = us(cached_change(pieces), changed_in_memory(pieces, H100) + 2 * 4 * MANY)
    assert 0.6 < predicted / measured_us < 1.6


@pytest.mark.parametrize(
    ("rows", "width", "places", "size", "measured_us"),
    [
        (4096, 768, 1, 2, 88479.0), (4096, 768, 2, 2, 23094.0), (4096, 768, 8, 2, 2823.0), (4096, 768, 32, 2, 669.0),
        (32768, 128, 1, 2, 1405478.0), (32768, 128, 2, 2, 447544.0), (32768, 128, 8, 2, 61438.0), (1 << 20, 1, 1, 4, 1998.0),
        (1 << 20, 1, 2, 4, 1135.0), (1 << 20, 1, 8, 4, 445.0), (1 << 20, 4, 2, 4, 1121.0), (65536, 1, 1, 4, 132.0),
        (32768, 128, 1, 4, 174.0),
    ],
)  # fmt: skip
def test_updates_that_meet_at_one_place(rows, width, places, size, measured_us):
    pieces = Pieces(rows, float(size * width), float(size * width * places), width if size < 4 else 0.0, combined=True)
    assert 0.35 < contended_us(pieces, H100, skew=1.0) / measured_us < 1.9


@pytest.mark.parametrize(
    ("number", "width", "places", "measured_us"),
    [
        (65536, 1, 1, 116.0), (65536, 1, 100, 15.2), (1 << 20, 1, 1, 1840.0), (1 << 20, 1, 20, 246.6), (1 << 20, 1, 100, 232.0),
        (1 << 20, 1, 512, 161.7), (1 << 20, 1, 4096, 31.1), (1 << 22, 1, 512, 645.6), (1 << 22, 1, 4096, 120.7),
        (65536, 4, 8, 37.4), (65536, 4, 64, 23.8), (65536, 16, 8, 42.7), (65536, 64, 1, 308.1), (65536, 64, 8, 79.6),
        (65536, 256, 1, 632.8),
    ],
)  # fmt: skip
def test_updates_of_few_places_on_an_h200(number, width, places, measured_us):
    """Updates of float32, whose places are drawn evenly, with the time in which as many are made that do not meet."""
    pieces = Pieces(number, 4.0 * width, 4.0 * width * places, combined=True, elements=width)
    assert 0.55 < (contended_us(pieces, H200, skew=1.0) + number * width / 80e3) / measured_us < 1.65


@pytest.mark.parametrize(
    ("places", "even_us", "measured_us"),
    [(20, 246.6, 871.0), (100, 232.0, 624.0), (512, 161.7, 439.1), (4096, 31.1, 267.9), (32768, 16.4, 168.6)],
)
def test_updates_whose_places_are_skewed(places, even_us, measured_us):
    """A million float32, added to the places `floor(places * u**4)`."""
    pieces = Pieces(1 << 20, 4.0, 4.0 * places, combined=True)
    assert 0.8 < (contended_us(pieces, H200, skew=4.0) + 13.0) / measured_us < 1.6
    assert 0.8 * even_us < contended_us(pieces, H200) + 13.0 < measured_us


def test_parts_are_added_to_one_after_the_other():
    """Each of the rows of an array has positions of its own, and the threads come row by row."""
    rows, values = array(24, 442), array(24, 63504)
    (one,) = pieces(jax.vmap(lambda x, i, u: x.at[i].add(u)), rows, places(24, 63504), values)
    assert one.parts == 24
    assert 30 < contended_us(one, H200) < 90  # 71 us together with what does not wait
    assert contended_us(replace(one, parts=1.0), H200, skew=1.0) < contended_us(one, H200, skew=1.0) / 4
    (columns,) = pieces(lambda x, i, u: x.at[:, i].add(u), rows, places(63504), values)
    assert columns.parts == 1


def test_long_rows_wait_by_their_bytes_and_parts_by_the_threads_that_are_there():
    one, two = (contended_us(Pieces(8192, n, n, combined=True, elements=n / 4), H200) for n in (512.0, 1024.0))
    assert two == pytest.approx(2 * one)
    rows = Pieces(24 * 512, 256.0, 24 * 2048.0, combined=True, parts=24.0, elements=64.0)
    # 512 rows of 64 numbers are as many threads as 32,768 numbers: eight parts are added to together
    assert contended_us(rows, H200) == pytest.approx(contended_us(replace(rows, parts=1.0, number=512, source_bytes=2048.0), H200)
                                                     * 24 / (2048 * 132 / 32768))  # fmt: skip


def test_updates_that_do_not_meet():
    assert contended_us(Pieces(MANY, 4.0, 4.0 * MANY, combined=True), H100, skew=1.0) < 0.1
    rows = contended_us(Pieces(32768, 512.0, 512.0, combined=True), H100)  # of 128 float32, to one place: 170 us
    assert 0.8 < rows / 170 < 1.1
    assert contended_us(Pieces(4096, 1536.0, 1536.0 * 32768, 768, combined=True), H100) == 0.0
    assert contended_us(Pieces(4096, 1536.0, 1536.0, 768), H100) == 0.0  # put in place of what is there
    assert contended_us(Pieces(5, 8.0, 0.0, 4, combined=True), H100) == 0.0


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def program(function, *arguments):
    return convert(jax.make_jaxpr(function)(*arguments)).program


def places(*shape):
    return array(*shape, dtype=jnp.int32)


N = 1 << 22


@pytest.mark.parametrize(
    ("function", "source", "positions"),
    [
        (lambda x, i: x[i], array(N), lambda n: places(N - n)),
        (lambda x, i: x[:, i], array(4096, 1024), lambda n: places(1024 - n)),
        (lambda x, i: jnp.take_along_axis(x, i, 1), array(4096, 1024), lambda n: places(4096, 1024 - n)),
        (lambda x, i: x.at[i].add(1.0), array(N), lambda n: places(N - n)),
    ],
    ids=["places", "columns", "along", "sums"],
)
def test_as_many_positions_as_there_are_elements_are_as_dear_as_one_less(function, source, positions):
    one, less = (price_xla(program(function, source, positions(n)), H100).us for n in (0, 1))
    assert one == pytest.approx(less, rel=0.1)


def pieces(function, *arguments):
    found = [k.pieces for k in kernels_on(H100, program(function, *arguments)) if k.pieces]
    return [p for one in found for p in (one if isinstance(one, tuple) else (one,))]


def test_only_what_positions_choose_is_in_pieces():
    rows = array(9000, 64)
    (one,) = pieces(lambda x, i, z, u: (x[i] * z * u).sum(-1), array(1024, 64), places(9000), rows, rows)
    assert (one.number, one.bytes, one.source_bytes) == (9000, 256.0, 1024 * 256.0)
    (one,) = pieces(lambda x, i: x[i] * 2, array(N), places(N))
    assert one.number == N
    two = pieces(lambda x, y, i, j: x[i] * y[j], array(1024, 64), array(2048, 64), places(9000), places(9000))
    assert [p.source_bytes for p in two] == [1024 * 256.0, 2048 * 256.0]


def test_a_tensor_that_is_read_both_ways_is_in_pieces_only_where_positions_choose():
    """Each of 32,000 grains looks at others, and at four walls."""

    def touches(place, walls, other):
        apart = place[:, None] - place[other]
        away = place[:, None] - walls
        return (apart * apart).sum(-1), (away * away).sum(-1)

    (one,) = pieces(touches, array(32_000, 2), array(4, 2), places(32_000, 36))
    assert (one.number, one.bytes) == (32_000 * 36, 8.0)


@pytest.mark.parametrize(("kilobytes", "measured_us"), [(128, 10.8), (192, 12.5), (256, 19.3), (512, 28.0)])
def test_a_part_of_a_tensor_is_found_beside_each_multiprocessor(kilobytes, measured_us):
    """Four million numbers from tensors of several sizes, on an H200."""
    found = price_xla(program(lambda x, i: x[i] * 2, array(kilobytes * 256), places(N)), H200).us
    assert 0.8 < found / measured_us < 1.4


def test_only_positions_scatter():
    """Slices that are written are none, whatever their type, nor are as many indices as there are dimensions more pieces."""
    codes = [array(n, 512, dtype=jnp.int8) for n in (65536, 16384)]
    assert not pieces(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), *codes, places())
    cube, three = array(64, 64, 64), [places(10_000)] * 3
    (one,) = pieces(lambda x, i, j, k, u: x.at[i, j, k].add(u), cube, *three, array(10_000))
    assert (one.number, one.words) == (10_000, 0.0)


def test_sums_of_small_words_are_exchanged_one_by_one_and_others_put():
    half, values = array(4096, 64, dtype=jnp.bfloat16), array(9000, 64, dtype=jnp.bfloat16)
    (added,) = pieces(lambda x, i, u: x.at[i].add(u), half, places(9000), values)
    (put,) = pieces(lambda x, i, u: x.at[i].set(u), half, places(9000), values)
    assert (added.words, put.words) == (64, 0.0)


def test_gathers_within_rows_take_what_is_foretold():
    """All 40 that were measured on an H100 are within 0.75 and 1.25."""
    measured = {label: us for label, us, _ in json.loads(RESULTS.read_text())["rows"]}
    ratios = [
        price_xla(convert(flatten(jax.make_jaxpr(c.function)(*c.structs))).program, H100).us / measured[c.label]
        for c in gathers("gpu")
    ]
    assert len(ratios) == 40 and all(0.75 <= r <= 1.25 for r in ratios)


def test_neighbours_share_the_sectors_of_a_row():
    anywhere = Pieces(MANY, 4.0, 4.0 * MANY / 4)
    in_short_rows, in_long_ones = (cached_read(replace(anywhere, parts=parts), H100) for parts in (MANY / 400, 4.0))
    assert in_short_rows < 0.1 * cached_read(anywhere, H100) < 0.99 * in_long_ones < cached_read(anywhere, H100)
    large = replace(anywhere, source_bytes=64.0 * MANY)
    assert read_from_memory(replace(large, parts=MANY / 1000), H100) < read_from_memory(large, H100)


X = (6, 10, 24)


@pytest.mark.parametrize(
    ("function", "shapes", "within"),
    [
        (lambda x, i: x[i], (X, (5,)), 6 * 10 * 24),
        (lambda x, i: x[:, i], (X, (5,)), 10 * 24),
        (lambda x, i: x[:, :, i], (X, (5,)), 24),
        (lambda x, i: x[:, 2:7, i], (X, (5,)), 10 * 24),
        (lambda x, i: jnp.take_along_axis(x, i, 2), (X, (6, 10, 7)), 24),
        (jax.vmap(lambda a, at: a[at]), (X, (6, 3)), 10 * 24),
        (jax.vmap(lambda a, at: a[at], (1, 0)), (X, (10, 3)), 6 * 24),
    ],
)
def test_what_positions_choose_from(function, shapes, within):
    arguments = jax.ShapeDtypeStruct(shapes[0], jnp.float32), jax.ShapeDtypeStruct(shapes[1], jnp.int32)
    program = convert(flatten(jax.make_jaxpr(function)(*arguments))).program
    assert [n.within for n in program.nests if isinstance(n, External) and n.run] == [within]
