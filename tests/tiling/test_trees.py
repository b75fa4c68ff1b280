"""Schedule trees lowered to kernels: every kernel of a tree computes what the function does, on all machines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.region import region_of_program
from pallasfuse.ir.tree import parse, renamed
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from tests.programs_by_name import program_of


def region_of(function, *shapes):
    program = deduplicate(program_of(function, *shapes))
    return region_of_program(program, Graph(program).inlined())


def lowered(region, text, names, tiles):
    """names: of the region's nests, in their order."""
    tree = renamed(parse(text), {}, dict(zip(names.split(), (n.name for n in region.nests), strict=True)))
    return lower_tree(region, tree, FoldsOnDemand(region), tiles)


def chain(a, b, d):
    return (a @ b) @ d


def attend(q, k, v):
    i, j = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    s = jnp.where(i[:, None] >= j[None, :], jnp.einsum("hid,hjd->hij", q, k) * 0.125, -jnp.inf)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(s, -1), v)


def norm_and_product(x, g, w):
    return (x * g) @ w * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 0.125)


CHAIN = chain, ((48, 40), (40, 56), (56, 72)), "C E"  # axes i, j, k, l
ATTEND = attend, ((2, 50, 24),) * 2 + ((2, 50, 40),), "s m l o"  # axes i, j; m: keys, n: features
NORM = norm_and_product, ((50, 40), (40,), (40, 60)), "y q z"
ROWS = (lambda x: jax.nn.softmax(x, -1)), ((10, 300),), "m l y"
VARIANCE = (lambda x: jnp.var(x, -1)), ((10, 300),), "s q v"

LEGAL = {
    "deep chain": (CHAIN, "d { i:16@grid l:32@grid i:16@group k:32~2 ( j:16 ( C ) E ) }"),
    "flat chain": (CHAIN, "d { i:16@grid i:16@group k:32 ( j:16~2 ( C ) l:16~2 ( E ) ) }"),
    "chain in a cluster": (CHAIN, "d { i:16@grid ( k:32@cluster i:16@group ( j:16 ( C ) l:16 ( E ) ) l:36@cluster ( +E ) ) }"),
    "one loop": (ATTEND, "a { i:1@grid j:16@grid j:8@group ( m:16~2 ( s m l o ) ) } [persistent ping_pong]"),
    "two loops": (ATTEND, "a { i:1@grid j:16@grid ( m:16 ( s m l ) m:16 ( s o ) ) }"),
    "pieces of pieces": (ATTEND, "a { i:1@grid j:16@grid m:32 m:16 ( s m l o ) }"),
    "split": (ATTEND, "p { i:1@grid j:16@grid m/2@grid m:16 ( s m l o ) } q { i:1@grid j:16@grid ( +m +l +o ) }"),
    "cluster": (ATTEND, "p { i:1@grid j:16@grid ( m/2@cluster m:16 ( s m l o ) +m +l n:20@cluster ( +o ) ) }"),
    "stream": (ATTEND, "p { m:32@time i:1@grid j:16@grid m:16 ( s m l o ) } q { i:1@grid j:16@grid ( +m +l +o ) }"),
    "mesh": (ATTEND, "p { m:32@mesh i:1@grid m/2@grid m:16 ( s m l o ) } h { i:1@grid ( +m +l +o ) }"
             " all { i:1@mesh i:1@grid ( +m +l +o ) }"),
    "norm and product": (NORM, "l { i:32@grid k:32@grid i:16@grid i:8@group ( j:16~3 ( q y ) z ) } [persistent]"),
    "three passes": (ROWS, "r { i:1@grid ( j:128 ( m ) j:128 ( l ) j:128 ( y ) ) }"),
    "a kept row": (ROWS, "r { i:1@grid ( x!shared j:64 ( m ) j:64 ( l ) j:128 ( y ) ) }"),
    "a kept row in a cluster": (
        ROWS, "r { i:1@grid ( x!shared j:128@cluster j:64 ( m ) +m j:128@cluster j:64 ( l ) +l j:128@cluster j:64 ( y ) ) }"),
    "moments": (VARIANCE, "r { i:2@grid ( j:64 ( s q ) v ) }"),
    "moments in pieces": (VARIANCE, "r { i:2@grid ( j:128 j:32 ( s q ) v ) }"),
    "moments in parts": (VARIANCE, "r { i:2@grid j/4@grid j:32 ( s q ) } q { i:2@grid ( +s +q v ) }"),
}  # fmt: skip


@pytest.mark.sampled(6, cover=("tails",))
@pytest.mark.parametrize(
    "tails", [Tiles("exact"), Tiles("masked"), Tiles("masked", 16)], ids=["exact", "masked", "dots"]
)
@pytest.mark.parametrize("name", LEGAL)
def test_a_tree_computes_what_the_function_does(name, tails):
    (function, shapes, names), text = LEGAL[name]
    region = region_of(function, *shapes)
    programs = lowered(region, text, names, tails)
    assert not isinstance(programs, Refusal), programs
    rng = np.random.default_rng(0)
    have = {t.name: rng.standard_normal([a.extent for a in t.axes]).astype(np.float32) for t in region.inputs}
    with jax.enable_x64():
        want = function(*(have[t.name].astype(np.float64) for t in region.inputs))
    for program in programs:
        have |= evaluate_tiles(program, have, move_last_block_back=tails.tails == "exact")
    np.testing.assert_allclose(have[region.outputs[0]], want, rtol=1e-9, atol=1e-9)
