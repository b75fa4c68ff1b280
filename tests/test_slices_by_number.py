"""Kernels in the body of a scan that read their element of an array where it is, by the number of the trip."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import bodies
from pallasfuse.device import find
from pallasfuse.first_time import Once
from pallasfuse.indirect import lookups_in
from pallasfuse.ir.boundary import NO_LOOP
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.price.terms import Price
from pallasfuse.primitive import FusedCall
from pallasfuse.targets import default_for

LAYERS, ROWS, WIDTH = 5, 8, 32


def layer(x, p):
    """A norm with a gain of its own before a product with weights of its own."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["gain"]
    return x + jnp.tanh(y @ p["weights"]), y.sum(-1)


def scanned(x, p, **how):
    return lax.scan(layer, x, p, **how)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X = drawn(ROWS, WIDTH)
P = {"gain": drawn(LAYERS, WIDTH, seed=1), "weights": drawn(LAYERS, WIDTH, WIDTH, seed=2) * 0.3}


def fused(function, **options):
    return pf.fuse(function, options=FuseOptions(target="interpret", check=False, price=False, **options))


def taken(plan):
    """The arrays that kernels in bodies take their elements from."""
    kernels = [k for b in plan.bodies for k in b.plan.kernels]
    return {x.source.name for k in kernels for x in k.lookups.values() if x.is_slice}


def close(have, want):
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_kernel_takes_its_slices_by_itself():
    function = fused(scanned)
    plan = function.explain(X, P)
    assert taken(plan) == {"p_gain_1", "p_weights_2"} and all(
        k.takes_slices for b in plan.bodies for k in b.plan.kernels
    )
    close(function(X, P), scanned(X, P))
    close(jax.vmap(function, (0, None))(np.stack([X, 2 * X]), P), jax.vmap(scanned, (0, None))(np.stack([X, 2 * X]), P))


def test_what_is_read_by_number_is_proved():
    report = pf.verify(fused(scanned), X, P, delta=1e-4)
    assert report.equivalent, str(report)
    assert any("lookups of" in stage for stage in report.proof.stages)


@pytest.mark.parametrize("how", [{"reverse": True}, {"unroll": 5}], ids=str)
def test_where_xla_would_have_to_find_the_number_slices_stay(how):
    function = fused(lambda x, p: scanned(x, p, **how))
    plan = function.explain(X, P)
    assert plan.bodies and not taken(plan)
    close(function(X, P), scanned(X, P, **how))


def test_elements_that_are_no_arrays_stay_slices():
    """The scale of each trip is a number, and keys have a type of their own; what is read by number stands beside them."""

    def step(x, p):
        return jax.nn.softmax(x * p["scale"] + p["gain"] + jax.random.normal(p["key"]), -1), None

    def steps(x, p):
        return lax.scan(step, x, p)[0]

    p = {"gain": P["gain"], "scale": drawn(LAYERS, seed=3), "key": jax.random.split(jax.random.key(0), LAYERS)}
    function = fused(steps)
    assert taken(function.explain(X, p)) == {"p_gain_1"}
    close(function(X, p), steps(X, p))


def test_a_body_that_cannot_be_traced_again_keeps_its_slices(monkeypatch):
    monkeypatch.setattr(bodies, "element_by_number", lambda *_: 1 / 0)
    function = fused(scanned)
    plan = function.explain(X, P)
    assert plan.bodies and not taken(plan)
    close(function(X, P), scanned(X, P))


def test_a_target_whose_kernels_xla_looks_into_reads_slices():
    plan = pf.fuse(scanned, options=FuseOptions(target="xla", check=False, price=False)).explain(X, P)
    assert plan.bodies and not taken(plan)


def element(w, i, axis=0):
    return jnp.take(w, i, axis=axis, mode="clip")


@pytest.mark.parametrize(("axis", "in_one_piece"), [(0, True), (1, False), (2, False)])
def test_only_what_lies_in_one_piece_is_a_slice(axis, in_one_piece):
    jaxpr = jax.make_jaxpr(lambda w, i: element(w, i, axis) * 2)(drawn(5, 6, 7), 3)
    (lookup,) = lookups_in(convert(jaxpr).program).values()
    assert lookup.is_slice == in_one_piece and not lookup.table.axes


def test_a_slice_that_something_else_reads_is_taken_all_the_same():
    def function(x, w, i):
        part = element(w, i)
        return jax.nn.softmax(x * part, -1), jnp.abs(part).max(0)

    arguments = drawn(8, 32), drawn(5, 8, 32), 3
    taking = fused(function)
    assert [k.takes_slices for k in taking.explain(*arguments).kernels] == [True]
    close(taking(*arguments), function(*arguments))


def planned(saved_us, stored_us=0.0, *, takes, fuses=True):
    """What `best_form` looks at of a plan with one kernel."""
    kernel = SimpleNamespace(replaced=Price(9.0 + saved_us, ()), price=Price(9.0, ()), takes_slices=takes)
    boundary = {"kernel": Price(stored_us, ())}
    return SimpleNamespace(fuses=fuses, kernels=[kernel], at_boundary=boundary, options=FuseOptions(price=True))


@pytest.mark.parametrize(
    ("by_number", "sliced", "best"),
    [
        (planned(5.0, takes=True), planned(3.0, takes=False), True),
        (planned(3.0, takes=True), planned(5.0, takes=False), False),
        (planned(3.0, takes=True), planned(5.0, 4.0, takes=False), True),
        (planned(5.0, takes=False), planned(3.0, takes=False), False),
        (planned(3.0, takes=True), planned(3.0, takes=False), False),
        (planned(3.0, takes=True), planned(5.0, takes=False, fuses=False), True),
        (planned(3.0, takes=True, fuses=False), planned(5.0, takes=False, fuses=False), None),
    ],
)  # fmt: skip
def test_the_form_is_used_whose_kernels_save_more(by_number, sliced, best):
    forms = [bodies.BodyForm(None, NO_LOOP, by_number=n) for n in (True, False)]
    found = bodies.best_form(forms, lambda form: ("call", by_number if form.by_number else sliced))
    assert (None if found is None else found[0].by_number) == best


