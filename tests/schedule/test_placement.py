"""Placement of the statements of a tree: where loads, computations and stores stand, and which rule an illegal tree breaks."""

import re

import pytest

from pallasfuse.ir.tree import parse
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
