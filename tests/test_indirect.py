"""What kernels look up: which gathers are gone from a plan, why others stay, and where plans with lookups go."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import indirect, kept_plans, store
from pallasfuse.decisions import Placed, lookups_of
from pallasfuse.execution import execute
from pallasfuse.ir.expr import const
from pallasfuse.pipeline import make_plan, parts_of, prove_plan, ways
from pallasfuse.placement import looking_up
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.xla import price_gather
from pallasfuse.proof import PlannedKernel, prove
from pallasfuse.subjects import Bench
from pallasfuse.targets import find
from tests.xla_backend.test_lookups import arguments, by_pages, exact, heads_first

FREE = pf.FuseOptions(price=False, check=False)


def planned(function, *given, target="xla", options=FREE):
    return make_plan(jax.make_jaxpr(function)(*given), find(target), options)


def gathers(plan):
    return [s for s in plan.steps if getattr(getattr(s, "primitive", None), "name", "") == "gather"]


def reasons(plan):
    return [f.reason for f in plan.fallbacks if f.operation == "gather"]


def test_pages_are_read_by_the_kernel():
    given = arguments()
    plan = planned(by_pages(), *given)
    (kernel,) = plan.kernels
    assert gathers(plan) == []
    assert {"k_pages", "v_pages"} <= set(kernel.reads)
    assert not set(kernel.lookups) & set(kernel.reads)
    assert set(kernel.lookups) <= set(kernel.group.inputs)
    assert "k_pages[t3[i, a2 / 6] * 6 + a2 % 6, j, k]" in str(plan)


def test_the_plan_is_proven():
    proof = prove_plan(planned(by_pages("fill"), *arguments()), delta=1e-3)
    assert proof.counterexample is None
    assert proof.holds, proof.uncovered
    assert any(s.startswith("lookups of") for s in proof.stages)


WRONG = {
    "a table of another gather": lambda x, y: replace(x, table=y.table),
    "another source": lambda x, y: replace(x, source=replace(x.source, name=y.source.name)),
    "the table's axes in another order": lambda x, y: replace(x, table=replace(x.table, axes=x.table.axes[::-1])),
    "the source's axes in another order": lambda x, y: replace(
        x, source=replace(x.source, axes=(x.rows, *x.source.axes[:0:-1]))
    ),
    "other blocks": lambda x, y: replace(
        x, block=x.block // 2, blocks=replace(x.blocks, extent=2 * x.blocks.extent),
        table=replace(x.table, axes=(x.table.axes[0], replace(x.blocks, extent=2 * x.blocks.extent))),
    ),
    "a fill": lambda x, y: replace(x, fill=const(0.0, x.result.dtype)),
}  # fmt: skip


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_lookup_is_refuted(mistake):
    plan = planned(by_pages(), *arguments())
    (part,) = parts_of(plan)
    first, second = lookups_of(part.phases).values()
    wrong = WRONG[mistake](first, second)
    phases = tuple(replace(p, program=replace(p.program, lookups=(wrong, second))) for p in part.phases)
    proof = prove(plan.converted, [PlannedKernel(part.group, part.schedule, phases)], delta=0.1)
    assert proof.counterexample is not None
    assert proof.counterexample.stage.startswith("lookups of")


def rated_by_a_sample(q, k, sample):
    """Each query is rated by a sample of keys, whose heads come after their positions in memory."""
    rated = jnp.einsum("bhqd,bhqsd->bhqs", q, k.transpose(0, 2, 1, 3)[:, :, sample])
    return jnp.max(rated, axis=-1) - jnp.sum(rated, axis=-1) / k.shape[1]


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("is_computed", [False, True])
def test_rows_of_a_turned_source_are_read_as_they_lie(target, is_computed):
    """A source that is computed is stored, and is as small as what is read of it; turning it needs no copy."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 8, 4), (2, 8, 3, 4)))
    sample = jnp.asarray(rng.integers(0, 8, (8, 5)), jnp.int32)

    def function(q, k, sample):
        return rated_by_a_sample(q, jnp.tanh(k) if is_computed else k, sample)

    plan = planned(function, q, k, sample, target=target)
    (kernel,) = plan.kernels
    (lookup,) = kernel.lookups.values()
    assert gathers(plan) == []
    assert (lookup.source.name == "k") != is_computed
    assert [a.extent for a in lookup.source.axes] == [2, 8, 3, 4]
    assert prove_plan(plan, delta=1e-3).holds
    np.testing.assert_allclose(execute(plan, (q, k, sample))[0], function(q, k, sample), rtol=1e-5, atol=1e-5)


