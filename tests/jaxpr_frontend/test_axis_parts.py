"""Concatenations along a reduced axis are parts of that axis: golden text, meaning, proof, and what is left alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from jax import lax

import pallasfuse as pf
from pallasfuse.execution import execute
from pallasfuse.form_choice import Placements, choose_groups
from pallasfuse.ir.loop_program import Nest
from pallasfuse.jaxpr_frontend import added_equations, axis_parts, convert, convert_in_parts
from pallasfuse.pipeline import prove_plan, schedule_grouping
from pallasfuse.targets import find

H, N, D = 2, 40, 8
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


Q, K, V = draw(H, 24, D), draw(H, N, D), draw(H, N, D)
SINK, K1, V1, K3, V3 = draw(H), draw(H, 1, D), draw(H, 1, D), draw(H, 3, D), draw(H, 3, D)


def masked(s, fill=-jnp.inf):
    i, j = jnp.arange(s.shape[-2]), jnp.arange(s.shape[-1])
    return jnp.where(i[:, None] + 16 >= j[None, :], s, fill)


def sinks(q, k, v, sink):
    s = masked(jnp.einsum("hqd,hkd->hqk", q, k))
    s = jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (*s.shape[:-1], 1))], -1)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s)[..., :-1], v)


def attention(q, k, v, mask=lambda s: s):
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(mask(jnp.einsum("hqd,hkd->hqk", q, k))), v)


def one_more_key(q, k, v, k1, v1):
    return attention(q, jnp.concatenate([k, k1], 1), jnp.concatenate([v, v1], 1))


def keys_in_front(q, k, v, k3, v3):
    def mask(s):
        i, j = jnp.arange(s.shape[-2]), jnp.arange(s.shape[-1])
        return jnp.where((j[None, :] < 3) | (i[:, None] + 16 >= j[None, :] - 3), s, -jnp.inf)

    return attention(q, jnp.concatenate([k3, k], 1), jnp.concatenate([v3, v], 1), mask)


def zero_attention(q, k, v):
    k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0))) for x in (k, v))
    return attention(q, k, v)


def padded_rows(x):
    return jax.nn.softmax(jnp.pad(jnp.sin(x), ((0, 0), (2, 1)), constant_values=-1.0))[:, 2:-1] * x


def largest_with_one_more(x, y):
    both = jnp.concatenate([x * 2, y], -1)
    return jnp.max(both, -1), jnp.min(both, -1), jnp.sum(both, -1), jnp.prod(both, -1)


def any_and_all(x, y):
    both = jnp.concatenate([x > 0, y > 0], -1)
    return jnp.any(both, -1), jnp.all(both, -1)


def counts(x, y):
    return jnp.sum(jnp.concatenate([(100 * x).astype(jnp.int8), (100 * y).astype(jnp.int8)], -1), -1, dtype=jnp.int8)


X, Y = draw(5, 33), draw(5, 2)
PROGRAMS = {
    "sinks": (sinks, (Q, K, V, SINK)),
    "one more key": (one_more_key, (Q, K, V, K1, V1)),
    "keys in front": (keys_in_front, (Q, K, V, K3, V3)),
    "zero attention": (zero_attention, (Q, K, V)),
    "padded rows": (padded_rows, (X,)),
    "reductions": (largest_with_one_more, (X, Y)),
    "truth values": (any_and_all, (X, Y)),
    "integers": (counts, (X, Y)),
    "sinks of a batch": (jax.vmap(sinks, in_axes=(0, 0, 0, None)), (Q[None], K[None], V[None], SINK)),
    "a slice of two parts": (
        lambda x, y: jnp.sum(jnp.concatenate([y, jax.nn.softmax(x), y], -1)[:, 1:-2] ** 2, -1),
        (X, Y),
    ),
    "first axis": (lambda x, y: jax.nn.softmax(jnp.concatenate([x.T, y.T]), 0)[:-2].sum(0), (X, Y)),
}


def in_parts(function, arguments):
    return convert_in_parts(convert(jax.make_jaxpr(function)(*arguments)))


def planned(found, target="xla", **options):
    """The plan of a program whose axes were taken apart, with short tiles along the longest ones that are reduced."""
    reduced = {a for n in found.program.nests if isinstance(n, Nest) for a in n.reduced if a.extent > 16}
    options = pf.FuseOptions(price=False, check=False, tiles=tuple((a.name, 8) for a in sorted(reduced)), **options)
    placements = Placements(found, find(target), options)
    return schedule_grouping(placements, choose_groups(placements))


def results(plan, arguments):
    run = jax.jit(lambda *given: execute(plan, [*plan.converted.jaxpr.consts, *given]))
    return [np.asarray(x) for x in run(*map(jnp.asarray, arguments))]


def wide(arguments):
    return [np.asarray(a, np.float64) if np.issubdtype(np.asarray(a).dtype, np.floating) else a for a in arguments]


def compare(function, arguments, found):
    """The fused results are as near to those in float64 as the plain function's."""
    plain = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arguments))]
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*wide(arguments)))]
    for ours, theirs, true in zip(found, plain, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if not np.issubdtype(theirs.dtype, np.floating):
            np.testing.assert_array_equal(ours, theirs)
            continue
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        near = np.isfinite(theirs) & np.isfinite(true)
        off = [np.abs(np.where(near, a - true, 0)).max(initial=0) for a in (ours, theirs)]
        assert off[0] <= 2 * off[1] + 1e-6 * np.abs(np.where(near, true, 0)).max(initial=0)


@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_means_the_same(name):
    function, arguments = PROGRAMS[name]
    found = in_parts(function, arguments)
    assert found is not None
    assert not any(e.primitive.name in ("concatenate", "pad") for e in found.jaxpr.eqns)
    for target in ("xla", "interpret"):
        compare(function, arguments, results(planned(found, target), arguments))


@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_proven(name):
    function, arguments = PROGRAMS[name]
    proof = prove_plan(planned(in_parts(function, arguments)), delta=1e-4)
    assert proof.counterexample is None and "another form" in proof.stages
    assert not any(line.startswith("another form") for line in proof.uncovered), proof.uncovered


@pytest.mark.parametrize("name", ["sinks", "one more key", "zero attention"])
def test_the_fold_is_one_pass(name):
    function, arguments = PROGRAMS[name]
    (kernel,) = planned(in_parts(function, arguments)).kernels
    assert kernel.group.passes == 1 and len(kernel.group.folds) == 3
    assert kernel.group.folds[-1].hoisted.startswith("1 / ")  # the sum of all parts is divided by once


SPECIAL = [0.0, 100.0, -np.inf, np.inf, np.nan]


@pytest.mark.sampled(5, cover=())
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values(value):
    """NaN and infinities stand where the program has them, whatever the term that joins the fold is."""
    sink = SINK.copy()
    sink[1] = value
    arguments = (Q, K, V, sink)
    compare(sinks, arguments, results(planned(in_parts(sinks, arguments)), arguments))


def kept_apart(x, y, keep):
    s = jnp.where(keep, jnp.sin(x), -jnp.inf)
    m = jnp.maximum(s.max(-1), y[:, 0])
    return jnp.sum(jnp.where(keep, jnp.exp(s - m[:, None]), 0), -1)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("value", SPECIAL[:3])
def test_rows_without_an_element(value):
    """What is masked twice adds nothing, also where what the maximum is joined with is -inf."""
    keep = np.ones(X.shape, bool)
    keep[2] = False
    arguments = (X, np.full((5, 1), value, np.float32), keep)
    plan = planned(convert(jax.make_jaxpr(kept_apart)(*arguments)))
    (kernel,) = plan.kernels
    assert kernel.group.passes == 1
    compare(kept_apart, arguments, results(plan, arguments))


LEFT = {
    "two long parts": (lambda x: jax.nn.softmax(jnp.concatenate([x, 2 * x], -1)), (X,)),
    "a product alone": (lambda x, y, z: jnp.concatenate([x, y], -1) @ z, (X, Y, draw(35, 4))),
    "short": (lambda y: jnp.concatenate([y, y[:, :1]], -1).max(-1), (Y,)),
    "another axis": (lambda x: jnp.concatenate([x, x[:1]]).sum(-1), (X,)),
    "cyclic": (lambda x: jnp.cumsum(jnp.concatenate([x, x[:, :1]], -1), -1), (X,)),
    "between": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1))).sum(-1), (X,)),
}


