"""Placement of the statements of a tree: where loads, computations and stores stand, and which rule an illegal tree breaks."""

import re
from dataclasses import replace

import pytest

from pallasfuse.device import assumed
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import apply, read, sub
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.region import Region, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import parse
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import Broken, place, show
from tests.schedule.regions import attention, chain, norm_product

CHAIN = chain(512, 256, 64, 128)  # i: rows, k: columns of the first product, j: its sum, l: columns of the second
LETTERS = {"i": "m", "k": "n", "j": "k", "l": "h"}


def placed(region, text, fold=lambda nest, unfinished: False):
    return place(region, parse(text)[0], fold)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x { i:64 l:64 k:64 ( j:16 ( t0 ) t1 ) }", "il(k(j(La,Lb,Ct0),Ld,Ct1),St1)"),  # the paper's mh(n(k(..),..),SE)
        (
            "x { i:64 l:64 k:64 ( t0 t1 ) }",
            "i(La,l(k(Lb,Ct0,Ld,Ct1),St1))",
        ),  # one trip over j: a is loaded once for each i
        ("x { i:64@grid l:64@grid k:64 ( t0 t1 ) }", "il(La,k(Lb,Ct0,Ld,Ct1),St1)"),  # but every block loads it
        ("x { i:64@grid k:64 ( j:16 ( t0 ) l:64 ( t1 ) ) }", "i(k(j(La,Lb,Ct0),l(Ld,Ct1)),St1)"),
        ("x { i:64@grid ( j:16 k:64 ( t0 ) k:64 ( t1 ) ) }", "i(j(La,k(Lb,Ct0)),k(Ld,Ct1),St1)"),
        ("x { i:64@grid ( a!shared l:64 k:64 ( j:16 ( t0 ) t1 ) ) }", "il(k(j(La,Lb,Ct0),Ld,Ct1),St1)"),
    ],
)
def test_statements_stand_under_the_innermost_related_loop(text, shown):
    assert show(placed(CHAIN, text)) == shown


def test_a_kept_input_is_whole_in_its_buffer():
    kept = next(
        b for b in placed(CHAIN, "x { i:64@grid ( a!shared k:64 ( j:16 ( t0 ) t1 ) ) }").buffers if b.name == "a"
    )
    assert [a.name for a in kept.axes] == ["i", "j"] and [loop.axis for loop in kept.around] == ["i"]


def test_a_kept_nest_is_stored_and_loaded_where_other_loops_read_it():
    kept = placed(CHAIN, "x { i:64@grid ( t0!global k:64 ( j:16 ( t0 ) ) l:64 k:64 ( t1 ) ) }")
    assert show(kept) == "i(k(j(La,Lb,Ct0),St0),l(k(Lt0,Ld,Ct1),St1))"
    same_loop = placed(CHAIN, "x { i:64@grid ( t0!global k:64 ( j:16 ( t0 ) l:64 ( t1 ) ) ) }")
    assert show(same_loop) == "i(k(j(La,Lb,Ct0),St0,l(Ld,Ct1)),St1)"


def test_a_map_hands_what_is_unfinished_on_to_its_readers():
    """The terms of the last sum are a map of the maximum, whose loop is the same."""
    region = mapped_exponentials()
    tree = "x { i:1@grid j:16 ( m e s ) }"
    asked = []

    def fold(nest, unfinished):
        asked.append((nest, unfinished))
        return True

    assert not isinstance(placed(region, tree, fold), Broken)
    assert asked == [("s", frozenset({"m"}))]
    assert placed(region, tree) == Broken(6, "s reads m before the loop that reduces it ends")
    output = placed(replace(region, outputs=("s", "e")), tree, fold)
    assert output == Broken(6, "e reads m inside of the loop over j that reduces it")
    stored = placed(region, "x { i:1@grid ( e!global j:16 ( m e s ) ) }", fold)
    assert stored == Broken(6, "e is stored, and reads m before the loop over it ends")
    late = placed(region, "x { i:1@grid ( j:16 ( m e ) j:16 ( s ) ) }", fold)
    assert isinstance(late, Broken) and late.rule == 3
    assert derivable(region)("s", frozenset({"m"}))


