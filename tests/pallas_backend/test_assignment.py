"""Which blocks a persistent kernel gives to which of its instances."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from benchmarks.cases import ATTENTION
from pallasfuse.emission.pallas_kernel import block_starts
from pallasfuse.ir.tile_program import Loop, block_start
from pallasfuse.pallas_backend.mosaic_gpu import assignment
from pallasfuse.price.visited_tiles import trips
from tests.pallas_backend.test_mosaic_gpu import TARGET

CASES = {c.name: c for c in ATTENTION}


def program_of(name, length):
    case = CASES[name]
    arrays = jax.eval_shape(lambda: case.arrays(length, jnp.float16))
    (kernel,) = case.fused.explain(*arrays, *case.static, target=TARGET).kernels
    (loop,) = (s for s in kernel.program.body if isinstance(s, Loop))
    return kernel.program, loop


@pytest.mark.sampled(3)
@pytest.mark.parametrize("instances", [1, 7, 132])
@pytest.mark.parametrize(("name", "length"), [("causal", 2048), ("gqa", 1000), ("window", 2048)])
def test_every_block_runs_once(name, length, instances):
    program, loop = program_of(name, length)
    blocks = int(np.prod([-(-a.extent // t) for a, t in program.grid]))
    table = assignment(program, loop, blocks, instances)
    given = [list(row[1 : 1 + row[0]]) for row in table]
    assert sorted(itertools.chain(*given)) == list(range(blocks))
    assert table.shape[1] == 2 + max(map(len, given))


def test_long_blocks_are_shared_out():
    program, loop = program_of("causal", 2048)
    table = assignment(program, loop, 512, 132)

    def work(number):
        starts = {block_start(a): s for a, s in block_starts(program, int(number)).items()}
        return trips(loop, starts)

    loads = [sum(work(n) for n in row[1 : 1 + row[0]]) for row in table]
    assert max(loads) <= 1.06 * sum(loads) / len(loads)


def test_equal_blocks_need_no_table():
    program, loop = program_of("global", 2048)
    assert assignment(program, loop, 256, 132) is None


@pytest.mark.parametrize("heads_tile", [1, 2, 5])
def test_tiles_that_are_asked_for(heads_tile):
    """As many blocks run side by side as there are."""

    def shared(q, k, v):
        s = jnp.einsum("bihd,bjd->bihj", q, k, preferred_element_type=jnp.float32)
        s = jnp.where(jnp.arange(256)[:, None, None] >= jnp.arange(256), s, -jnp.inf)
        return jnp.einsum(
            "bihj,bjd->bihd", jax.nn.softmax(s, -1).astype(v.dtype), v, preferred_element_type=jnp.float32
        )

    arrays = [jax.ShapeDtypeStruct(s, jnp.float16) for s in ((2, 256, 96, 64), (2, 256, 64), (2, 256, 64))]
    (kernel,) = pf.fuse(shared).explain(*arrays, target=TARGET).kernels
    heads, rows = (next(a.name for a, _ in kernel.program.grid if a.extent == n) for n in (96, 256))
    options = pf.FuseOptions(tiles=((rows, 128), (heads, heads_tile)))
    (kernel,) = pf.fuse(shared, options=options).explain(*arrays, target=TARGET).kernels
    blocks = int(np.prod([-(-a.extent // t) for a, t in kernel.program.grid]))
    assert len({tuple(block_starts(kernel.program, n).values()) for n in range(blocks)}) == blocks


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("together", [1, 2, 8, 32])
def test_numbers_and_starts_of_blocks_correspond(together):
    program, _ = program_of("causal", 2048)
    program = replace(program, interleave=together)
    seen = {tuple(block_starts(program, n).values()) for n in range(512)}
    assert len(seen) == 512
    first = [block_starts(program, n) for n in range(together)]
    rows = program.grid[-1][0]
    assert {s[rows] for s in first} == {2048 - 128}
    traced = jax.jit(lambda n: block_starts(program, n))
    assert all(
        {a: int(s) for a, s in traced(jnp.int32(n)).items()} == block_starts(program, n) for n in (0, 5, 100, 511)
    )