@pytest.mark.parametrize("name", LEFT)
def test_it_is_left_alone(name):
    assert in_parts(*LEFT[name]) is None


def test_what_else_reads_the_whole_keeps_it():
    def function(x, y):
        p = jax.nn.softmax(jnp.concatenate([jnp.sin(x), y], -1))
        return p, p[:, :-2].sum(-1)

    found = in_parts(function, (X, Y))
    assert any(e.primitive.name == "concatenate" for e in found.jaxpr.eqns)
    plan = planned(found)
    compare(function, (X, Y), results(plan, (X, Y)))
    assert prove_plan(plan, delta=1e-4).counterexample is None


def test_the_price_decides():
    """A plan takes the axis apart where that is predicted to be faster, and only there."""
    long = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4096, 64), (8, 4096, 64), (8, 4096, 64), (8,))]
    for target in ("xla", "triton"):
        plan = pf.fuse(sinks, target=target, options=pf.FuseOptions(price=True)).explain(*long)
        (kernel,) = plan.kernels
        assert plan.converted.whole is not None and kernel.group.passes == 1
        assert not any("concatenat" in f.reason for f in plan.fallbacks)


def test_scopes_of_the_user_are_left():
    def function(x, y):
        with jax.named_scope("mine"):
            both = jnp.concatenate([jnp.sin(x), y], -1)
        return jax.nn.softmax(both).sum(-1)

    converted = convert(jax.make_jaxpr(function)(X, Y), exclude=("mine",))
    assert convert_in_parts(converted) is not None
    assert convert_in_parts(converted, exclude=("mine",)) is None


