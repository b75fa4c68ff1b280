"""Tile programs with loops inside loops and with buffers: what they mean, and which ones there cannot be."""

from dataclasses import replace

import numpy as np
import pytest

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.evaluate import evaluate_program
from pallasfuse.ir.evaluate_tiles import evaluate_tiles, evaluate_tiles_over
from pallasfuse.ir.expr import const, convert, index
from pallasfuse.ir.own_axes import with_own_axes
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.renaming import restored
from pallasfuse.ir.tile_program import (
    Buffer,
    Carry,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Set,
    Store,
    TileProgram,
    every,
    not_flat,
    verify,
)
from tests.ir.nested_programs import EXAMPLES, ZERO, F, I, J, X, Y, over, start, tile_of, whole
from tests.verification.values import agree, finite_fields


@pytest.mark.sampled(2, cover=("tails",))
@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs_in_float64(name, tails):
    example = EXAMPLES[name]
    inputs = example.inputs()
    for back in (True, False) if tails == "masked" else (True,):
        got = evaluate_tiles(example.program(tails), inputs, move_last_block_back=back)
        for output, expected in example.expected(inputs).items():
            np.testing.assert_allclose(got[output], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.sampled(8, cover=("tails",))
@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs_over_finite_fields(name, tails):
    """They compute what their nests do, of numbers that no rounding makes equal."""
    example = EXAMPLES[name]
    fields = finite_fields(trials=4)
    inputs = {t.name: fields.random([a.extent for a in t.axes], t.dtype) for t in example.nests.inputs}
    expected = evaluate_program(example.nests, inputs, fields, lambda *_: None)
    found = evaluate_tiles_over(example.program(tails), inputs, fields, move_last_block_back=tails == "exact")
    for output, value in found.items():
        assert agree(expected[output], value, 4)


def test_the_text_of_buffers_and_of_loops_inside_windows():
    assert str(EXAMPLES["flat"].program("masked")) == (
        "kernel flat grid(m:19/8)\n"
        "  e.buf[m, h:32]: float32 = 0 in register\n"
        "  for n in [0, 3) by 16:\n"
        "    c.acc[m, n]: float32 = 0\n"
        "    for k in [0, 3) by 8:\n"
        "      a.t = load a[m, k]\n"
        "      b.t = load b[k, n]\n"
        "      c.t[m, n]: float32 = dot(a.t[m, k], b.t[k, n]; k)\n"
        "      c.next[m, n] = c.acc[m, n] + c.t[m, n]\n"
        "      yield c.acc <- c.next\n"
        "    for h in [0, 2) by 16:\n"
        "      e.old = get e.buf[m, h]\n"
        "      d.t = load d[n, h]\n"
        "      e.t[m, h]: float32 = dot(c.acc[m, n], d.t[n, h]; n)\n"
        "      set e.buf[m, h] = e.old[m, h] + e.t[m, h]\n"
        "  for h in [0, 2) by 16:\n"
        "    e.all = get e.buf[m, h]\n"
        "    store e[m, h] = e.all[m, h]"
    )
    text = str(EXAMPLES["row_sum"].program("exact"))
    assert "  for j in [0, 2) by 16:" in text
    assert "    for j in [0, 4) by 4 from start.j:" in text
    assert "    for j in [0, 1) by 1 from start.j + 12:" in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs_are_renamed(name):
    program = EXAMPLES[name].program("masked")
    renamed = restored(replace(program, name="«t000001»"), {"«t000001»": program.name})
    assert renamed == program


# --- programs that there cannot be

HERE = tile_of("x.t", I, J)
LOAD = Load("x.t", "x", (I, J), F)
BUFFER = Buffer("b", (I, J), (4, 48), F, ZERO)
GET, SET = Get("g", "b", (I, J), F), Set("b", (I, J), HERE)
DONE = Store("y", (I,), ZERO)


def program(*body):
    return TileProgram("bad", (X,), (Y,), ((I, 4),), ((I, 4), (J, 16)), (*body, DONE))


LATER, BEGUN = Let("s.next", (), ZERO), Carry("s", (), F, convert(index(I), F), "s.next")


def along(*body, tile=16, carries=(), **rest):
    return over(J, tile, lambda _: body, "masked", *carries, **rest)


def test_the_statements_that_the_bad_programs_are_made_of():
    verify(program(BUFFER, along(LOAD, SET, GET), along(replace(GET, name="h"))))
    verify(program(along(LOAD, Let("two", (I, J), HERE), along(LOAD, tile=4, window=16, inside=True))))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ((along(GET), BUFFER), "get b: no such buffer is in scope"),
        ((along(BUFFER, LOAD, SET), along(GET)), "get b: no such buffer"),
        ((along(LOAD, SET),), "set b: no such buffer"),
        ((BUFFER, Let("a", (I, J), tile_of("b", I, J))), r"a reads \['b'\], which only a get may"),
        ((BUFFER, Store("y", (I,), tile_of("b", I))), "which only a get may"),
        ((LOAD, replace(BUFFER, name="x.t")), "the name of buffer x.t is taken"),
        ((BUFFER, BUFFER), "the name of buffer b is taken"),
        ((BUFFER, Load("b", "x", (I, J), F)), "b is the name of a buffer"),
        ((replace(BUFFER, sizes=(4,)),), "has a size for every axis"),
        ((replace(BUFFER, sizes=(4, 0)),), "has a size for every axis"),
        ((LOAD, replace(BUFFER, init=HERE)), "begins as a constant"),
        ((replace(BUFFER, init=index(J, F)),), "begins as a constant"),
        ((BUFFER, along(replace(GET, axes=(I,)))), r"get b along \[i\], not along \[i, j\]"),
        ((BUFFER, along(replace(GET, dtype="float16"))), "another type"),
        ((BUFFER, along(LOAD, replace(GET, name="x.t"))), "its name is taken"),
        ((BUFFER, along(LOAD, replace(SET, value=tile_of("x.u", I, J)))), r"set b reads \['x.u'\], not in scope"),
        # windows that a buffer does not hold
        ((replace(BUFFER, sizes=(2, 48)), along(GET)), "get b: a window of i has 4 positions of 2"),
        ((replace(BUFFER, sizes=(4, 32)), along(GET)), r"get b: a window of j has positions \[0, 48\) of 32"),
        ((along(replace(BUFFER, sizes=(4, 8)), along(GET, tile=4, window=16, inside=True)),), r"positions \[0, 16\) of 8"),
        # loops over what is open already
        ((along(along(LOAD, tile=4)),), "loop j does not begin where the window around it does"),
        ((along(LOAD, inside=True),), r"loop j reads \['start.j'\], not in scope"),
        ((over(I, 2, lambda _: (LOAD,), "masked", window=4),), "loop i does not begin where"),
        ((along(along(LOAD, tile=4, window=20, inside=True)),), r"loop j has positions \[0, 20\) of 16 in the window"),
        ((along(LOAD, along(Reduce("r", (I,), SUM, HERE, (J,)), tile=4, window=16, inside=True)),),
         "r reads x.t, a tile of another window of j"),
        ((over(J, 16, lambda _: (LOAD, SET), "masked", backwards=True), BUFFER), "set b: no such buffer"),
        ((along(along(LOAD, tile=4, window=16, inside=True, carries=(Carry("s", (I, J), F, ZERO, "x.t"),))),),
         r"loop j carries \['s'\] along its own axis"),
        ((BUFFER, replace(along(LOAD, SET), backwards=True)), "loop j goes backwards through several segments, or writes buffers"),
    ],
)  # fmt: skip
def test_bad_programs_are_refused(body, message):
    with pytest.raises(InvalidProgramError, match=message):
        verify(program(*body))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ((along(along(LOAD, tile=4, window=12, inside=True)),), "the loop over j visits 12 positions, but says 16"),
        ((along(along(LOAD, tile=8, window=20, inside=True)),), r"positions \[16, 24\) of j leave the window up to 16"),
        ((replace(BUFFER, sizes=(4, 32)), along(LOAD, SET)), r"b has no positions \[32, 48\) of j"),
        ((BUFFER, GET), "a part of j is used outside the loop over it"),
        (
            (along(LOAD, along(LATER, tile=4, window=16, inside=True, carries=(BEGUN,))),),
            "s varies along i, which it does not declare",
        ),
        ((replace(BUFFER, axes=(I,), sizes=(4,)), along(LOAD, replace(SET, axes=(I,)))), "set b varies along j"),
    ],
)
def test_what_a_device_would_do_silently_is_an_error(body, message):
    with pytest.raises(InvalidProgramError, match=message):
        evaluate_tiles(program(*body), EXAMPLES["row_sum"].inputs())


