"""Proofs of the kernels of loops: each holds in every layout, and says what it does not cover."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import recurrences
from pallasfuse import report as report_module
from pallasfuse.decompositions import random_keys
from pallasfuse.decompositions.random_keys import Words
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.loop_calls import KernelOfLoop, loops_as_kernels
from pallasfuse.proof.loops import begun_of, from_any_state, next_of, prove_loop, state_of
from pallasfuse.recurrences import AsKernel, kernel_of, recurrence_of
from pallasfuse.tiling.recurrence import layouts, lower_recurrence
from tests.loops_of_programs import LOOPS, WITH_KEYS, moving_average, normal
from tests.property.test_random_loops import loop as random_loop
from tests.running_loops import DEVICE, scans_of, written
from tests.test_recurrences import FEW, H100, PRICED, TARGET, average, loop_of, made


def in_layouts(loop):
    """The kernels of a loop in the smallest and the largest blocks, and one between, with and without constants in registers."""
    recurrence, operands, results = recurrence_of(loop)
    every = list(layouts(recurrence, TARGET))
    for layout in {id(x): x for x in (every[0], every[len(every) // 2], every[-1])}.values():
        for kept in (frozenset(), frozenset(t.name for t in recurrence.constants)):
            own = replace(layout, kept=kept)
            program = lower_recurrence(recurrence, own, TARGET)
            yield KernelOfLoop(loop, program, operands, results, kernel_of(loop, H100.device).price, own, TARGET)


def is_proved(own):
    found = prove_loop(own)
    assert found.counterexample is None and found.uncovered == () and found.holds
    assert 0 < found.bound < 1e-9 and found.trials >= 32 and found.extents["trip"] == 4
    assert {s.split(" of ")[0] for s in found.stages} >= {
        "own lowering",
        "conversion to loops",
        "lowering",
        "trips and loads",
    }


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", FEW)
def test_the_kernel_of_a_loop_is_proved(name):
    function, args = LOOPS[name]
    _, loop = loop_of(function, *args)
    is_proved(kernel_of(loop, H100.device))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.deep] if n != "repeated" else []) for n in LOOPS])
def test_it_is_proved_in_every_layout(name):
    function, args = LOOPS[name]
    _, loop = loop_of(function, *args)
    for own in in_layouts(loop):
        is_proved(own)


def proofs_of(function, args):
    """The proofs of all kernels that the loops of a program become."""
    _, loops = scans_of(function, *args)
    rule = AsKernel(DEVICE)
    kernels = [k for eqn in loops for k in loops_as_kernels(written(eqn, rule(eqn)))]
    assert kernels
    return [prove_loop(k, delta=1e-4) for k in kernels]


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.deep] if n not in (1, 3) else []) for n in range(60)]
)
def test_no_false_alarm_in_random_loops(seed):
    for found in proofs_of(*random_loop(seed)):
        assert found.holds, (found.counterexample, found.uncovered)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.deep] if n != 1 else []) for n in range(40)])
def test_no_false_alarm_in_gradients_of_random_loops(seed):
    function, args = random_loop(seed)

    def loss(*floats):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*floats, args[-1])) if x.dtype == jnp.float32)

    found = proofs_of(jax.grad(loss, argnums=(0, 1, 2, 3, 4, 5)), args[:-1])
    assert len(found) == 2 and all(p.holds for p in found)


def test_a_trip_from_any_state_stores_what_it_was_handed():
    """In float64, at the extents of the program: what is handed on is what was computed from the state that was loaded."""
    function, args = LOOPS["states_rotate"]
    _, _, own = made(function, *args)
    carried = [t for t in own.operands if t in {s.removeprefix("last.") for s in own.results}]
    assert len(carried) == 3
    program = from_any_state(own.kernel, carried)
    values = dict(zip(own.operands, map(np.asarray, args), strict=True))
    rng = np.random.default_rng(0)
    values |= {t.name: rng.normal(size=[a.extent for a in t.axes]) for t in program.inputs if t.name not in values}
    found = evaluate_tiles(program, values)
    rows = values[own.operands[-1]]
    a, b, c = carried
    np.testing.assert_allclose(found[next_of(a)], values[state_of(b)])
    np.testing.assert_allclose(found[next_of(b)], values[state_of(c)])
    np.testing.assert_allclose(found[next_of(c)], values[state_of(a)] * rows, rtol=1e-6)
    for name in carried:
        np.testing.assert_allclose(found[begun_of(name)][0], values[name])
        np.testing.assert_allclose(found[begun_of(name)][1:], found[next_of(name)][:-1])
        np.testing.assert_allclose(found[f"last.{name}"], found[next_of(name)][-1])


def test_a_report_vouches_for_the_kernels_of_loops():
    _, structs = average(8, 16, 40)
    function = pf.fuse(lambda first, x: moving_average(first, x)[1] * 2, options=PRICED)
    report = pf.verify(function, *structs, target="mosaic_gpu")
    assert report.plan.loops and report.equivalent and report.counterexample is None
    assert "stage: the loop at " in str(report) and "lowering of loop_" in str(report)
    assert 0 < report.bound < 1e-9 and report.proof.trials >= 32


def test_a_report_says_which_kernel_of_a_loop_is_wrong(monkeypatch):
    _, structs = average(8, 16, 40)
    function = pf.fuse(lambda first, x: moving_average(first, x)[1] * 2, options=PRICED)
    real = lower_recurrence

    def turned(recurrence, layout, target):
        return real(replace(recurrence, backwards=True), layout, target)

    monkeypatch.setattr("pallasfuse.recurrences.lower_recurrence", turned)
    monkeypatch.setattr("pallasfuse.proof.loops.lower_recurrence", turned)
    report = pf.verify(function, *structs, target="mosaic_gpu", delta=1e-4)
    assert not report.equivalent and report.counterexample is not None
    assert "loop_" in str(report.counterexample) and "NOT equivalent" in str(report)


@pytest.mark.deep
def test_a_report_finds_words_of_keys_that_are_others(monkeypatch):
    function, args = WITH_KEYS["noisy_steps"]
    report = pf.verify(pf.fuse(function, options=PRICED), *args, target="mosaic_gpu", delta=1e-4)
    assert report.plan.loops and report.equivalent, str(report)
    real = random_keys._RULES["random_split"]
    monkeypatch.setitem(
        random_keys._RULES, "random_split", lambda eqn, keys: [Words(*x[::-1]) for x in real(eqn, keys)]
    )
    report = pf.verify(pf.fuse(function, options=PRICED), *args, target="mosaic_gpu", delta=1e-4)
    assert not report.equivalent and report.counterexample is not None


def test_what_a_report_does_not_cover_of_a_loop_keeps_it_from_holding(monkeypatch):
    """Without elements that are no numbers, a place of a maximum never finds one."""
    monkeypatch.setattr("pallasfuse.proof.loops.asks_for_no_number", lambda _: False)
    function, args = LOOPS["best_paths"]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (args[0], args[1])]
    rows = jax.ShapeDtypeStruct((300, *args[2].shape[1:]), jnp.float32)
    report = pf.verify(pf.fuse(function, options=PRICED), *structs, rows, target="mosaic_gpu", delta=1e-4)
    assert report.plan.loops and not report.equivalent and report.counterexample is None
    assert "not covered: the loop at " in str(report) and "was False in every test" in str(report)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("where", ["outside", pytest.param("in another loop", marks=pytest.mark.deep)])
def test_a_report_finds_what_leaves_a_loop_wrongly(monkeypatch, where):
    """Sums over trips are computed after the loop, here with the wrong sign: no trip of a kernel shows that."""
    function, args = LOOPS["selective_state_space"]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]

    def loss(*own):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*own)))

    def descent(first, *others):
        """The same gradient in the body of another loop."""

        def step(own, _):
            return jnp.tanh(own - 0.1 * jax.grad(loss)(own, *others)), None

        return jax.lax.scan(step, first, None, length=3)[0]

    plain = jax.grad(loss) if where == "outside" else descent
    report = pf.verify(pf.fuse(plain, options=PRICED), *structs, target="mosaic_gpu", delta=1e-4)
    assert report.plan.loops and report.equivalent, str(report)
    real, spoiled = recurrences.accumulators_apart, []

    def with_other_signs(eqn):
        run = real(eqn)
        spoiled.append(run)
        return None if run is None else lambda *operands: [-x for x in run(*operands)]

    monkeypatch.setattr(recurrences, "accumulators_apart", with_other_signs)
    report = pf.verify(pf.fuse(plain, options=PRICED), *structs, target="mosaic_gpu", delta=1e-4)
    assert any(run is not None for run in spoiled)
    assert report.plan.loops and report.proof.holds and not report.equivalent
    assert "of the program with its loops apart" in str(report.counterexample)


@pytest.mark.parametrize("what", ["large", "failing"])
def test_a_report_does_not_vouch_for_what_leaves_loops_that_were_not_compared(monkeypatch, what):
    def fails(*_):
        raise TypeError("no such type")

    if what == "large":
        monkeypatch.setattr(report_module, "_MOST_BYTES_OF_LOOPS", 8)
    else:
        monkeypatch.setattr(report_module, "float64_results", fails)
    _, structs = average(8, 16, 40)
    found = pf.verify(pf.fuse(moving_average, options=PRICED), *structs, target="mosaic_gpu", delta=1e-4)
    assert found.plan.loops and not found.equivalent and found.counterexample is None
    assert "not covered: what is computed before and after loops that are kernels: " in str(found)


def test_parts_that_are_too_large_to_compare_are_said_to_be_so(monkeypatch):
    monkeypatch.setattr("pallasfuse.proof.selections._LARGEST", 8)
    function, args = LOOPS["gated_unit"]
    _, _, own = made(function, *args)
    found = prove_loop(own, delta=1e-4)
    assert not found.holds and found.counterexample is None
    (line,) = found.uncovered
    assert "parts, joins and places of loop_" in line and "verify it with smaller arguments" in line


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.deep), "float16"])
def test_parts_of_half_types_are_compared(dtype):
    def function(x, rows):
        def trip(x, row):
            x = jnp.cumsum(x + row, -1)
            return jnp.concatenate([x[:, 1:], x[:, :1]], 1) * 0.5, x[:, ::-1]

        return jax.lax.scan(trip, x, rows)

    _, _, own = made(function, normal(0, 3, 24).astype(dtype), normal(1, 6, 3, 24).astype(dtype))
    found = prove_loop(own, delta=1e-4)
    assert found.holds and any(s.startswith("parts, joins and places") for s in found.stages)