GOLDEN = """\
input q: float32[i:24, j:8]
input k: float32[l:40, j:8]
input sink: float32[]
t0[i, l]: float32 sum[j:8]= q[i, j] * k[l, j]
t1[i]: float32 = sink
t2[i]: float32 max[l:40]= t0[i, l]
t3[i]: float32 = t1[i]
t4[i]: float32 = max(t2[i], t3[i])
return t4"""


def test_golden_text():
    def function(q, k, sink):
        s = jnp.einsum("id,jd->ij", q, k)
        return jnp.concatenate([s, jnp.broadcast_to(sink, (s.shape[0], 1))], -1).max(-1)

    found = in_parts(function, (Q[0], K[0], SINK[0]))
    assert str(found.program) == GOLDEN


@st.composite
def programs(drawing):
    """Softmax, sums and products around random concatenations, paddings and slices along the reduced axis."""
    low, high = drawing(st.integers(0, 3)), drawing(st.integers(0, 3))
    pads = drawing(st.booleans())
    fill = drawing(st.sampled_from([0.0, -1.5, -np.inf, 3.0]))
    masks = drawing(st.booleans())
    cut = drawing(st.sampled_from(["none", "front", "back", "both"]))
    scale = drawing(st.sampled_from([1.0, 8.0]))
    statistic = drawing(st.sampled_from(["softmax", "logsumexp", "norm"]))

    note(f"{low=}, {high=}, {pads=}, {fill=}, {masks=}, {cut=}, {scale=}, {statistic=}")

    def function(q, k, v, more):
        s = scale * jnp.einsum("hqd,hkd->hqk", q, k)
        s = masked(s) if masks else s
        if pads:
            s = jnp.pad(s, ((0, 0), (0, 0), (low, high)), constant_values=fill)
        else:
            rows = jnp.broadcast_to(more[:, None, :], (*s.shape[:2], 6))
            s = jnp.concatenate([rows[..., :low], s, rows[..., 3 : 3 + high]], -1)
        n = s.shape[-1]
        if statistic == "logsumexp":
            return jax.nn.logsumexp(s, -1)
        bounded = jnp.tanh(s)
        normed = bounded / (1 + jnp.sum(jnp.square(bounded), -1, keepdims=True))
        p = normed if statistic == "norm" else jax.nn.softmax(s)
        start, stop = (low if cut in ("front", "both") else 0), (n - high if cut in ("back", "both") else n)
        p = p[..., start:stop]
        v = jnp.concatenate([v[:, : low - start], v, v[:, : stop - (n - high)]], 1)
        return jnp.einsum("hqk,hkd->hqd", p, v)

    return function, low + high > 0