def test_a_source_that_is_a_sum_of_one_is_stored():
    """It has the elements of what it is summed from; the proof sees that it is another."""
    q, k = jnp.ones((2, 3, 8, 4)), jnp.arange(192.0).reshape(2, 8, 3, 4) / 99
    sample = jnp.asarray(np.random.default_rng(0).integers(0, 8, (8, 5)), jnp.int32)

    def function(q, k, sample):
        return rated_by_a_sample(q, (k[:, None] * 2.0).sum(1), sample)

    plan = planned(function, q, k, sample)
    assert plan.kernels[0].lookups and prove_plan(plan, delta=1e-3).holds
    np.testing.assert_allclose(execute(plan, (q, k, sample))[0], function(q, k, sample), rtol=1e-5)


def test_what_others_read_is_stored():
    """The gathered array is a result, too: the kernel reads it there."""

    def shared(q, length, k_pages, v_pages, table):
        keys = k_pages[table]
        scores = jnp.einsum("bhd,bjhd->bhj", q, keys.reshape(table.shape[0], -1, *k_pages.shape[2:]))
        return jax.nn.softmax(scores), keys

    plan = planned(shared, *arguments())
    (kernel,) = plan.kernels
    assert len(gathers(plan)) == 1
    assert kernel.lookups == {}
    assert kernel.reads == kernel.group.inputs


def test_a_target_that_cannot():
    def attention(q, pages, table):
        keys = pages[table].reshape(table.shape[0], -1, pages.shape[-1])
        scores = jnp.einsum("bid,bjd->bij", q, keys, preferred_element_type=jnp.float32)
        return jnp.einsum("bij,bjd->bid", jax.nn.softmax(scores).astype(q.dtype), keys)

    array = jax.ShapeDtypeStruct
    shapes = array((2, 128, 64), jnp.bfloat16), array((40, 16, 64), jnp.bfloat16), array((2, 16), jnp.int32)
    for target, count in (("mosaic_gpu", 0), ("triton", 1)):
        plan = planned(attention, *shapes, target=target)
        (kernel,) = plan.kernels
        assert kernel.target.name == target
        assert len(kernel.lookups) == count
        assert len(gathers(plan)) == 1 - count
        assert all("take tiles from stored arrays only" in r for r in reasons(plan))


def test_where_a_target_stands_in_its_kernels_look_up():
    plan = planned(by_pages(), *arguments(), target="mosaic_gpu")
    assert [(k.target.name, len(k.lookups)) for k in plan.kernels] == [("triton", 2)]


def test_what_the_user_leaves_to_xla_is_stored():
    def function(q, length, k_pages, v_pages, table):
        with jax.named_scope("cache"):
            keys, values = (p[table].reshape(table.shape[0], -1, *p.shape[2:]) for p in (k_pages, v_pages))
        scores = jnp.where(
            jnp.arange(keys.shape[1]) < length[:, None, None], jnp.einsum("bhd,bjhd->bhj", q, keys), -jnp.inf
        )
        return jnp.einsum("bhj,bjhd->bhd", jax.nn.softmax(scores), values)

    given = arguments()
    assert gathers(planned(function, *given)) == []
    plan = planned(function, *given, options=replace(FREE, exclude=("cache",)))
    assert len(gathers(plan)) == 2
    assert all("exclude" in r for r in reasons(plan))


