"""Schedule trees: what is printed is read back, and what cannot be read is refused with the place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallasfuse.errors import ScheduleError
from pallasfuse.ir.tree import (
    LEVELS,
    Do,
    Keep,
    Launch,
    Merge,
    RangeLoop,
    TreeKernel,
    parse,
    show,
    walk,
)

TEXTS = [
    "attn { h:1@grid i:128@grid i:64@group ( j:128~2 ( s m l o ) out ) } [persistent ping_pong]",
    "part { b:1@grid g:1@grid j/8@grid j:64~4 ( s m l o ) }\njoin { b:1@grid g:1@grid ( +m +l +o out ) }",
    "one { b:1@grid g:1@grid ( j/8@cluster j:64~4 ( s m l o ) +m +l d:16@cluster ( +o out ) ) }",
    "lin { m:1024@grid n:256@grid m:128@grid m:64@group ( k:64~3 ( q y ) z ) } [persistent warps=8 grid_swizzle=4]",
    "flat { m:64@grid m:64@group n:128 ( k:64~2 ( C ) h:64~2 ( E ) ) }",
    "rows { i:1@grid ( x!shared j:32768@cluster j:8192 ( m ) +m ) }",
    "peel { i:1@grid ( a!global n:16 until 1 ( a b ) n:16~2 from 1 until 3 ( b ) n:16 from 3 j:4 ( b ) ) }",
    "named { from:1 until:2 ( from until ) }",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_tree_is_printed_as_it_was_read(text):
    assert show(parse(text)) == text


def nodes(depth):
    names = st.sampled_from(["s", "m", "acc.0", "_t1"])
    leaves = st.one_of(names.map(Do), names.map(Merge), st.builds(Keep, names, st.sampled_from(["shared", "global"])))
    if depth == 0:
        return leaves
    loops = st.builds(
        RangeLoop, st.sampled_from("ijk"), st.integers(1, 512), st.lists(nodes(depth - 1), max_size=3).map(tuple),
        st.sampled_from(LEVELS), st.booleans(), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3),
    )  # fmt: skip
    return st.one_of(leaves, loops)


LAUNCHES = st.builds(Launch, *[st.booleans()] * 5, st.integers(0, 8), st.integers(1, 8))


@given(
    st.lists(
        st.builds(TreeKernel, st.just("k"), st.lists(nodes(3), max_size=3).map(tuple), LAUNCHES), min_size=1, max_size=3
    )
)
def test_every_tree_is_read_back_from_its_text(kernels):
    assert parse(show(tuple(kernels))) == tuple(kernels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the end where the name of a kernel"),
        ("k { i:0@grid ( s ) }", "'0' where the size of a tile, a positive number"),
        ("k { i:8@block ( s ) }", "'block' where one of the levels time, mesh"),
        ("k { i:8 s }", r"'s' where '\(' or another loop should stand, after 'k { i:8'"),
        ("k { i:8 ( s }", "'}' where a loop, a nest"),
        ("k { x!registers }", "'registers' where shared or global"),
        ("k { s } [eager]", "'eager' where one of persistent"),
        ("k { s } [warps]", r"'\]' where '='"),
        ("k { i:8 ( s ) } {", "'{' where the name of a kernel"),
        ("k { i%8 }", "'%' where"),
        ("k { i:² ( s ) }", "'²' where the size of a tile, a positive number"),
        ("k { i:" + "9" * 5000 + " ( s ) }", "'9{60}' where the size of a tile, a positive number"),
        ("k { " + "i:4 ( " * 3000 + "s" + " )" * 3000 + " }", "more than 100 loops in each other"),
        ("k { " + "i:4 " * 3000 + "( s ) }", "more than 100 loops in each other"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse(text)


def test_nodes_are_walked_with_the_loops_around_them():
    (kernel,) = parse("k { m:8@grid n:4 ( k:2 ( C ) E ) }")
    found = [("".join(x.axis for x in around), getattr(n, "nest", None)) for around, n in walk(kernel.body)]
    assert [f for f in found if f[1]] == [("mnk", "C"), ("mn", "E")]


def test_many_loops_beside_each_other_are_no_deep_ones():
    text = f"k {{ {' '.join(f'i:{n} ( s )' for n in range(1, 300))} }}"
    assert show(parse(text)) == text
