"""Loops that are one kernel: which, and that they compute what the loop computes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallasfuse as pf
from pallasfuse import _compat
from pallasfuse.emission import pallas_kernel
from pallasfuse.errors import Refusal
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.statements import Loop, every
from pallasfuse.jaxpr_frontend.conversion import convert
from pallasfuse.loop_calls import KernelOfLoop, loops_as_kernels
from pallasfuse.overview import overview
from pallasfuse.parts import whole_key
from pallasfuse.price.xla import price_xla
from pallasfuse.recurrences import AsKernel, kernel_of, recurrence_of
from pallasfuse.resources import triton
from pallasfuse.targets import INTERPRET, TRITON, default_for, find
from pallasfuse.tiling.recurrence import layouts, lower_recurrence, parallel_axes, problem
from pallasfuse.written_out import surely_faster
from tests.loops_of_programs import (
    LOOPS,
    WITH_KEYS,
    WITH_SYSTEMS,
    forward_algorithm,
    moving_average,
    normal,
    recurrent_network,
    two_layers,
)
from tests.running_loops import as_numbers, run, scans_of, with_kernels

FEW = [pytest.param(name, marks=[pytest.mark.deep] if n % 3 else []) for n, name in enumerate(LOOPS)]
"""One loop of three; the others are deep."""
PRICED = pf.FuseOptions(check=False, price=True)
H100 = default_for("cuda", frozenset({"9.0"})).judged(timed=False, one_device=True)
TARGET = TRITON.on(H100.device)


def loop_of(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return jaxpr, loop


def made(function, *args) -> tuple[object, object, KernelOfLoop]:
    jaxpr, loop = loop_of(function, *args)
    found = kernel_of(loop, H100.device)
    assert isinstance(found, KernelOfLoop), found
    return jaxpr, loop, found


def kernels_of(loop):
    """The kernels of a loop in several layouts: the smallest and the largest blocks, and one between."""
    recurrence, operands, results = recurrence_of(loop)
    found = list(layouts(recurrence, TARGET))
    assert found
    for layout in {id(x): x for x in (found[0], found[len(found) // 2], found[-1])}.values():
        for kept in (frozenset(), frozenset(t.name for t in recurrence.constants)):
            yield lower_recurrence(recurrence, replace(layout, kept=kept), TARGET), operands, results


@pytest.mark.parametrize(
    ("width", "dtype", "fits"), [(128, "bfloat16", True), (128, "float32", True), (512, "bfloat16", False)]
)
def test_matrices_that_only_products_read_take_shared_memory_and_no_registers(width, dtype, fits):
    w, x = (jax.ShapeDtypeStruct(s, dtype) for s in ((width, width), (4096, width)))
    _, loop = loop_of(two_layers, w, w, x)
    recurrence, _, _ = recurrence_of(loop)
    matrices = {t.name for t in recurrence.constants if len(t.axes) == 2}
    assert len(matrices) == 2
    assert recurrence.multiplied(lambda _: 16) == matrices
    assert not recurrence.multiplied(lambda _: 8)  # too small for matrix units
    found = kernel_of(loop, H100.device)
    assert isinstance(found, KernelOfLoop) == fits
    if fits:
        assert found.layout.kept >= matrices
        of_matrices = sum(width * width * jnp.dtype(dtype).itemsize for _ in matrices)
        assert triton.resources(found.kernel, TARGET).shared_bytes >= of_matrices
        assert found.kernel.warps < 16  # no more than the state needs


def test_matrices_are_read_by_matrix_units_alone_in_products_of_each_head_too():
    def apart(w, x):
        return jax.lax.scan(lambda s, _: (jnp.tanh(s @ w), None), x, length=32)[0]

    def and_by_threads(w, x):
        return jax.lax.scan(lambda s, _: (jnp.tanh(s @ w) + jnp.max(w * jnp.mean(s)), None), x, length=32)[0]

    heads, matrix = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32, 32), (32, 32)))
    of_heads, of_both = (
        recurrence_of(loop_of(f, *args)[1])[0] for f, args in ((apart, [heads] * 2), (and_by_threads, [matrix] * 2))
    )
    assert len(of_heads.multiplied(lambda axis: 1 if axis.extent == 64 else 16)) == 1
    assert not of_both.multiplied(lambda axis: 32)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", FEW)
def test_a_kernel_computes_what_its_loop_does(name):
    function, args = LOOPS[name]
    jaxpr, loop, found = made(function, *args)
    want = jax.tree.leaves(function(*args))
    for ahead in (0, 1):
        own = replace(found, kernel=replace(found.kernel, prefetch_distance=ahead))
        by_interpreter = partial(own.by_kernel, run=partial(pallas_kernel.call, interpret=True))
        got = run(jaxpr, *args, ways={id(loop): by_interpreter})
        for x, y in zip(got, want, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", [pytest.param("moving_average", marks=pytest.mark.deep), *FEW[1:]])
def test_every_layout_means_the_same_in_float64(name):
    function, args = LOOPS[name]
    jaxpr, loop = loop_of(function, *args)

    def evaluated(program, operands, results, *values):
        shapes = {t.name: tuple(a.extent for a in t.axes) for t in program.inputs}
        wide = {n: np.asarray(x) for n, x in zip(operands, values, strict=True)}
        wide = {n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in wide.items()}
        found = evaluate_tiles(program, {n: wide[n].reshape(s) for n, s in shapes.items()})
        return [found[n].reshape(v.aval.shape) for n, v in zip(results, loop.outvars, strict=True)]

    want = jax.tree.leaves(function(*args))
    count = 0
    for program, operands, results in kernels_of(loop):
        got = run(jaxpr, *args, ways={id(loop): partial(evaluated, program, operands, results)})
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        count += 1
    assert count > 1


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", ["best_paths", "moving_average", "gated_unit"])
def test_numbers_of_64_bits(name):
    function, args = LOOPS[name]
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) if a.dtype == jnp.float32 else a for a in args]
        jaxpr, loop, found = made(function, *wide)
        got = run(
            jaxpr, *wide, ways={id(loop): partial(found.by_kernel, run=partial(pallas_kernel.call, interpret=True))}
        )
        for x, y in zip(got, jax.tree.leaves(function(*wide)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-12)


def test_axes_that_a_trip_mixes_are_whole_in_a_block():
    _, loop = loop_of(forward_algorithm, *LOOPS["forward_algorithm"][1])
    recurrence, _, _ = recurrence_of(loop)
    assert [a.extent for a in parallel_axes(recurrence)] == [4]
    _, loop = loop_of(moving_average, *LOOPS["moving_average"][1])
    recurrence, _, _ = recurrence_of(loop)
    assert [a.extent for a in parallel_axes(recurrence)] == [5, 37]


def test_large_states_are_left_to_xla():
    _, loop = loop_of(
        recurrent_network, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (8, 512), (9, 8, 512)))
    )
    found = kernel_of(loop, H100.device)
    assert isinstance(found, Refusal) and "262144 elements" in found.reason


@pytest.mark.parametrize(("why", "trip"), [
    ("sort", lambda state, row: (jnp.sort(state + row), row)),
    ("number", lambda state, row: (state + row, 1.0)),
])  # fmt: skip
def test_loops_that_are_no_kernel_say_why(why, trip):
    _, loop = loop_of(lambda x, rows: jax.lax.scan(trip, x, rows), normal(0, 6, 6), normal(1, 5, 6, 6))
    found = kernel_of(loop, H100.device)
    assert isinstance(found, Refusal) and why in found.reason


def test_a_loop_of_few_trips_is_no_kernel():
    _, loop = loop_of(lambda x, rows: jax.lax.scan(lambda s, r: (s + r, s), x, rows), normal(0, 6), normal(1, 3, 6))
    assert isinstance(kernel_of(loop, H100.device), Refusal)


def average(rows, width, trips):
    structs = jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((trips, rows, width), jnp.float32)
    return jax.make_jaxpr(lambda first, x: moving_average(first, x)[1] * 2)(*structs), structs


def test_a_program_has_the_kernel_where_a_target_writes_kernels():
    jaxpr, _ = average(64, 80, 300)
    form = surely_faster(jaxpr, H100)
    (loop,) = loops_as_kernels(form)
    assert loop.price.us < price_xla_us(jaxpr) / 3
    assert not loops_as_kernels(surely_faster(jaxpr, find("xla_gpu").on(H100.device)))
    assert not loops_as_kernels(surely_faster(jaxpr, find("xla")))


def price_xla_us(jaxpr):
    return price_xla(convert(jaxpr).program, H100.device).us


def assert_left_with_xla(function):
    """The loop of a function is a kernel, but for the user who leaves what is in the scope `mine`."""
    _, structs = average(64, 80, 300)
    jaxpr = jax.make_jaxpr(function)(*structs)
    assert loops_as_kernels(surely_faster(jaxpr, H100))
    assert not loops_as_kernels(surely_faster(jaxpr, H100, ("mine",)))


def test_what_the_user_leaves_to_xla_stays_a_loop():
    def function(first, x):
        with jax.named_scope("mine"):
            return moving_average(first, x)[1]

    assert_left_with_xla(function)


def test_a_part_of_a_body_that_the_user_leaves_keeps_the_loop():
    def function(first, x):
        def trip(mean, row):
            with jax.named_scope("mine"):
                mean = mean + 0.1 * (row - mean)
            return mean, mean

        return jax.lax.scan(trip, first, x)

    assert_left_with_xla(function)


def test_loops_inside_of_others_are_seen():
    def function(first, x):
        return jax.lax.scan(lambda state, _: (moving_average(state, x)[0][1] * 0.5, None), first, None, length=1000)[0]

    _, structs = average(64, 80, 300)
    plan = pf.fuse(function, options=PRICED).explain(*structs, target="mosaic_gpu")
    assert len(plan.loops) == 1 and plan.emitters == {"triton"}
    assert "300 trips of the loop" in plan.summary


def test_an_overview_counts_a_loop_once():
    _, structs = average(64, 80, 300)
    plan = pf.fuse(lambda first, x: moving_average(first, x)[1] * 2, options=PRICED).explain(
        *structs, target="mosaic_gpu"
    )
    text = overview(plan)
    assert "fused: 100%" in text and "why: a loop that is one kernel" not in text
    assert "a zero that changes its place" in " ".join(plan.conditions)


def test_equal_loops_have_equal_keys():
    keys = [whole_key(surely_faster(average(64, 80, 300)[0], H100)) for _ in range(2)]
    assert keys[0] == keys[1] != whole_key(surely_faster(average(64, 80, 301)[0], H100))


def halved_in(scope, x):
    def trip(x, _):
        with jax.named_scope(scope):
            return jnp.tanh(x) * 0.5, None

    return jax.lax.scan(trip, x, None, length=20)[0]


@pytest.mark.parametrize("scopes", [("left", "taken"), ("taken", "left")])
def test_loops_of_one_text_have_scopes_of_their_own(scopes):
    _, loops = scans_of(lambda x: halved_in(scopes[1], halved_in(scopes[0], x)), normal(0, 8, 16))
    rule = AsKernel(H100.device, ("left",))
    assert [rule(loop) is not None for loop in loops] == [scope == "taken" for scope in scopes]


def test_loops_of_one_text_draw_their_own_numbers():
    """What is drawn in another order of numbers stays JAX's."""

    def both(key, x):
        for in_order in (True, False):
            with jax.threefry_partitionable(in_order):

                def trip(state, _):
                    key, x = state
                    key, own = jax.random.split(key)
                    return (key, x + jax.random.normal(own, x.shape)), None

                (key, x), _ = jax.lax.scan(trip, (key, x), None, length=20)
        return x

    args = jax.random.key(0), normal(0, 4)
    jaxpr, loops = scans_of(both, *args)
    results, count = with_kernels(jaxpr, loops, *args)
    assert len(loops) == 2 and count == 1
    np.testing.assert_allclose(results[0], both(*args), rtol=1e-5, atol=1e-6)