def large(pages, pool):
    array, n = jax.ShapeDtypeStruct, jnp.int32
    cache = array((pool, 16, 8, 64), jnp.float32)
    return array((8, 8, 64), jnp.float32), array((8,), n), cache, cache, array((8, pages), n)


def test_the_price_counts_what_the_gather_takes():
    """A lookup in a kernel is cheaper than a gather and a kernel that reads it; how large the pool is does not matter."""
    given = large(128, 1024)
    options = replace(FREE, price=True)
    free = planned(by_pages(), *given)
    (kernel,) = free.kernels
    assert len(kernel.lookups) == 2
    device = find("xla").device
    gathers_us = sum(price_gather(x, device).us for x in kernel.lookups.values())
    bare = indirect.with_lookups(kernel.phases, ())
    assert kernel.price.us < price_kernel([(p.program, p.target) for p in bare]).us + gathers_us
    timed = make_plan(jax.make_jaxpr(by_pages())(*given), find("xla").judged(timed=True), options)
    assert [len(k.lookups) for k in timed.kernels] == [2]
    (x, *_), (y, *_) = (planned(by_pages(), *large(128, pool)).kernels[0].lookups.values() for pool in (1024, 8192))
    assert price_gather(x, device).us == pytest.approx(price_gather(y, device).us)


def test_readers_share_what_a_gather_takes():
    """Where many nests read it, each alone would gain by a lookup, and all of them together lose."""
    given = large(128, 1024)
    at_its_word = find("xla").on(replace(find("xla").device, price_error=1.0))
    plan = make_plan(jax.make_jaxpr(by_pages())(*given), at_its_word, replace(FREE, price=True))
    (kernel,) = plan.kernels
    placed = Placed(kernel.schedule, indirect.with_lookups(kernel.phases, ()), ())
    lookups = indirect.lookups_in(plan.program)
    few, many = (dict.fromkeys(lookups, n) for n in (1, 1000))
    assert looking_up(placed, kernel.group.inputs, lookups, few, price=True).lookups == kernel.lookups != {}
    assert looking_up(placed, kernel.group.inputs, lookups, many, price=True).lookups == {}


def test_what_the_kernel_reads_again_and_again_is_stored():
    """Blocks of rows that all read the same gathered numbers: one gather before the kernel is paid once."""

    def function(x, table, index):
        return jax.nn.softmax(x + table[index])

    array = jax.ShapeDtypeStruct
    shapes = array((256, 64, 4096), jnp.float32), array((1 << 20,), jnp.float32), array((64, 4096), jnp.int32)
    free = planned(function, *shapes)
    (kernel,) = free.kernels
    assert len(kernel.lookups) == 1
    placed = Placed(kernel.schedule, indirect.with_lookups(kernel.phases, ()), ())
    lookups = indirect.lookups_in(free.program)
    once = dict.fromkeys(lookups, 1)
    assert looking_up(placed, kernel.group.inputs, lookups, once, price=False).lookups == kernel.lookups
    assert looking_up(placed, kernel.group.inputs, lookups, once, price=True).lookups == {}
    (lookup,) = lookups.values()
    assert indirect.why_stored(placed.phases, lookup) == "to look them up there would not be faster"


def test_a_kept_plan_looks_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_KEEP_PLANS", "1")
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    given = arguments()
    jaxpr = jax.make_jaxpr(by_pages())(*given)
    made = kept_plans.plan_of(jaxpr, find("xla"), FREE)
    store._store_in.cache_clear()
    monkeypatch.setattr(kept_plans, "_made", None)
    again = kept_plans.plan_of(jaxpr, find("xla"), FREE)
    assert [k.reads for k in again.kernels] == [k.reads for k in made.kernels]
    assert again.kernels[0].lookups == made.kernels[0].lookups
    assert gathers(again) == []
    for plan in (made, again):
        (got,) = execute(plan, [*jaxpr.consts, *given])
        np.testing.assert_allclose(got, exact(by_pages(), *given), rtol=2e-6, atol=2e-6)


