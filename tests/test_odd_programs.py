"""One odd equation in a function, or a value that no kernel has a type for, leaves itself to XLA, and not what stands beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasfuse as pf
from pallasfuse.emission import pallas_kernel
from pallasfuse.errors import FusionError
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import prove_plan

RNG = np.random.default_rng(0)
QKV = tuple(jnp.asarray(RNG.standard_normal((2, 48, 16)), jnp.float32) for _ in range(3))
SWITCHES = jnp.asarray([[0, 1] * 24, [1, 1] * 24], jnp.int32)
LABELS = jnp.asarray(RNG.integers(0, 5, (2, 48, 16)), jnp.int8)
PACKED = jnp.asarray(RNG.integers(-(2**31), 2**31, (2, 48, 2)), jnp.int32)
KEY = jax.random.key(0)
MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
EVERYTHING = FuseOptions(price=False, check=False)


def core(q, k, v, scores=lambda s: s, weights=lambda p: p):
    p = jax.nn.softmax(scores(jnp.einsum("hid,hjd->hij", q, k)), axis=-1)
    return jnp.einsum("hij,hjd->hid", weights(p), v)


@jax.custom_batching.custom_vmap
def halved(x):
    return 0.5 * x


@halved.def_vmap
def _(size, batched, x):
    del size, batched
    return 0.25 * x, True  # another number, to be recognised


def constrain(x):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P("x")))


def heads_without_elements(q, k, v):
    """Layers of which one has no heads, and a cache that is still empty."""
    return core(q, jnp.concatenate([k[:, :0], k], 1), v), core(q[:0], k[:0], v[:0]), jnp.max(q[:, :0], 1, initial=-1.0)


def sums_of_nothing(q, k, v):
    return core(q, k, v), q[0, :, :0] @ k[0, :, :0].T, jnp.zeros((0, 6)).reshape(3, 0, 2), jnp.ones((4, 0)).sum(1)


def beside_a_scan(q, k, v):
    gate = lax.associative_scan(jnp.multiply, jax.nn.sigmoid(q), axis=1)
    return core(q, k, v) * gate


def beside_a_recurrence(q, k, v):
    def join(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    return core(q, k, v), lax.associative_scan(join, (jax.nn.sigmoid(q), k), axis=1)


def rotated_by_complex_numbers(q, k, v):
    def rotate(x):
        z = lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * jnp.arange(x.shape[1], dtype=x.dtype))[:, None]
        return jnp.stack([z.real, z.imag], -1).reshape(x.shape)

    return core(rotate(q), rotate(k), v), jnp.abs(jnp.fft.fft(v))


def dropped_out(q, k, v, key):
    def drop(p, rate=0.1):
        kept = jax.random.bernoulli(key, 1 - rate, p.shape)
        return jnp.where(kept, p / (1 - rate), 0)

    return core(q, k, v, weights=drop), jax.random.split(key)


def eight_bits(q, k, v):
    stored = v.astype(jnp.float8_e4m3fn)
    return core(q, k, stored.astype(v.dtype)), stored, k.astype(jnp.int4)


def masked_heads(q, k, v, switches):
    return core(q, k, v, weights=lambda p: jnp.einsum("hij,hj->hij", p, switches))


def integer_values(q, k, v, labels):
    del v
    return core(q, k, labels)


def boolean_values(q, k, v, labels):
    del v
    return core(q, k, labels > 2)


def own_rule_for_batches(q, k, v):
    return core(q, k, v, scores=halved)


def constrained(q, k, v):
    return constrain(core(*map(constrain, (q, k, v)), scores=constrain, weights=constrain))


def guarded_against_nan(q, k, v):
    hidden = jnp.arange(48)[:, None] >= jnp.arange(48)
    out = core(q, k, v, lambda s: jnp.where(hidden, s, -jnp.inf), lambda p: jnp.where(jnp.isnan(p), 0.0, p))
    return jnp.nan_to_num(out)


def beside_choices(q, k, v):
    out = core(q, k, v)
    chosen = lax.cond(q[0, 0, 0] > 0, jnp.sin, jnp.cos, out)
    return chosen, lax.top_k(out, 3), jnp.sort(k), jnp.argmax(v, -1), jnp.cumsum(q, 1), lax.cumlogsumexp(k, 1)


def split_and_joined(q, k, v):
    parts = jnp.split(jnp.concatenate([q, k, v], -1), 3, -1)
    return jnp.concatenate([core(*parts), v], 1)


def remembered_and_named(q, k, v):
    @jax.custom_vjp
    def twice(s):
        return 2 * s

    twice.defvjp(lambda s: (2 * s, None), lambda _, g: (2 * g,))

    def inner(q, k, v):
        with jax.named_scope("scores"):
            return core(q, k, v, jax.named_call(twice, name="twice"), jax.jit(lambda p: p))

    return jax.checkpoint(inner)(q, k, v)


def noise_of_bits(q, k, v):
    """Noise of words that are mixed by shifts, wrap, and are taken for the bits of floats, on the scores of an attention."""

    def noisy(s):
        word = jnp.arange(s.size, dtype=jnp.uint32).reshape(s.shape) * jnp.uint32(2654435761)
        word = word ^ ((word << 13) | (word >> 19))
        word = (word + jnp.uint32(17)) * jnp.uint32(2246822519)
        share = lax.bitcast_convert_type((word >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
        return s - jnp.log(1.25 - share)

    return core(q, k, v, noisy)


def packed_values(q, k, v, packed):
    """Values of four bits with a sign, eight in a word."""
    unpacked = packed[..., None] >> jnp.arange(0, 32, 4)
    values = ((unpacked & 15) - 8).reshape(*packed.shape[:-1], -1)
    return core(q, k, values.astype(jnp.float32) * 0.125)


BESIDE = [heads_without_elements, sums_of_nothing, beside_a_scan, beside_a_recurrence, rotated_by_complex_numbers, dropped_out,
          eight_bits, beside_choices, split_and_joined]  # fmt: skip
INSIDE = [noise_of_bits, packed_values, masked_heads, integer_values, boolean_values, own_rule_for_batches, constrained,
          guarded_against_nan, remembered_and_named]  # fmt: skip
MORE = {dropped_out: KEY, packed_values: PACKED, masked_heads: SWITCHES, integer_values: LABELS, boolean_values: LABELS}


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("target", ["xla", "interpret", "triton"])
def test_floats_of_bits_are_those_of_their_type(dtype, target):
    """Half types are computed in float32 where they may be: their bits are not."""
    words = jnp.uint32 if dtype == jnp.float32 else jnp.uint16
    x = lax.bitcast_convert_type(jnp.asarray(RNG.standard_normal((4, 64)), dtype), words)

    def shares(x):
        return jax.nn.softmax(lax.bitcast_convert_type(x, dtype).astype(jnp.float32) * 2, -1)

    def largest(x):
        value = lax.bitcast_convert_type(x, dtype)
        return jnp.max(value, -1, keepdims=True) - value

    for function in (shares, largest):
        if target == "triton":
            (kernel,) = pf.fuse(function, options=EVERYTHING).explain(x, target=target).kernels
            (phase,) = kernel.phases
            (got,) = pallas_kernel.call(phase.program, {phase.program.inputs[0].name: x}, interpret=True).values()
        else:
            fused = pf.fuse(function, target=target, options=EVERYTHING)
            assert fused.explain(x).kernels
            got = fused(x)
        close = 3e-3 if dtype == jnp.float16 else 2e-2 if dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(*(np.asarray(a, np.float64) for a in (got, function(x))), rtol=close, atol=close)


def arguments(function):
    return (*QKV, *([MORE[function]] if function in MORE else []))


def rolling(function):
    """The fused function, whose kernel takes the keys in several tiles, so that it is no copy of the plain one."""
    plan = pf.fuse(function, options=EVERYTHING).explain(*arguments(function))
    rolled = next(k.group.rolled for k in plan.kernels if len(k.group.folds) > 2)
    return pf.fuse(function, options=FuseOptions(price=False, check=False, tiles=((rolled.name, 16),)))


def same(got, want, **close):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        values = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b)]
        np.testing.assert_allclose(*[np.asarray(x, "complex128") for x in values], **close)


@pytest.mark.sampled(8, cover=("price",))
@pytest.mark.parametrize("price", [False, True])
@pytest.mark.parametrize("function", BESIDE + INSIDE, ids=lambda f: f.__name__)
def test_the_rest_is_planned(function, price):
    """With prices, too, nothing goes wrong; of so little work there need be no kernel then."""
    plan = pf.fuse(function, options=FuseOptions(price=price, check=False)).explain(*arguments(function))
    assert not [f for f in plan.fallbacks if "a bug" in f.reason]
    if price:
        return
    proof = prove_plan(plan, delta=1e-6)
    assert proof.holds, proof
    folds = max(plan.kernels, key=lambda k: len(k.group.folds)).group.folds
    assert len(folds) == 3, str(plan)
    outer = [f.operation for f in plan.fallbacks]
    assert function in BESIDE or not outer, plan.fallbacks


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("function", BESIDE + INSIDE, ids=lambda f: f.__name__)
def test_results(function):
    args = arguments(function)
    want = jax.jit(function)(*args)
    have = jax.jit(rolling(function))(*args)
    same(have, want, rtol=2e-5, atol=2e-5)
    if function in (dropped_out, eight_bits):  # other random numbers, other roundings
        return
    with jax.enable_x64(True):
        wide = [x.astype("float64") if x.dtype == jnp.float32 else x for x in args]
        exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*wide))]
    for a, b in zip(jax.tree.leaves(have), exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("function", [own_rule_for_batches, heads_without_elements, masked_heads, constrained],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_transformed(function):
    args = arguments(function)
    fused = pf.fuse(function, options=EVERYTHING)
    batch = [jnp.stack([x, x + 1]) for x in args]
    first = (0,) + (None,) * (len(args) - 1)
    want = jax.jit(jax.vmap(function))(*batch)
    for outer in (lambda f: f, jax.jit):
        same(outer(jax.vmap(fused))(*batch), want, rtol=2e-5, atol=2e-5)
    same(jax.vmap(jax.jit(fused), first)(batch[0], *args[1:]), jax.jit(jax.vmap(function, first))(batch[0], *args[1:]),
         rtol=2e-5, atol=2e-5)  # fmt: skip

    def total(f, q):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(q, *args[1:])))

    with pytest.warns(UserWarning, match="differentiating"):
        have = jax.jvp(lambda q: total(fused, q), args[:1], args[:1])
    same(have, jax.jit(lambda *at: jax.jvp(lambda q: total(function, q), at, at))(*args[:1]), rtol=2e-5, atol=2e-5)
    if function is own_rule_for_batches:
        return  # JAX takes no gradient of a function with such a rule
    have = jax.grad(lambda q: total(fused, q))(args[0])
    same(have, jax.jit(jax.grad(lambda q: total(function, q)))(args[0]), rtol=2e-5, atol=2e-5)


def test_a_rule_for_batches_is_the_users():
    """Its body is inlined where nothing is batched; `vmap` takes the rule, however it meets the function."""
    fused = pf.fuse(own_rule_for_batches, options=EVERYTHING)
    want = core(*QKV, scores=lambda s: 0.25 * s)
    batch = [x[None] for x in QKV]
    np.testing.assert_allclose(fused(*QKV), core(*QKV, scores=lambda s: 0.5 * s), rtol=2e-5, atol=2e-5)
    in_turn = (jax.vmap(fused), jax.jit(jax.vmap(fused)), jax.vmap(jax.jit(fused)), jax.vmap(jax.checkpoint(fused)))
    for batched in in_turn:
        np.testing.assert_allclose(batched(*batch)[0], want, rtol=2e-5, atol=2e-5)


def test_a_fold_may_be_batched_and_inlines_no_such_rule():
    with pytest.raises(FusionError, match="custom_vmap_call"):
        pf.fold(lambda q, k, v: core(q, halved(k), v), axis=(None, 1, 1)).init(*QKV)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(
    ("left", "right", "result"),
    [("bfloat16", "int32", None), ("float16", "int32", None), ("bfloat16", "float16", None), ("float32", "bool", None),
     ("bfloat16", "int32", "float32"), ("int8", "int32", None), ("bool", "int32", None), ("uint8", "int32", None),
     ("int8", "float16", "float32")],
)  # fmt: skip
def test_products_of_two_types_round_as_xla_does(left, right, result):
    """Numbers that the narrower types cannot hold: 257 is no bfloat16, 2049 no float16, and 300000 is infinite there."""
    x = np.array([[1, 3, 1], [0, 1, 2]])
    y = np.array([[257, 2049], [5, 70], [300000, 7]] if right == "int32" else [[1.0, 0.1], [0.0, 1 / 3], [3.0, 0.0]])
    args = jnp.asarray(x, left), jnp.asarray(y, right)

    def function(x, y):
        product = jnp.matmul(x, y, preferred_element_type=result)
        return product, jnp.sum(jnp.exp(-jnp.square(product - jnp.max(product, -1, keepdims=True))), -1)

    plan = pf.fuse(function, options=EVERYTHING).explain(*args)
    assert not [f for f in plan.fallbacks if "dot_general of" in f.reason]
    same(jax.jit(pf.fuse(function, options=EVERYTHING))(*args), jax.jit(function)(*args), rtol=0, atol=0)


def test_constraints_that_say_more_stay():
    """Another memory or layout is not the same array."""
    from jax.experimental.layout import Format, Layout

    far = NamedSharding(MESH, P(), memory_kind="pinned_host")
    laid_out = Format(Layout((1, 0, 2)), NamedSharding(MESH, P()))
    for asked in (far, laid_out):
        plan = pf.fuse(lambda x, asked=asked: lax.with_sharding_constraint(x, asked) + 1).explain(QKV[0])
        assert "sharding_constraint" in str(plan.converted.program), asked


def test_what_has_no_equations_yet_stays_with_xla():
    """JAX asks every primitive around such an operation for a rule of its own."""

    def root(a):
        x = jax.lax.custom_root(lambda x: x * x - a, a, lambda f, x: jax.lax.fori_loop(0, 20, lambda _, x: (x + a / x) / 2, x),
                                lambda g, y: y / g(jnp.ones_like(y)))  # fmt: skip
        return jax.nn.softmax(x)

    a = jnp.arange(1.0, 5.0)
    np.testing.assert_allclose(pf.fuse(root)(a), root(a), rtol=1e-6)
    with pytest.raises(pf.FusionError, match="makes equations of later"):
        pf.fuse(root, strict=True)(a)
