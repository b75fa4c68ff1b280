"""A kernel of one block without loops is a program of XLA's, and costs no less than one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse.device import assumed
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.judging import Judge
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.price import cpu
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.without_loops import WITHOUT_LOOPS, as_program
from pallasfuse.price.xla import price_xla
from pallasfuse.targets import find

XLA = find("xla")


def kernels_of(function, *arguments, **asked):
    options = pf.FuseOptions(target="xla", price=False, **asked)
    return [p.program for k in pf.fuse(function, options=options).explain(*arguments).kernels for p in k.phases]


def rounded(x, y):
    """A product that is rounded to half precision, stored, and read by what comes after it."""
    product = jnp.matmul(x, y)
    return product, jnp.sum(jnp.exp(-jnp.square(product - jnp.max(product, -1, keepdims=True))), -1)


def shared_softmax(x, w):
    p = jax.nn.softmax(x @ w, axis=-1)
    return p @ w.T, jnp.log(p).sum(-1)


PROGRAMS = {
    "softmax of a product": (shared_softmax, kernels.array(24, 16), kernels.array(16, 20)),
    "masked mean": (
        lambda x, y: jnp.where(x > y, x, 0.0).sum(-1) / (x > y).sum(-1),
        kernels.array(12, 30),
        kernels.array(12, 1),
    ),
    "rounded product": (rounded, kernels.array(6, 8, dtype=jnp.float16), kernels.array(8, 4, dtype=jnp.int32)),
    "turned result": (
        lambda x, y: jnp.tanh(jnp.einsum("nk,np->pk", x, y) * y.sum(0)[:, None]),
        kernels.array(8, 6),
        kernels.array(8, 10),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_computes_what_the_kernel_does(name):
    function, *arguments = PROGRAMS[name]
    programs = kernels_of(function, *arguments)
    assert programs
    rng = np.random.default_rng(0)
    for program in programs:
        plain = as_program(program)
        assert len({n.name for n in plain.nests}) == len(plain.nests)
        tensors = {t.name: rng.uniform(0.5, 2, [a.extent for a in t.axes]) for t in program.inputs}
        found, wanted = evaluate(plain, tensors), evaluate_tiles(program, tensors)
        for t in program.outputs:
            np.testing.assert_allclose(found[t.name], wanted[t.name], rtol=1e-12)


def test_what_has_loops_is_none():
    attention = kernels.array(2048, 4, 64)
    (program,) = kernels_of(lambda q: kernels.attention(q, q, q), attention, tiles=(("i", 128),))
    assert as_program(program) is None


def test_several_blocks_without_loops_are_none():
    (program,) = kernels_of(jax.nn.softmax, kernels.array(64, 32))
    (axis,) = (a for a, _ in program.grid)
    assert as_program(program) is not None
    tiles = tuple((a, 8 if a is axis else t) for a, t in program.tiles)
    assert as_program(replace(program, grid=((axis, 8),), tiles=tiles)) is None


def test_a_result_that_is_stored_as_it_is_is_not_copied():
    (program,) = kernels_of(lambda x, y: jnp.exp(x) @ y, kernels.array(64, 32), kernels.array(32, 48))
    plain = as_program(program)
    assert [n.name for n in plain.nests] == list(plain.outputs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_not_cheaper_than_xla(name):
    function, *arguments = PROGRAMS[name]
    device = assumed("cpu")
    programs = kernels_of(function, *arguments)
    assert programs
    for program in programs:
        plain = price_xla(as_program(program), device).us
        assert price_kernel([(program, XLA.on(device))]).us == max(plain, cpu.price([program], device).us)


def test_xla_s_price_is_the_larger_one_where_rows_are_read_again():
    def normalised(x, y):
        e = jnp.exp(x)
        return e / e.sum(-1, keepdims=True) * y, (e * y).sum(-1)

    (program,) = kernels_of(normalised, kernels.array(128, 320), kernels.array(128, 320))
    device = assumed("cpu")
    plain = price_xla(as_program(program), device).us
    assert price_kernel([(program, XLA.on(device))]).us == plain > cpu.price([program], device).us


@pytest.mark.parametrize(("rows", "margins"), [(24, (1.0, 1.25)), (100_000, (0.8, 1.25))], ids=["one block", "loops"])
def test_a_clock_is_not_asked_about_a_kernel_without_loops_that_is_not_predicted_to_be_faster(rows, margins):
    """Its price errs as that of XLA's program does, so that it is no chance for a clock."""
    shape = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    (kernel,) = pf.fuse(jax.nn.softmax, options=pf.FuseOptions(target="xla", price=False)).explain(shape).kernels
    price = price_kernel([(p.program, p.target) for p in kernel.phases])
    assert any(t.name == WITHOUT_LOOPS for t in price.terms) == (rows == 24)
    nothing = LoopProgram((), (), ())
    found = []
    for timed in (True, False):
        target = replace(XLA, device=replace(XLA.device, price_error=1.25)).judged(timed=timed, one_device=True)
        found.append(Judge(Graph(nothing), target, lambda *_: price).margin_for(kernel.group, price))
    assert tuple(found) == margins
