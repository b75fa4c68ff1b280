"""Products whose operands come slice by slice, inside the rolled loop of a kernel for warpgroups: interpreted, looking for races.

`tests/aot` compiles them through ptxas.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallasfuse as pf
from pallasfuse import execution, pipeline, placement
from pallasfuse.ir.tensors import Tensor
from pallasfuse.pallas_backend import interpret, mosaic_gpu, mosaic_rules
from pallasfuse.pallas_backend.mosaic_block import Block
from pallasfuse.pallas_backend.mosaic_shape import Slices
from pallasfuse.tiling import states
from tests.losses import FORMS, LOSSES, difference, tied, with_everything

TARGET = "mosaic_gpu"
ULPS = {"float16": 3e-3, "bfloat16": 2e-2}
"""Beside 1.5 times the plain error: of logits of about 10, a few roundings."""


def arguments(shapes, rows, dtype):
    """Matrices of rows, matrices of columns, vectors, and labels."""
    random = np.random.default_rng(0)
    arrays = [random.normal(size=s) for s in shapes]
    arrays[1] *= 3 / shapes[0][-1] ** 0.5
    columns = next(n for n in shapes[1] if n != shapes[0][-1])
    labels = jnp.asarray(random.integers(0, columns, rows), jnp.int32)
    return [*(jnp.asarray(a, dtype) for a in arrays), labels]


def kernel_of(function, arrays, **options):
    plan = pf.fuse(function, options=pf.FuseOptions(target=TARGET, **options)).explain(*arrays)
    (kernel,) = plan.kernels
    return plan, kernel


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """Runs the kernel of a function, and the rest of it, on the CPU; a race is an error."""
    monkeypatch.setitem(execution._EMITTERS, TARGET, functools.partial(mosaic_gpu.run, interpret=True))
    monkeypatch.setitem(execution._EMITTERS, "triton", interpret.run)
    monkeypatch.setattr(mosaic_gpu, "_multiprocessors", lambda: 2)

    def run(function, arrays, **options):
        plan, kernel = kernel_of(function, arrays, **options)
        assert kernel.target.name == TARGET, kernel.declined
        assert mosaic_rules.examine(kernel.program).slices and plan.fallbacks == ()
        results = jax.block_until_ready(execution.execute(plan, [*plan.converted.jaxpr.consts, *arrays]))
        if "RACE DETECTED" in capfd.readouterr().out:
            raise RuntimeError("a race")
        return results[0]

    return run


def assert_as_accurate_as_plain(got, function, arrays):
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) if a.dtype != jnp.int32 else np.asarray(a) for a in arrays]
        exact = np.asarray(function(*wide))
    plain = np.abs(np.asarray(jax.jit(function)(*arrays), np.float64) - exact).max()
    error = np.abs(np.asarray(got, np.float64).reshape(exact.shape) - exact).max()
    assert error <= max(ULPS[arrays[0].dtype.name], 1.5 * plain)


@pytest.mark.deep  # `test_sizes` compares one of them, too
@pytest.mark.parametrize(
    ("function", "dtype"),
    [*((f, "bfloat16") for f in LOSSES), (difference, "float16")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_losses(interpreted, function, dtype):
    arrays = arguments(((128, 320), (320, 512)), (128,), dtype)
    assert_as_accurate_as_plain(interpreted(function, arrays), function, arrays)


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize(
    ("rows", "features", "columns", "options"),
    [
        (200, 264, 520, {}),  # nothing divides its tile
        (300, 400, 776, {"parts": 1}),  # several blocks for each instance, several trips
        (280, 1032, 304, {"tiles": (("i", 64),)}),  # one warpgroup
        (128, 520, 768, {"parts": 3}),
    ],
)
def test_sizes(interpreted, rows, features, columns, options):
    arrays = arguments(((rows, features), (features, columns)), (rows,), "bfloat16")
    assert_as_accurate_as_plain(interpreted(difference, arrays, **options), difference, arrays)


@pytest.mark.deep
@pytest.mark.parametrize("stages", [1, 7])
def test_stages(interpreted, stages):
    arrays = arguments(((128, 328), (328, 512)), (128,), "bfloat16")
    tiles = (("k", 128),)
    assert_as_accurate_as_plain(interpreted(difference, arrays, stages=stages, tiles=tiles), difference, arrays)


SMALL = {
    "two axes of rows": ((2, 70, 320), (320, 520)),
    "a bias": ((140, 320), (320, 520), (520,)),
    "a matrix whose rows are the columns": ((140, 320), (520, 320)),
    "ignored labels": ((140, 320), (320, 520)),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", FORMS)
def test_other_forms(interpreted, name):
    function, shapes = FORMS[name][0], SMALL[name]
    arrays = arguments(shapes, shapes[0][:-1], "bfloat16")
    assert_as_accurate_as_plain(interpreted(function, arrays), function, arrays)


@pytest.mark.deep  # tests/pallas_backend/test_mosaic_gpu.py plants such a race, too
def test_a_missing_wait_is_a_race(interpreted, monkeypatch):
    multiply = Block._sum_of_slices

    def impatient(block, slices, size):
        with monkeypatch.context() as patched:
            patched.setattr(plgpu, "barrier_wait", lambda *args: None)
            return multiply(block, slices, size)

    monkeypatch.setattr(Block, "_sum_of_slices", impatient)
    with pytest.raises(Exception, match=r"(?i)race"):
        interpreted(difference, arguments(((128, 320), (320, 512)), (128,), "bfloat16"))


def no_last_slice(monkeypatch):
    monkeypatch.setattr(Slices, "count", property(lambda s: s.axis.extent // s.size))


def rows_of_the_other_warpgroup(monkeypatch):
    mine = Block._mine

    def swapped(block, load, slot):
        own, block.warpgroup = block.warpgroup, 1 - block.warpgroup
        try:
            return mine(block, load, slot)
        finally:
            block.warpgroup = own

    monkeypatch.setattr(Block, "_mine", swapped)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("plant", [no_last_slice, rows_of_the_other_warpgroup], ids=lambda f: f.__name__)
def test_planted_mistakes_are_seen(interpreted, monkeypatch, plant):
    arrays = arguments(((128, 328), (328, 512)), (128,), "bfloat16")
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_as_accurate_as_plain(interpreted(difference, arrays), difference, arrays)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("function", [difference, with_everything, tied], ids=lambda f: f.__name__)
def test_every_phase_is_proved(function):
    shapes = ((128, 264), (520, 264) if function is tied else (264, 520))
    plan, kernel = kernel_of(function, arguments(shapes, (128,), "bfloat16"))
    assert kernel.target.name == TARGET and len(kernel.phases) == 2
    proof = pipeline.prove_plan(plan, delta=1e-4)
    assert proof.holds, (proof.counterexample, proof.uncovered)


def test_all_multiprocessors_are_busy_to_the_end():
    """32 blocks of rows by 501 tiles: fewer than 123 rounds of 132 trips, and little memory for states."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (4096, 128256))]
    _, kernel = kernel_of(difference, [*shapes, jax.ShapeDtypeStruct((4096,), jnp.int32)])
    schedule = kernel.schedule
    assert (schedule.rolled_tile, schedule.persistent) == (256, True)
    rounds = -(-32 * schedule.parts // 132) * -(-501 // schedule.parts)
    assert rounds <= 123
    states = sum(math.prod(a.extent for a in t.axes) * 4 for t in kernel.program.outputs)
    assert states < 0.02 * 4096 * 128256 * 2


def weighted(x, w, y):
    return jnp.einsum("nk,kd->nd", x, w, preferred_element_type=jnp.float32) * jax.nn.logsumexp(y, -1)[:, None]


@pytest.mark.deep  # `test_sizes` has the same bound on errors
def test_a_long_tile_of_the_loop_is_no_long_sum(monkeypatch):
    """A sum over the loop's own axis goes on from trip to trip."""
    monkeypatch.setitem(execution._EMITTERS, "triton", interpret.run)
    monkeypatch.setitem(execution._EMITTERS, TARGET, functools.partial(mosaic_gpu.run, interpret=True))
    random = np.random.default_rng(0)
    shapes = ((64, 1024), (1024, 64), (64, 1024))
    arrays = [jnp.asarray(random.normal(size=s), jnp.bfloat16) for s in shapes]
    options = pf.FuseOptions(tiles=(("j", 512), ("k", 512)), stages=1)
    plan = pf.fuse(weighted, options=options).explain(*arrays, target=TARGET)
    shapes_of = [mosaic_rules.examine(k.program) for k in plan.kernels if k.target.name == TARGET]
    assert shapes_of and all(not s.slices for s in shapes_of)
    (got,) = execution.execute(plan, [*plan.converted.jaxpr.consts, *arrays])
    np.testing.assert_allclose(got, weighted(*arrays), rtol=0.02, atol=0.5)


def attention_over_features(h, w, v):
    return jax.nn.softmax(h @ w, axis=-1) @ v


def test_the_tiling_that_fits_in_parts_is_taken():
    """Beside a second product, whose operand is streamed too, wider tiles and deeper pipelines do not fit into shared memory."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 1024), (1024, 32768), (32768, 128))]
    _, kernel = kernel_of(attention_over_features, shapes)
    assert kernel.target.name == TARGET and kernel.schedule.parts > 1


@pytest.mark.parametrize("function", [difference, attention_over_features], ids=lambda f: f.__name__)
def test_a_state_of_a_piece_goes_to_a_target_that_can(function):
    """Triton has no kernel for long sums: the state of a piece of float32 columns is made by loops of XLA."""
    more = [((8192, 64), "float32")] if function is attention_over_features else [((1024,), "int32")]
    shapes = [((1024, 1024), "float32"), ((1024, 8192), "float32"), *more]
    plan = pf.fuse(function).explain(*(jax.ShapeDtypeStruct(s, jnp.dtype(t)) for s, t in shapes), target=TARGET)
    (kernel,) = plan.kernels
    group = kernel.group
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}
    given = {t: {d: a for d, a in enumerate(tensors[t].axes) if a == group.rolled} for t in group.inputs}
    piece = states.localize(group, tensors, {group.rolled: 2048}, given)
    assert placement.phase_of_state(group, piece, plan.target, pf.FuseOptions()).target.name == "xla_gpu"


def two_products(h, w, v):
    """Both take the rows."""
    return jax.nn.logsumexp((h @ w) * jnp.tanh(h @ v), axis=-1)


def test_what_is_read_beside_the_product_is_not_taken_in_slices():
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 2048), (2048, 32768), (2048, 32768))]
    _, kernel = kernel_of(two_products, shapes)
    assert kernel.target.name == "xla_gpu"
    assert "which takes it slice by slice" in kernel.declined[0]
