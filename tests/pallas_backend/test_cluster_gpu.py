"""Kernels of clusters without a Hopper GPU: Mosaic's interpreter runs them and looks for races; they lower for CUDA.

`tests/aot` compiles them through ptxas, `tests/gpu` runs them. Only there do states go through distributed shared memory.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallasfuse as pf
from benchmarks import h100
from pallasfuse import execution
from pallasfuse.emission.interpreter import Tile
from pallasfuse.errors import TargetError
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import apply
from pallasfuse.ir.tile_program import Let, Loop
from pallasfuse.pallas_backend import cluster_compute, cluster_gpu, cluster_rules
from pallasfuse.resources import exponentials
from pallasfuse.tiling import arithmetic
from tests.pallas_backend.rows import ROWS, softmax
from tests.pallas_backend.test_mosaic_gpu import in_float64

TARGET = "mosaic_cluster"


def kernel_of(function, arrays, *, parts=2, tile=1024):
    (chosen,) = pf.fuse(function, target=TARGET).explain(*arrays).kernels
    options = pf.FuseOptions(target=TARGET, parts=parts, tiles=((chosen.schedule.rolled.name, tile),))
    plan = pf.fuse(function, options=options).explain(*arrays)
    (kernel,) = plan.kernels
    return plan, kernel


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """Runs the only kernel of a function, and the rest of it, on the CPU; a race is an error."""
    monkeypatch.setitem(execution._TOGETHER, TARGET, functools.partial(cluster_gpu.run, interpret=True))

    def run(function, arrays, **schedule):
        plan, kernel = kernel_of(function, arrays, **schedule)
        assert kernel.target.name == TARGET, kernel.declined
        results = jax.block_until_ready(execution.execute(plan, [*plan.converted.jaxpr.consts, *arrays]))
        if "RACE DETECTED" in capfd.readouterr().out:
            raise RuntimeError("a race")
        return results

    return run


def compare(function, arrays, ours):
    exact = in_float64_but_integers(function, arrays)
    own = jax.tree.leaves(jax.jit(function)(*arrays))
    for mine, theirs, truth in zip(ours, own, exact, strict=True):
        ulp = float(jnp.finfo(theirs.dtype).eps) * np.abs(truth).max()
        errors = [np.abs(np.asarray(x, np.float64) - truth).max() for x in (mine, theirs)]
        assert errors[0] <= 1.5 * errors[1] + 2 * ulp


def in_float64_but_integers(function, arrays):
    if all(jnp.issubdtype(a.dtype, jnp.floating) for a in arrays):
        return in_float64(function, arrays)
    labels = {n: a for n, a in enumerate(arrays) if not jnp.issubdtype(a.dtype, jnp.floating)}
    floats = [a for n, a in enumerate(arrays) if n not in labels]

    def of_floats(*given):
        rest = iter(given)
        return function(*(labels[n] if n in labels else next(rest) for n in range(len(arrays))))

    return in_float64(of_floats, floats)


@pytest.mark.deep  # `test_parts_and_tiles` compares the same, in other tiles
@pytest.mark.parametrize("name", ROWS)
def test_kernels_compute_what_the_function_does(interpreted, name):
    """The last part ends with a tile that reaches past the end of a row."""
    arrays = ROWS[name].arrays(2, 3 * 1024 + 200, "float16")
    compare(ROWS[name].function, arrays, interpreted(ROWS[name].function, arrays))


@pytest.mark.sampled(16, cover=())
@pytest.mark.parametrize("name", ["softmax", "layer norm", "several", "three passes"])
@pytest.mark.parametrize(("columns", "parts", "tile"), [(5000, 1, 1024), (2048, 2, 1024), (5096, 2, 2048)])
def test_parts_and_tiles(interpreted, name, columns, parts, tile):
    """One block has everything; every block one tile; they have two and one."""
    arrays = ROWS[name].arrays(2, columns, "float32")
    compare(ROWS[name].function, arrays, interpreted(ROWS[name].function, arrays, parts=parts, tile=tile))


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", ["softmax", "layer norm"])
def test_a_part_without_a_tile(interpreted, name):
    arrays = ROWS[name].arrays(2, 4096, "float32")
    compare(ROWS[name].function, arrays, interpreted(ROWS[name].function, arrays, parts=3, tile=1024))


def test_rows_with_special_values(interpreted):
    (x,) = ROWS["softmax"].arrays(6, 3 * 1024 + 200, "float32")
    x = x.at[0, 3].set(jnp.nan).at[1, 2000].set(jnp.inf).at[2].set(-jnp.inf)
    x = x.at[3, :2500].set(-jnp.inf).at[4, -1].set(jnp.nan)
    (ours,) = interpreted(softmax, [x])
    np.testing.assert_allclose(ours, softmax(x), rtol=2e-6, atol=1e-9)


def test_quotients_by_huge_and_tiny_values(interpreted):
    """The inverse of neither overflows nor is lost."""

    def scaled(x):
        y = x.astype(jnp.float32)
        return (y / y.max(-1, keepdims=True)).astype(x.dtype)

    (x,) = ROWS["softmax"].arrays(4, 3 * 1024 + 200, "float32")
    x = (x * 2.0 ** jnp.array([124, -124, 0, 60])[:, None]).astype(jnp.bfloat16)
    (ours,) = interpreted(scaled, [x])
    exact = np.asarray(x, np.float64)  # XLA itself multiplies by an inverse, which it flushes to zero
    np.testing.assert_allclose(
        np.asarray(ours, np.float64), exact / exact.max(-1, keepdims=True), rtol=2**-7, atol=2**-4 * 2**-7
    )


def _without_the_last_part(real, self, tile, reducer, over):
    array = tile.array[:-1] if self.shape.parts in tile.axes else tile.array
    return real(self, Tile(array, tile.axes), reducer, over)


def _nothing_is_past_the_end(real, self, window):
    return jnp.minimum(real(self, window), self.shape.rolled.extent - 1)


def _by_the_first_buffer(real, programs, rolled, streams):
    return dict.fromkeys(real(programs, rolled, streams), streams[0].tensor)


def _as_if_all_were_its_own(real, self, done, after, window):
    return Tile(after, ())


def _of_the_first_segment(real, self, loop, state, scope):
    return real(self, replace(loop, segments=loop.segments[:1]), state, scope)


def _of_one_thread(real, self, loop, state, scope):
    return tuple(x[0] if jnp.ndim(x) else x for x in state)


MISTAKES = {
    "threads do not meet": (cluster_compute.Phase, "after_trips", _of_one_thread, "softmax"),
    "a thread has seen what all have": (cluster_compute.Phase, "visited_by_state", _as_if_all_were_its_own, "far norm"),
    "threads meet before the end": (cluster_compute.Phase, "after_trips", _of_the_first_segment, "far norm"),
    "a part is forgotten": (cluster_compute.Phase, "_fold", _without_the_last_part, "softmax"),
    "no mask at the end": (cluster_compute.Phase, "positions", _nothing_is_past_the_end, "softmax"),
    "results share a buffer": (cluster_rules, "leaving", _by_the_first_buffer, "several"),
    "nobody waits": (plgpu, "barrier_wait", lambda real, *args: None, "softmax"),
}


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(interpreted, monkeypatch, mistake):
    owner, attribute, instead, name = MISTAKES[mistake]
    monkeypatch.setattr(owner, attribute, functools.partialmethod(_call, getattr(owner, attribute), instead)
                        if isinstance(owner, type) else functools.partial(instead, getattr(owner, attribute)))  # fmt: skip
    far = name == "far norm"
    rows = ROWS["layer norm" if far else name]
    arrays = rows.arrays(2, 3 * 1024 + 200, "float32" if far else "float16")
    arrays = [arrays[0] + 3000, *arrays[1:]] if far else arrays
    with pytest.raises((AssertionError, RuntimeError)) as found:
        compare(rows.function, arrays, interpreted(rows.function, arrays))
    assert found.type is AssertionError or str(found.value) == "a race" or "RACE DETECTED" in str(found.value)


def _call(self, real, instead, *args):
    return instead(real, self, *args)


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("name", [n for n in ROWS if n not in ("three passes", "cross entropy")])
def test_phases_in_float64(name):
    """What each phase leaves is what the next one takes."""
    variant = ROWS[name]
    arrays = variant.arrays(2, 3 * 1024 + 200, "float32")
    plan, kernel = kernel_of(variant.function, arrays)
    assert kernel.target.name == TARGET and len(kernel.phases) == kernel.group.passes + 1
    names = {var: name for name, var in plan.converted.variable.items()}
    values = dict(zip((names[v] for v in plan.converted.jaxpr.invars), arrays, strict=True))
    known = {
        t: np.asarray(v, np.float64 if jnp.issubdtype(v.dtype, jnp.floating) else v.dtype) for t, v in values.items()
    }
    for phase in kernel.phases:
        known |= evaluate_tiles(phase.program, known)
    expected = dict(zip((names.get(v) for v in plan.converted.jaxpr.outvars), in_float64_but_integers(variant.function, arrays),
                        strict=True))  # fmt: skip
    compared = [n for n in expected if n in known]
    for found in compared:
        np.testing.assert_allclose(known[found].reshape(expected[found].shape), expected[found], rtol=1e-5, atol=1e-6)
    assert compared


def test_the_kernel_is_one_call_of_a_cluster():
    arrays = [jax.ShapeDtypeStruct((64, 128256), jnp.float16)]
    text = h100.lower(pf.fuse(softmax, target=TARGET), arrays).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1


def program_of(function, arrays, **schedule):
    return [p.program for p in kernel_of(function, arrays, **schedule)[1].phases]


def test_results_leave_by_the_buffers_of_what_is_read_no_more():
    shapes = ROWS["several"].arrays(2, 4096, "float16")
    found = cluster_rules.examine(program_of(ROWS["several"].function, shapes))
    assert sorted(set(found.buffers.values()) - set(found.buffers)) == [found.streams[0].tensor]
    assert len(set(found.buffers.values())) == 2


def test_vectors_that_one_loop_reads_have_no_buffer():
    found = cluster_rules.examine(
        program_of(ROWS["layer norm"].function, ROWS["layer norm"].arrays(2, 4096, "float16"))
    )
    assert (len(found.streams), len(found.passing)) == (1, 2)


def test_states_are_words_of_the_cluster():
    found = cluster_rules.examine(program_of(softmax, ROWS["softmax"].arrays(2, 4096, "float16")))
    assert found.blocks == 2 and found.slots == 2 and found.vector == 8
    assert [len(states) for states in found.states] == [3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda value: value.args[1], "is no sum"),
        (lambda value: apply("mul", value, value), "is no sum"),
        (lambda value: value.args[0], "do not become one"),
    ],
    ids=["forgets what was", "another way", "reduces nothing"],
)
def test_states_that_threads_cannot_merge_are_refused(change, reason):
    first, last = program_of(softmax, ROWS["softmax"].arrays(2, 4096, "float16"))
    loop = next(s for s in first.body if isinstance(s, Loop))
    state = next(s for s in loop.segments[0].body if isinstance(s, Let) and s.name == "t7.acc0.next")
    segments = tuple(
        replace(g, body=tuple(replace(s, value=change(s.value)) if s.name == state.name else s for s in g.body))
        for g in loop.segments
    )
    other = replace(first, body=tuple(replace(s, segments=segments) if s is loop else s for s in first.body))
    assert reason in cluster_rules.examine((other, last))


def test_moments_of_threads_far_from_zero(interpreted):
    """A thread's frames are where its own elements lie, of which it sees fewer than the block does."""
    x, w, b = ROWS["layer norm"].arrays(2, 3 * 1024 + 200, "float32")
    compare(ROWS["layer norm"].function, (x + 3000, w, b), interpreted(ROWS["layer norm"].function, (x + 3000, w, b)))