def test_equal_operations_become_loops_of_their_own():
    """Factorisations of one shape that one line makes have one kernel, each in its place."""

    def factored(a):
        return jax.lax.linalg.lu(a)[0]

    def factors(a):
        return jnp.sin(factored(a)) + factored(2 * a) + factored(jnp.cos(a))

    plan = pf.fuse(factors, options=PRICED).explain(
        jax.ShapeDtypeStruct((12, 32, 32), jnp.float32), target="mosaic_gpu"
    )
    assert len(plan.loops) == 3 and len({repr(loop) for loop in plan.loops}) == 1


def test_a_layout_that_may_spill_must_be_faster_beyond_the_error_of_prices(monkeypatch):
    _, loop = loop_of(*((f := LOOPS["moving_average"])[0], *f[1]))
    best = kernel_of(loop, H100.device)

    def spilling(*layouts):
        monkeypatch.setattr(triton, "may_spill", lambda p, _: (p.grid, p.warps) in [(x.grid, x.warps) for x in layouts])
        return kernel_of(loop, H100.device)

    other = spilling(best.layout)
    assert (other.layout.grid, other.layout.warps) != (best.layout.grid, best.layout.warps)
    assert best.price.us <= other.price.us <= H100.device.price_error * best.price.us
    assert spilling(other.layout).layout == best.layout