def drawn(program, seed):
    """The program in parts, if it has any, and its arguments."""
    function, cuts = program
    generator = np.random.default_rng(seed)
    arguments = [generator.normal(size=s).astype(np.float32) for s in ((H, 24, D), (H, N, D), (H, N, D), (H, 6))]
    found = in_parts(function, arguments)
    assert (found is not None) == cuts
    return found, arguments


@settings(max_examples=4, deadline=None)
@given(programs(), st.integers(0, 2**31))
def test_random_programs(program, seed):
    found, arguments = drawn(program, seed)
    if found is not None:
        compare(program[0], arguments, results(planned(found), arguments))


@pytest.mark.deep  # `test_it_is_proven` has parts, too
def test_parts_that_are_cut_before_they_are_broadcast_are_proven():
    """What is shared by both programs is moved, not drawn: one of them cuts it before it is broadcast, the other after."""

    def function(q, k, v, more):
        scores = jnp.einsum("hqd,hkd->hqk", q, k)
        rows = jnp.broadcast_to(more[:, None, :], (*scores.shape[:2], 6))
        scores = jnp.concatenate([rows[..., :1], scores, rows[..., 3:5]], -1)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), jnp.concatenate([v[:, :1], v, v[:, :2]], 1))

    found, _ = drawn((function, True), 0)
    assert prove_plan(planned(found), delta=1e-4).counterexample is None


@settings(max_examples=1, deadline=None)
@given(programs(), st.integers(0, 2**31))
def test_random_programs_are_proven(program, seed):
    found, _ = drawn(program, seed)
    if found is not None:
        proof = prove_plan(planned(found), delta=1e-4)
        assert proof.counterexample is None
        assert not any(line.startswith("another form") for line in proof.uncovered), proof.uncovered


def _dropped(real):
    return lambda *args: real(*args)[:-1]


def _beside(real):
    def sliced(self, atom, dim, start, stop):
        return real(self, atom, dim, 0, stop - start)

    return sliced


MISTAKES = {
    "a maximum joined as a minimum": (sinks, (Q, K, V, SINK), "_JOINS[reduce_max]", lambda real: lax.min),
    "a sum joined as a product": (sinks, (Q, K, V, SINK), "_JOINS[reduce_sum]", lambda real: lax.mul),
    "a part left out": (sinks, (Q, K, V, SINK), "_longest_first", _dropped),
    "positions of a part": (keys_in_front, (Q, K, V, K3, V3), "_positions", lambda real: lambda e, s, _: real(e, s, 0)),
    "another element": (keys_in_front, (Q, K, V, K3, V3), "_Parts._sliced", _beside),
}


@pytest.mark.sampled(5, cover=())
@pytest.mark.parametrize("name", MISTAKES)
def test_the_proof_finds_mistakes(name, monkeypatch):
    function, arguments, place, wrong = MISTAKES[name]
    assert prove_plan(planned(in_parts(function, arguments)), delta=1e-4).counterexample is None
    table, _, key = place.partition("[")
    owner, _, method = table.rpartition(".")
    if key:
        entries = getattr(axis_parts, table)
        monkeypatch.setitem(entries, key[:-1], wrong(entries[key[:-1]]))
    else:
        where = getattr(axis_parts, owner) if owner else axis_parts
        monkeypatch.setattr(where, method, wrong(getattr(where, method)))
    found = prove_plan(planned(in_parts(function, arguments)), delta=1e-4).counterexample
    assert found is not None and found.stage == "another form"