# --- products, and what a loop carries, on a GPU

H200 = default_for("cuda", frozenset({"9.0"})).on(find("NVIDIA H200", "gpu")).judged(timed=False, one_device=True)


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def gated(x, p):
    """Two products in a row, the second of what lies side by side in the result of the first."""
    left, right = jnp.split(x @ p["up"], 2, axis=-1)
    return x + (left * jax.nn.silu(right)) @ p["down"], None


def planned_for_gpu(function, *structs):
    jaxpr = jax.make_jaxpr(function)(*structs)
    return FusedCall(jaxpr, FuseOptions(check=False, price=True), "function", Once()).plan(H200)


@pytest.mark.parametrize(("rows", "number"), [(8, 2), (64, 2), (4096, 0)])
def test_products_of_few_rows_take_their_weights_by_themselves(rows, number):
    """A library would have them copied, which takes longer than its product of few rows."""
    weights = {"up": half(6, 2048, 12288), "down": half(6, 6144, 2048)}
    plan = planned_for_gpu(lambda x, p: lax.scan(gated, x, p), half(rows, 2048), weights)
    kernels = [k for b in plan.bodies for k in b.plan.kernels]
    assert len(taken(plan)) == number == sum(k.takes_slices for k in kernels)


@pytest.mark.parametrize("shape", [(8, 2048, 8192), (8, 1024, 8192), (16, 5120, 4096)])
def test_a_product_alone_is_the_librarys_where_nothing_is_copied(shape):
    """Though it is predicted to take 0.77 to 0.84 of XLA's time: a product with an end that takes as much less is a kernel."""
    rows, summed, columns = shape
    assert not planned_for_gpu(lambda x, w: x @ w, half(rows, summed), half(summed, columns)).kernels
    kernels = planned_for_gpu(
        lambda x, w, r: jax.nn.silu(x @ w + r), half(rows, summed), half(summed, columns), half(rows, columns)
    ).kernels
    assert len(kernels) == 1


def test_a_cache_that_a_loop_carries_is_read_where_it_is():
    """In a scan over layers each cache gets one more row (`decompositions.in_place`)."""

    def layer(x, now):
        w, cache = now
        cache = lax.dynamic_update_slice(cache, (x @ w).reshape(8, 16, 1, 128), (0, 0, 7, 0))
        scores = jnp.einsum("bhd,bhtd->bht", x.reshape(8, 16, 128), cache, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        return jnp.einsum("bht,bhtd->bhd", shares, cache).reshape(8, 2048), cache

    plan = planned_for_gpu(
        lambda x, *xs: lax.scan(layer, x, xs), half(8, 2048), half(6, 2048, 2048), half(6, 8, 16, 1024, 128)
    )
    assert plan.written_out
    (body,) = (b.plan for b in plan.bodies)
    carried = {t.name for t in body.program.inputs if len(t.axes) == 5}
    updated = {n.name for n in body.program.nests if getattr(n, "form", "") == "update"}
    assert len(carried) == len(updated) == 1
    assert updated <= taken(plan)


@pytest.mark.parametrize("rows", [8, 64])
def test_layers_that_a_loop_takes_by_its_counter_are_read_where_they_are(rows):
    def looped(x, p):
        return lax.fori_loop(0, 6, lambda i, x: gated(x, jax.tree.map(lambda w: w[i], p))[0], x)

    plan = planned_for_gpu(looped, half(rows, 2048), {"up": half(6, 2048, 12288), "down": half(6, 6144, 2048)})
    assert [k.takes_slices for b in plan.bodies for k in b.plan.kernels] == [True, True]


@pytest.mark.parametrize("shift", [0, -1, 3], ids=["within", "from the end", "beyond the last"])
def test_rows_taken_by_a_number_are_those_that_xla_cuts_out(shift):
    """A number beyond the last row names that one, as `dynamic_slice` has it."""

    function = fused(lambda x, p: by_counter(x, p, shift))
    assert len(taken(function.explain(X, P))) == 1
    close(function(X, P), by_counter(X, P, shift))


def by_counter(x, p, shift=0, extra=lambda w, i: 0.0):
    """The layers, of which each is cut out by the counter of a loop. extra: what else is computed from the weights."""

    def body(i, x):
        gain, weights = (lax.dynamic_index_in_dim(p[n], i + shift, keepdims=False) for n in ("gain", "weights"))
        return layer(x, {"gain": gain, "weights": weights})[0] + extra(p["weights"], i)

    return lax.fori_loop(0, LAYERS, body, x)


def test_a_part_of_a_row_is_no_row():
    function = fused(
        lambda x, p: by_counter(x, p, extra=lambda w, i: lax.dynamic_slice(w, (i, 3, 0), (1, ROWS, WIDTH))[0])
    )
    assert len(taken(function.explain(X, P))) == 1
    (gather,) = (
        e for b in function.explain(X, P).bodies for e in b.plan.converted.jaxpr.eqns if e.primitive.name == "gather"
    )
    assert gather.params["mode"] == lax.GatherScatterMode.CLIP


def test_rows_that_cannot_be_traced_stay_slices(monkeypatch):
    monkeypatch.setattr(bodies, "element_by_number", lambda *_, **__: 1 / 0)
    function = fused(by_counter)
    assert not taken(function.explain(X, P))
    close(function(X, P), by_counter(X, P))