def test_a_kernel_computes_equal_values_once():
    def once(s, row):
        total = jnp.sum(jnp.sin(s) * row)
        return s + total, total

    def twice(s, row):
        total, again = (jnp.sum(jnp.sin(s) * row) for _ in range(2))
        return s + total, again

    for function in (once, twice):
        assert str(jax.make_jaxpr(function)(jnp.ones(8), jnp.ones(8))).count("sin") == 1 + (function is twice)
    one, two = (made(lambda x, f=f: jax.lax.scan(f, jnp.ones(8), x), normal(0, 6, 8))[2].kernel for f in (once, twice))
    assert len(list(every(one.body))) == len(list(every(two.body)))


def test_a_rule_plans_each_loop_once(monkeypatch):
    _, loop = loop_of(*((f := LOOPS["moving_average"])[0], *f[1]))
    rule = AsKernel(H100.device)
    assert rule(loop) is not None
    monkeypatch.setattr("pallasfuse.recurrences.kernel_of", None)
    assert rule(loop) is not None


def test_a_loop_that_updates_known_places_is_one_kernel():
    """The ends of rods are held and heated in each trip, and heat flows between neighbours."""

    def trip(rods, heat):
        held = rods.at[0].set(1.0).at[-1].add(heat)
        flow = held[2:] - 2 * held[1:-1] + held[:-2]
        return held.at[1:-1].add(0.1 * flow), jnp.max(held, 0)

    args = normal(0, 7, 16), normal(1, 9, 16)
    jaxpr, loops = scans_of(lambda *a: jax.lax.scan(trip, *a), *args)
    results, count = with_kernels(jaxpr, loops, *args)
    assert count == 1
    for got, want in zip(results, jax.tree.leaves(jax.lax.scan(trip, *args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(("name", "close"), [
    *((name, 1e-4) for name in WITH_SYSTEMS), *((name, 1e-5) for name in WITH_KEYS),
])  # fmt: skip
def test_a_loop_that_solves_small_systems_or_draws_random_numbers_is_one_kernel(name, close):
    function, args = (WITH_SYSTEMS | WITH_KEYS)[name]
    jaxpr, loops = scans_of(function, *args)
    results, count = with_kernels(jaxpr, loops, *args)
    assert count == 1
    for got, want in zip(results, jax.tree.leaves(function(*args)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(as_numbers(got), as_numbers(want), rtol=close, atol=close / 10)


def test_the_plan_shows_the_kernel():
    _, structs = average(64, 80, 300)
    function = pf.fuse(lambda first, x: moving_average(first, x)[1] * 2, options=PRICED)
    plan = function.explain(*structs, target="mosaic_gpu")
    assert [loop.trips for loop in plan.loops] == [300] and plan.fuses and plan.emitters == {"triton"}
    assert "300 trips of the loop at" in plan.summary and "left to XLA: " in plan.summary
    assert "for trip in [0, 300) by 1" in plan.show("kernels")
    assert [f.operation for f in plan.fallbacks] == ["mul"]


def test_elsewhere_it_is_the_loop():
    jaxpr, _ = average(4, 8, 60)
    form = AsKernel(H100.device)
    eqn = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    of_loop = form(eqn)
    args = [jnp.int32(0), normal(0, 4, 8), normal(1, 60, 4, 8)]
    for got, want in zip(jax.jit(of_loop)(*args), _compat.bind(eqn, args), strict=True):
        np.testing.assert_allclose(got, want)


def test_it_is_lowered_for_a_gpu_as_one_kernel():
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jaxpr, structs = average(64, 80, 300)
        form = surely_faster(jaxpr, H100)
        traced = jax.jit(lambda *args: _compat.eval_jaxpr(form, form.consts, *args)).trace(*structs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1 and "stablehlo.while" not in text


def test_refused_problems_name_the_target():
    _, loop = loop_of(
        lambda x, rows: jax.lax.scan(lambda s, r: (jax.lax.nextafter(s, r), s), x, rows), normal(0, 6), normal(1, 9, 6)
    )
    recurrence, _, _ = recurrence_of(loop)
    assert "nextafter" in str(problem(recurrence, TARGET)) and problem(recurrence, INTERPRET) is None


def test_evaluation_goes_backwards_where_the_loop_does():
    function, args = LOOPS["discounted_backwards"]
    _, _, found = made(function, *args)
    (loop,) = (s for s in found.kernel.body if isinstance(s, Loop))
    assert loop.backwards
    turned = replace(
        found.kernel, body=tuple(replace(s, backwards=False) if s is loop else s for s in found.kernel.body)
    )
    rng = np.random.default_rng(0)
    values = {t.name: rng.normal(size=[a.extent for a in t.axes]) > 0.5 if t.dtype == "bool" else
              rng.normal(size=[a.extent for a in t.axes]) for t in found.kernel.inputs}  # fmt: skip
    ends = [evaluate_tiles(program, values) for program in (found.kernel, turned)]
    assert not any(np.allclose(ends[0][name], ends[1][name]) for name in ends[0])


def likely_tracks(means, spreads, seen):
    """Weighs tracks by how likely they make what is seen: the body of the loop has reductions that could be kernels, too."""

    def trip(state, y):
        mean, spread = state
        spread, left = spread + 0.1 * jnp.eye(3), y - mean
        far = jnp.sum(left * jnp.linalg.solve(spread, left[..., None])[..., 0], -1)
        chance = -0.5 * (jnp.linalg.slogdet(spread)[1] + far)
        moved = mean + 0.1 * jax.nn.softmax(chance, axis=-1)[..., None] * left
        return (moved, spread * 0.9), jax.nn.logsumexp(chance, axis=-1)

    return jax.lax.scan(trip, (means, spreads), seen)


def test_a_loop_that_is_a_kernel_loses_none_of_its_body_s():
    shapes = (4096, 4, 3), (4096, 4, 3, 3), (20, 4096, 1, 3)
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert len(pf.fuse(likely_tracks, options=PRICED).explain(*structs, target="mosaic_gpu").loops) == 1