@pytest.mark.parametrize(
    ("axis", "size", "parts", "tile", "reason"),
    [
        (-1, (4, 4100), 2, 1024, "no multiple of 16"),
        (-1, (4, 900), 2, 1024, "no loop"),
        (0, (65536, 64), 2, 1024, "not contiguous"),
        (-1, (4, 4096 * 128), 2, 1024, "shared memory"),
        (-1, (64, 66 * 1024 + 8), 2, 1024, "barriers for 32"),
        (-1, (4, 1024 * 64), 32, 1024, "states of 32 parts"),
        (-1, (4, 1024 * 64), 2, 32768, "do not share 32768 elements"),
    ],
    ids=["stride", "short", "columns", "space", "many tiles", "large cluster", "large tile"],
)
def test_what_cannot_be_run_is_refused_with_the_reason(axis, size, parts, tile, reason):
    arrays = [jax.ShapeDtypeStruct(size, jnp.float16)]
    options = pf.FuseOptions(target=TARGET, parts=parts, tiles=((("i" if axis == 0 else "j"), tile),))

    def function(x):
        return jax.nn.softmax(x, axis=axis)

    plan = pf.fuse(function, options=options).explain(*arrays)
    (kernel,) = plan.kernels
    assert kernel.target.name == "triton"
    assert any(d.startswith(TARGET) and reason in d for d in kernel.declined), kernel.declined