@pytest.mark.parametrize("back", [False, True])
def test_blocks_that_are_moved_back_are_cut_into_pieces_there(back):
    example = EXAMPLES["pieces"]
    got = evaluate_tiles(example.program("masked"), example.inputs(), move_last_block_back=back)
    np.testing.assert_allclose(got["z"], example.expected(example.inputs())["z"])


def test_a_get_sees_the_last_set_of_each_element():
    """Pieces of several sizes over each other, and what was never set."""
    wide, narrow = Set("b", (I, J), const(1.0, F)), Set("b", (I, J), const(2.0, F))
    loops = (
        BUFFER, over(J, 16, lambda _: (wide,), "exact", to_visit=whole(32)),
        over(J, 4, lambda _: (narrow,), "exact", to_visit=whole(20)),
        over(J, 9, lambda _: (GET, Store("z", (I, J), tile_of("g", I, J))), "exact"),
    )  # fmt: skip
    short = [
        replace(s, segments=(replace(s.segments[0], stop=whole(n)),)) for s, n in zip(loops[1:3], (2, 5), strict=True)
    ]
    z = replace(X, name="z")
    got = evaluate_tiles(
        TileProgram("k", (X,), (z,), ((I, 4),), ((I, 4), (J, 16)), (BUFFER, *short, loops[3])), EXAMPLES["row_sum"].inputs(),
        move_last_block_back=True,
    )["z"]  # fmt: skip
    expected = np.where(np.arange(45) < 20, 2.0, np.where(np.arange(45) < 32, 1.0, 0.0))
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