def mapped_exponentials():
    i, j = Axis("i", 32), Axis("j", 64)
    x, m, e = (read(name, axes, "float32") for name, axes in (("x", (i, j)), ("m", (i,)), ("e", (i, j))))
    nests = (
        Nest("m", (i,), x, "float32", (j,), MAX),
        Nest("e", (i, j), apply("exp", sub(x, m)), "float32"),
        Nest("s", (i,), e, "float32", (j,), SUM),
    )
    return verify(Region(nests, (Tensor("x", (i, j), "float32"),), ("s",)))


def test_a_part_of_a_loop_moves_its_part():
    region = CHAIN
    whole = "x { i:64@grid l:64@grid k:64 ( j:16 ( t0 ) t1 ) }"
    model = Model(region, assumed("gpu"))
    moved = [
        model.estimate(placed(region, whole.replace("i:64@grid", f"i:64@grid{part}"))).moved["a"]
        for part in ("", " until 1", " from 1", " from 1 until 3")
    ]
    assert [m / moved[0] for m in moved] == [1, 1 / 8, 7 / 8, 2 / 8]


def test_one_load_serves_all_readers_in_a_body():
    region = norm_product(64, 256, 512)
    once = placed(region, "x { i:64@grid k:64@grid j:64 ( t2 t11 ) }", lambda nest, unfinished: True)
    assert [s.name for s in once.statements if s.kind == "load"] == ["x", "g", "w"]


@pytest.mark.parametrize(
    ("text", "rule", "words"),
    [
        ("x { i:64@grid i:48 k:64 ( j:16 ( t0 ) t1 ) }", 1, "i:48 does not divide i:64"),
        ("x { z:64 ( t0 t1 ) }", 1, "no axis z"),
        ("x { k:64 j:16 i:64@grid ( t0 t1 ) }", 2, "i at level grid stands inside of k at level serial"),
        ("x { i:64@grid ( l:16@grid k:64 ( t0 ) l:16@grid k:64 ( t1 ) ) }", 2, "the loop over the blocks of l is not alone"),
        ("x { i:64@grid ( k:64 ( t0 ) k:64 ( t1 ) ) }", 3, "t1 reads t0"),
        ("x { i:64@grid k:64 ( t1 t0 ) }", 3, "t1 reads t0"),
        ("x { i:64@grid k:64 ( t0 t7 ) }", 3, "no nest t7"),
        ("x { i:64@grid j:16 l:64 k:64 ( t0 t1 ) }", 4, "t0 would add its terms again in every trip of the loop over l"),
        ("x { i:64@grid j:16 k:64 ( t0 t1 ) }", 6, "t1 reads t0 inside of the loop over j that reduces it"),
        ("x { i:64@grid k:64 ( j:16 ( t0 t0 ) t1 ) }", 4, "t0 stands twice in the loops that reduce it"),
        ("x { i:64@grid k:64@grid ( t0 t1 ) }", 7, "t1 is reduced by blocks over k"),
        ("x { i:64@grid ( k:64 ( t0 t1 ) +t1 ) }", 7, r"\+t1"),
        ("x { i:64@grid k:64 ( t0!shared t0 t1 ) }", 8, "t0 is no input"),
        ("x { i:64@grid k:64 ( t0 ) }", 13, "t1 is never stored"),
    ],
)  # fmt: skip
def test_an_illegal_tree_is_refused_with_the_rule_that_it_breaks(text, rule, words):
    broken = placed(CHAIN, text)
    assert isinstance(broken, Broken)
    assert re.search(rf"rule {rule} .*{words}", str(broken)), str(broken)


def test_unfinished_reads_need_a_fold():
    region = attention(1, 64, 64, 64, 64)
    text = "x { i:16@grid k:16 ( j:16 ( t0 ) t1 t8 t12 ) }"
    broken = placed(region, text)
    assert isinstance(broken, Broken) and broken.rule == 6
    assert "t8 reads t1 before the loop that reduces it ends" in broken.reason
    assert not isinstance(placed(region, text, lambda nest, unfinished: unfinished <= {"t1", "t8"}), Broken)


def test_no_fold_reads_what_another_loop_reduces():
    region = attention(1, 64, 64, 64, 64)
    broken = placed(region, "x { i:16@grid j:16 k:16 ( t0 t1 t8 t12 ) }", lambda nest, unfinished: True)
    assert isinstance(broken, Broken) and broken.rule == 6
    assert "inside of the loop over j" in broken.reason