def test_what_is_rounded_otherwise_is_said():
    half, single = (ROWS["softmax"].arrays(2, 4096, dtype) for dtype in ("float16", "float32"))
    ours, exact = kernel_of(softmax, half)[0].conditions, kernel_of(softmax, single)[0].conditions
    assert set(ours) - set(exact) == {
        arithmetic.CONDITION, exponentials.SMALL_CONDITION, arithmetic.INVERSE_CONDITION,
    }  # fmt: skip


def test_a_target_that_is_asked_for_takes_few_rows():
    """By whichever way it is named."""
    x = jax.ShapeDtypeStruct((4, 128256), jnp.float16)
    for plan in (
        pf.fuse(softmax, target=TARGET).explain(x),
        pf.fuse(softmax).explain(x, target=TARGET),
    ):
        assert plan.kernels[0].target.name == TARGET
    assert pf.fuse(softmax).explain(x, target="mosaic_gpu").kernels[0].target.name == "triton"


def by_column(x, w):
    return jax.nn.softmax((x / w).astype(jnp.float16), axis=-1) / w.astype(jnp.float16)


def test_only_what_a_row_has_in_common_is_inverted():
    x, w = jax.ShapeDtypeStruct((2, 4096), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.float32)
    text = "".join(str(p) for p in program_of(by_column, [x, w]))
    assert text.count("1 / ") == 1


def scaled(x):
    return jax.nn.softmax(x * (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True).astype(x.dtype) ** -3, axis=-1)


@pytest.mark.deep  # `test_quotients_by_huge_and_tiny_values` has inverses, too
def test_negative_powers(interpreted):
    arrays = ROWS["softmax"].arrays(2, 4096, "float32")
    (ours,), theirs = interpreted(scaled, arrays), jax.jit(scaled)(*arrays)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)


def test_causal_rows_are_refused():
    """Their blocks would copy what a mask hides."""

    def causal(x):
        i, j = (jnp.arange(n) for n in x.shape)
        return jax.nn.softmax(jnp.where(j <= i[:, None], x, -jnp.inf), axis=-1)

    plan = pf.fuse(causal, target=TARGET).explain(jax.ShapeDtypeStruct((4096, 65536), jnp.float16))
    assert "depend on the row" in " ".join(plan.kernels[0].declined)


def test_the_emitter_refuses_what_the_rules_do():
    x = jnp.zeros((4, 4096), jnp.float16)
    programs = program_of(softmax, [x])
    with pytest.raises(TargetError, match="parts"):
        cluster_gpu.run(programs[:1], {programs[0].inputs[0].name: x})