# --- levels


def test_loops_inside_windows_get_axes_of_their_own():
    flat = EXAMPLES["flat"].program("exact")
    assert with_own_axes(flat) is flat
    for name, tiles in (("row_sum", {"i": 4, "j": 16, "j.1": 4, "j.2": 4}), ("pieces", {"i": 4, "j": 32, "j.1": 8})):
        own = with_own_axes(EXAMPLES[name].program("exact"))
        assert {a.name: t for a, t in own.tiles} == tiles
        assert all(j.extent == 45 for j in own.order if j.name.startswith("j"))
        inside = [s for s in every(own.body) if isinstance(s, Loop) and s.axis.name != "j"]
        loads = [s for loop in inside for g in loop.segments for s in g.body if isinstance(s, Load)]
        assert loads
        assert all(s.indices[-1].name.startswith("j.") for s in loads)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_emitters_of_one_level_cannot_run_is_said(name):
    reason = not_flat(EXAMPLES[name].program("masked").body)
    assert reason in {
        "product": {None},
        "deep": {"it has loops inside loops: inside that over n"},
        "triangle": {"it has loops inside loops: inside that over n"},
        "flat": {"it has buffers: e.buf"},
        "pieces": {"it has a loop over j inside a block of j"},
        "singles": {"it has a loop over j inside a block of j"},
        "kept": {"it has buffers: x.buf"},
        "staged": {"it has loops inside loops: inside that over j"},
        "steps": {"it has buffers: x.buf"},
    }.get(name, {"it has loops inside loops: inside that over j"})
    carried = EXAMPLES["product"].program("masked").body[0]
    begun = replace(carried, carries=(replace(carried.carries[0], init=start(I)),))
    assert not_flat([begun]) == "its loop carries values that begin as more than numbers"