def test_equal_layers_are_one_function():
    q, length, k, v, table = arguments()

    def layers(q, length, caches, table):
        for k_pages, v_pages in caches:
            q = by_pages()(jnp.sin(q), length, k_pages, v_pages, table)
        return q

    caches = [(k + n, v - n) for n in range(3)]
    plan = planned(layers, q, length, caches, table)
    assert [len(k.lookups) for k in plan.kernels] == [2, 2, 2]
    assert gathers(plan) == []
    got = pf.fuse(layers, options=FREE)(q, length, caches, table)
    np.testing.assert_allclose(got, jax.jit(layers)(q, length, caches, table), rtol=2e-5, atol=2e-5)


def test_other_ways_are_measured_over_the_same_inputs():
    """A way to run a kernel on a target that looks nothing up reads what is stored for it, in the measured time."""
    given = arguments()
    plan = planned(by_pages(), *given)
    (kernel,) = plan.kernels
    assert all(lookups_of(p.phases).keys() == kernel.lookups.keys() for p in ways(plan, kernel))
    (subject,) = Bench(plan, jax.devices("cpu")[0]).subjects
    stored = replace(kernel, phases=indirect.with_lookups(kernel.phases, ()))
    by_name = {n: given[i] for n, i in (("q", 0), ("length", 1), ("k_pages", 2), ("v_pages", 3), ("t3", 4), ("t9", 4))}
    by_name |= {n: by_name[n][..., None] for n in ("t3", "t9")}
    arrays = [by_name[n] for n in subject.part.input_names]
    for own in (kernel, stored):
        (got,) = jax.jit(subject.function(own))(*arrays)
        np.testing.assert_allclose(got, subject.part.run(*arrays)[0], rtol=2e-6, atol=2e-6)


def test_calls_and_batches():
    given = arguments()
    fused, want = pf.fuse(by_pages(), options=FREE), exact(by_pages(), *given)
    q, length, k, v, table = given
    both = jax.vmap(fused, in_axes=(0, 0, None, None, 0))(*(jnp.stack([x, x[::-1]]) for x in (q, length)), k, v,
                                                          jnp.stack([table, table[::-1]]))  # fmt: skip
    for got in (fused(*given), jax.jit(fused)(*given), both[0], both[1][::-1]):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_gradients_and_loops():
    q, *others = given = arguments()
    fused = pf.fuse(by_pages(), options=FREE)
    ours, theirs = (jax.grad(lambda q, f=f: f(q, *others).sum())(q) for f in (fused, by_pages()))  # type: ignore[misc]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = (
        lax.scan(lambda q, _, f=f: (f(q, *others), None), q, None, length=3)[0]
        for f in (fused, by_pages())  # type: ignore[misc]
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(given) == 5


def test_folds_read_what_is_stored():
    """Their chunks are pieces of arrays."""
    random = np.random.default_rng(0)
    x, rows, index = random.normal(size=(3, 12)), random.normal(size=(5, 1)), np.array([4, 0, 2])
    x, rows = jnp.asarray(x, jnp.float32), jnp.asarray(rows, jnp.float32)

    def function(x, rows, index):
        return jax.nn.logsumexp(x * rows[index], -1)

    step = pf.fold(function, axis=(1, None, None), length=12)
    state = step.init(x[:, :4], rows, index)
    for start in (0, 4, 8):
        state = step.update(state, x[:, start : start + 4], rows, index, start=start)
    np.testing.assert_allclose(step.finish(state), function(x, rows, index), rtol=1e-6)


def test_heads_first_is_looked_up_too():
    q, length, k, v, table = arguments()
    swapped = [jnp.asarray(np.transpose(x, (2, 0, 1, 3))) for x in (k, v)]
    assert gathers(planned(heads_first, q, length, *swapped, table)) == []