@pytest.mark.parametrize("target", ["xla", "interpret"])
def test_positions_of_parts_are_whole_numbers(target):
    """bfloat16 has no 257: 256 + 1 is 256, but the position 257 of an iota is rounded to 258."""

    def picked(x):
        y = jnp.pad(x, ((0, 0), (1, 0)))
        return jnp.max(jnp.where(jax.lax.iota(jnp.bfloat16, 301) == 258.0, y, -jnp.inf), 1)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 300)), jnp.float32)
    got = pf.fuse(picked, options=pf.FuseOptions(check=False, price=False, target=target))(x)
    np.testing.assert_array_equal(got, picked(x))


def test_parts_of_equal_shapes_are_traced_once(monkeypatch):
    """Many equations on many short parts are few calls, with few sets of parameters."""

    def function(x, y):
        x = jnp.concatenate([x, y], -1)
        for _ in range(10):
            x = jnp.sin(x) * 2.0 + 1.0
        return x.sum(-1)

    traced = []
    make = jax.make_jaxpr

    def counting(run):
        traced.append(run)
        return make(run)

    shapes = jax.ShapeDtypeStruct((4, 64), jnp.float32), jax.ShapeDtypeStruct((4, 6), jnp.float32)
    jaxpr = convert(jax.make_jaxpr(function)(*shapes)).jaxpr
    monkeypatch.setattr(added_equations.jax, "make_jaxpr", counting)
    parts = axis_parts.in_parts(jaxpr)
    assert parts is not None and 0 < len(traced) < len(parts.jaxpr.eqns) / 4


def test_numbers_that_are_equal_and_not_the_same_are_traced_apart():
    zeros = [added_equations._key(partial(max, y=v), ()) for v in (0.0, -0.0, 0, False)]
    assert len(set(zeros)) == len(zeros)


def shifted(x, by):
    """A window of three elements, so many apart, as sums of shifted arrays."""
    padded = jnp.pad(x, ((0, 0), (by, by)))
    return sum(padded[:, t * by : t * by + x.shape[1]] for t in range(3))


def test_windows_one_after_the_other_do_not_cut_an_axis_in_ever_more_parts():
    """An axis that all of them together would cut too often stays whole; a softmax beside it is taken apart all the same."""

    def program(x, q, k, v, sink):
        for by in (1, 2, 4, 3, 1, 2):
            x = jnp.tanh(shifted(x, by)) / jnp.sum(x * x, axis=1, keepdims=True)
        return x, sinks(q, k, v, sink)

    arguments = (draw(3, 200), Q, K, V, SINK)
    found = in_parts(program, arguments)
    before = len(convert(jax.make_jaxpr(program)(*arguments)).jaxpr.eqns)
    assert found is not None and len(found.jaxpr.eqns) < 1.5 * before
    assert in_parts(lambda x: program(x, *arguments[1:])[0], arguments[:1]) is None
    assert in_parts(lambda x: jnp.sum(jnp.tanh(shifted(x, 1)), axis=1), arguments[:1]) is not None


@pytest.mark.parametrize("windows", [2, 4, 8])
def test_parts_are_no_more_than_several_times_as_many_equations(windows):
    def program(x):
        for _ in range(windows):
            x = jnp.tanh(shifted(x, 1))
        return jnp.sum(x, axis=1)

    jaxpr = convert(jax.make_jaxpr(program)(draw(3, 2000))).jaxpr
    found = axis_parts.in_parts(jaxpr)
    assert (found is None) == (windows == 8)
    assert found is None or len(found.jaxpr.eqns) <= 9 * len(jaxpr.eqns) + 64
