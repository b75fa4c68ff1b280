"""Schedule trees that break a rule: each is refused with the number of that rule, whatever tiles a target has."""

import jax.numpy as jnp
import pytest

from pallasfuse.errors import Refusal
from pallasfuse.tiling.rules import RULES
from tests.tiling.test_tree_kernels import SUBJECTS as KERNELS
from tests.tiling.tree_programs import TILES, Subject


def tail_of_rows(x):
    m = jnp.mean(x, -1, keepdims=True)
    return jnp.sum(jnp.tanh((x - m) / (1 + m * m)), -1)


SUBJECTS = KERNELS | {"t": Subject(tail_of_rows, ((7, 200),), "s t")}

ILLEGAL = {
    "a tile that does not divide the block": (1, "d", "d { m:64@grid m:48@group n:128 ( k:64 ( C ) E ) }"),
    "a tile that does not divide the tile around it": (1, "d", "d { m:64@grid n:96 ( n:64 ( k:64 ( C ) E ) ) }"),
    "a block that does not divide the block around it": (1, "d", "d { m:96@grid m:64@grid n:64 ( k:64 ( C ) E ) }"),
    "an axis that is not there": (1, "d", "d { z:64@grid n:64 ( k:64 ( C ) E ) }"),
    "blocks inside a loop": (2, "d", "d { n:128 m:64@grid ( k:64 ( C ) E ) }"),
    "two grids": (2, "d", "d { m:64@grid n:64 ( k:64 ( C ) E ) h:64@grid n:64 ( k:64 ( C ) E ) }"),
    "devices inside blocks": (2, "b", "p { b:1@grid j:1024@mesh j:64 ( s m l o ) } q { b:1@grid ( +m +l +o out ) }"),
    "a stream inside devices": (2, "b", "p { b:1@mesh j:1024@time j:64 ( s m l o ) } q { b:1@grid ( +m +l +o out ) }"),
    "blocks beside a loop": (2, "a", "a { h:1@grid ( i:64@grid j:64 ( s m ) j:64 ( s l o ) out ) }"),
    "clusters of two sizes": (
        2, "b", "p { b:1@grid g:1@grid ( j/8@cluster j:64 ( s m l o ) +m +l d:30@cluster ( +o out ) ) }"),
    "other numbers of warpgroups": (
        2, "a", "a { h:1@grid i:128@grid ( i:64@group j:64 ( s m l o ) i:32@group ( j:64 ( s m l o ) out ) ) }"),
    "blocks that cannot run side by side": (
        2, "a", "a { h:1@grid i:128@grid ( j:128 ( s m l o ) out ) } [grid_swizzle=7]"),
    "a reader without what it reads": (3, "a", "a { h:1@grid i:128@grid ( j:128 ( m l o ) out ) }"),
    "what an earlier loop has dropped": (3, "h", "a { h:1@grid i:128@grid ( j:128 ( s m l ) j:128 ( o ) out ) }"),
    "what another body has dropped": (3, "a", "a { h:1@grid i:128@grid ( i:64@group j:64 ( s m l o ) out ) }"),
    "a nest that is not there": (3, "d", "d { m:64@grid n:64 ( k:64 ( C ) F ) }"),
    "a loop over an axis that nothing has": (3, "d", "d { m:64@grid n:64 ( k:64 ( h:16 ( C ) ) E ) }"),
    "a loop around nothing": (3, "d", "d { m:64@grid ( k:64 ( ) n:64 ( k:64 ( C ) E ) ) }"),
    "a state with two steps": (4, "a", "a { h:1@grid i:128@grid ( j:128 ( s m l m o ) out ) }"),
    "a consumer inside the loop of its sum": (6, "d", "d { m:64@grid k:64 ( n:128 ( C E ) ) }"),
    "a map inside the loop of its sum": (6, "a", "a { h:1@grid i:128@grid j:128~2 ( s m l o out ) }"),
    "a step before the one that it reads": (6, "a", "a { h:1@grid i:128@grid ( j:128 ( s l m o ) out ) }"),
    "a frame that only an inner loop has": (6, "a", "a { h:1@grid i:128@grid ( j:64 ( j:32 ( s m ) s l o ) out ) }"),
    "what no fold makes late": (6, "t", "t { i:1@grid j:64 ( s t ) }"),
    "a merge of blocks in their kernel": (7, "b", "p { b:1@grid g:1@grid j/8@grid ( j:64 ( s m l o ) +m +l +o out ) }"),
    "a merge of nothing": (7, "a", "a { h:1@grid i:128@grid ( j:128 ( s m l o ) +m out ) }"),
    "a merge too many": (
        7, "b", "p { b:1@grid j/8@grid j:64 ( s m l o ) } q { b:1@grid ( +m +m +l +o out ) }"),
    "a reader of partial states": (7, "b", "p { b:1@grid j/8@grid j:64 ( s m l o ) } q { b:1@grid ( +m +o out ) }"),
    "a reader in the blocks of the parts": (
        7, "b", "p { b:1@grid j/8@grid ( j:64 ( s m ) j:64 ( s l o ) ) } q { b:1@grid ( +m +l +o out ) }"),
    "partial states of an output": (7, "d", "d { m:64@grid n/2@grid n:64 ( k:64 ( C ) E ) }"),
    "a merge before that of its frame": (7, "b", "p { b:1@grid j/8@grid j:64 ( s m l o ) } q { b:1@grid ( +o +m +l out ) }"),
    "a cluster merged by a later kernel": (7, "D", "p { m:64@grid n:128@cluster ( k:64 ( C ) E ) } q { m:64@grid ( +E ) }"),
    "a merge inside its cluster": (7, "D", "p { m:64@grid n:128@cluster ( k:64 ( C ) E +E ) }"),
    "a merge for one of two levels": (
        7, "D", "p { n:128@mesh m:64@grid n:64@grid ( k:64 ( C ) E ) } q { m:64@grid ( +E ) }"),
    "a kept tensor that is not there": (8, "g", "r { i:1@grid ( z!shared j:128 ( m ) j:128 ( l ) j:128 ( y ) ) }"),
    "a kept nest of the same kernel": (8, "d", "d { m:64@grid ( C!shared n:64 ( k:64 ( C ) E ) ) }"),
    "a kept tensor that nothing reads": (9, "g", "r { i:1@grid ( j:128 ( m ) j:128 ( l ) j:128 ( y ) x!shared ) }"),
    "slots of blocks": (11, "d", "d { m:64@grid~2 n:64 ( k:64 ( C ) E ) }"),
    "an output that nothing computes": (13, "a", "a { h:1@grid i:128@grid ( j:128 ( s m l o ) ) }"),
    "warpgroups with parts of a sum": (14, "d", "d { m:64@grid ( n:64@group ( k:64 ( C ) E ) +E ) }"),
    "a cluster inside a loop": (14, "D", "d { m:64@grid h:20 ( n:128@cluster ( k:64 ( C ) E ) +E ) }"),
    "parts of two axes": (
        14, "j", "p { b:1@grid p/2@grid c/2@grid p:8 ( s m l o ) } q { b:1@grid ( +m +l +o ) } r { b:1@grid ( +m +l +o out ) }"),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name):
    rule, subject, text = ILLEGAL[name]
    for tiles in TILES.values():
        found = SUBJECTS[subject].lowered(text, tiles)
        assert isinstance(found, Refusal), "\n".join(map(str, found))
        assert found.reason.startswith(f"rule {rule} ({RULES[rule]}): ")


def test_every_rule_that_is_checked():
    """Finished values (5) are where the walk puts them, bounds (10) are derived, space (12) is a device's."""
    assert {rule for rule, _, _ in ILLEGAL.values()} == RULES.keys() - {5, 10, 12}
