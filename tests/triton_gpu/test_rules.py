"""What Triton cannot run is said before a kernel is written for it: parts of buffers, and products that are too large."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import h100
from pallasfuse.emission.pallas_kernel import product_too_large
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import const, read
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Buffer, Contract, Get, Load, Set, Store
from pallasfuse.pallas_backend import cluster_rules, mosaic_rules
from pallasfuse.phases import _PROBLEMS
from pallasfuse.triton_gpu import kernel as triton_gpu
from tests.ir.nested_programs import EXAMPLES, ZERO, F, H, I, M, kernel, over, tile_of

PARTS = {"flat": "e.buf", "kept": "x.buf", "staged": "x.buf", "steps": "x.buf"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_parts_of_buffers(name):
    reason = _PROBLEMS["triton"](EXAMPLES[name].program("masked"))
    assert reason == (f"parts of {PARTS[name]} are read or written, which lies in registers" if name in PARTS else None)
    assert _PROBLEMS["interpret"](EXAMPLES[name].program("masked")) is None


def test_a_buffer_that_is_one_window_is_a_value():
    """With one tile over h, what is added to is a tile like those that loops carry."""
    flat = EXAMPLES["flat"].program("masked")
    wide = {H: 32}

    def widened(s):
        if isinstance(s, Buffer):
            return replace(s, sizes=(8, 32))
        if not hasattr(s, "segments"):
            return s
        segments = [replace(g, body=tuple(map(widened, g.body))) for g in s.segments]
        if s.axis == H:
            segments = [replace(g, tile=32, stop=const(1, "int32")) for g in segments]
        return replace(s, segments=tuple(segments))

    tiles = tuple((a, wide.get(a, t)) for a, t in flat.tiles)
    assert _PROBLEMS["triton"](replace(flat, body=tuple(map(widened, flat.body)), tiles=tiles)) is None


def test_products_are_as_large_as_the_window_that_they_stand_in():
    """A product of three axes each is too large for a block of 4096 positions, but not for pieces of 16."""
    long = Axis("p", 8192)
    a, b = Tensor("a", (M, long), F), Tensor("b", (M, long), F)
    out = Tensor("c", (M, long), F)

    def step(_):
        sides = tile_of("a.t", M, long), tile_of("b.t", M, long)
        return (
            Load("a.t", "a", (M, long), F), Load("b.t", "b", (M, long), F),
            Contract("c.t", (M, long), *sides, (), F), Store("c", (M, long), tile_of("c.t", M, long)),
        )  # fmt: skip

    grid = (M, 128), (long, 4096)
    whole = kernel("whole", (a, b), (out,), grid, grid, *step(0))
    assert "is no matrix product" in product_too_large(whole)
    pieces = over(long, 16, step, "masked", window=4096, inside=True, first=read(f"start.{long}", (), "int32"))
    assert product_too_large(kernel("pieces", (a, b), (out,), grid, grid, pieces)) is None


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "product"])
def test_kernels_of_one_level_refuse_others(name):
    """Those for warpgroups and clusters say what it is; a get or a set alone is enough."""
    program = EXAMPLES[name].program("masked")
    for reason in (mosaic_rules.problem(program), cluster_rules.problem([program])):
        assert "buffers" in reason or "loops inside loops" in reason or "inside a block" in reason
    held = Buffer("b", (I,), (4,), F, ZERO), Get("g", "b", (I,), F), Set("b", (I,), ZERO)
    for s in held:
        assert mosaic_rules.problem(replace(EXAMPLES["product"].program("masked"), body=(s,))) == "it has buffers: b"


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in (*PARTS, "triangle")])
def test_nested_loops_are_lowered_for_triton(name):
    """Every program that the rules let pass, but one whose tiles are no power of two."""
    example = EXAMPLES[name]
    inputs = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in example.inputs().items()}
    lowered = h100.lower(
        lambda *x: triton_gpu.run(example.program("masked"), dict(zip(inputs, x, strict=True))), inputs.values()
    )
    assert h100.triton_calls(lowered.as_text()) == 1
