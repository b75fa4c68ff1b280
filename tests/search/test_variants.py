"""Generated variants: the same with and without pruning, each law finds its own, and nothing wrong is accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.errors import Refusal
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.expr import Apply, postorder
from pallasfuse.jaxpr_frontend.conversion import convert
from pallasfuse.search.abstract import LAWS, Law
from pallasfuse.search.agreement import agree, agree_in_fields
from pallasfuse.search.operators import Contract, Map
from pallasfuse.search.prefixes import Bounds, Prefixes
from pallasfuse.search.variants import parts, variants
from pallasfuse.search.written import written

BATCH, WIDTH, OUT, RANK = 2, 8, 4, 3


def program(function, *shapes):
    arguments = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    return convert(jax.make_jaxpr(function)(*arguments)).program


def low_rank():
    return program(lambda x, w, a, b: x @ w + x @ a @ b, (BATCH, WIDTH), (WIDTH, OUT), (WIDTH, RANK), (RANK, OUT))


def gated():
    return program(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (BATCH, WIDTH), (WIDTH, OUT), (WIDTH, OUT))


def two_products():
    return program(lambda x, a, b: x @ a + x @ b, (BATCH, WIDTH), (WIDTH, OUT), (WIDTH, OUT))


def scaled_rows():
    return program(lambda x, s, a: (x / s) @ a + s, (BATCH, WIDTH), (BATCH, 1), (WIDTH, OUT))


def norm_product():
    def function(x, w):
        return (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)) @ w

    return program(function, (BATCH, WIDTH), (WIDTH, OUT))


def weighted_mean():
    def function(q, k, v):
        e = jnp.exp(q @ k.T / 8)
        return (e / e.sum(-1, keepdims=True)) @ v

    return program(function, (BATCH, WIDTH), (OUT, WIDTH), (OUT, RANK))


def operations(program):
    """The number of operations that compute all elements."""
    volumes = [int(np.prod([a.extent for a in (*n.axes, *n.reduced)])) for n in program.nests]
    return float(sum(volumes))


def found(source, laws=LAWS, most=4):
    result = variants(source, operations, Bounds(most, 10**7), laws)
    assert not isinstance(result, Refusal)
    return result


def forms(result):
    return {str(v.program) for v in result.found}


def programs_of_one_law():
    """A law, a program, and the operators of a variant that is found only with the law."""
    square, column = (RANK, RANK), (RANK, 1)
    yield Law.DISTRIBUTE, program(lambda a, b, c: (a + b) * c, square, square, square), 3
    yield Law.SUMS, program(lambda a, b, c: (a * b) @ c, column, square, (RANK, OUT)), 2
    yield Law.INVERSES, program(lambda a, b, c: a / b / c, square, square, square), 2
    yield Law.ROOTS, program(lambda a, b: jnp.sqrt(jnp.exp(a)) * jnp.sqrt(jnp.exp(b)), square, square), 4
    yield Law.EXPONENTIALS, program(lambda a, b: jnp.exp(a) * jnp.exp(b) + a + b, square, square), 3


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(
    "source",
    [two_products, scaled_rows, *(pytest.param(f, marks=pytest.mark.deep) for f in (norm_product, low_rank, gated))],
    ids=lambda f: f.__name__,
)
def test_the_same_variants_with_and_without_pruning(source):
    most = len(written(source()).operators)
    pruned, every = found(source(), most=most), found(source(), None, most)
    assert pruned.counted.complete and every.counted.complete
    assert forms(pruned) == forms(every) and len(forms(pruned)) > 1
    assert every.counted.prefixes > 20 * pruned.counted.prefixes


@pytest.mark.parametrize("law, source, most", list(programs_of_one_law()), ids=lambda x: getattr(x, "name", None))
def test_without_a_law_a_variant_is_lost(law, source, most):
    assert forms(found(source, LAWS - {law}, most)) < forms(found(source, most=most))


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("source", [weighted_mean, low_rank, gated, norm_product], ids=lambda f: f.__name__)
def test_variants_compute_the_same(source):
    result = found(source(), most=5)
    draw = np.random.default_rng(0)
    inputs = {t.name: draw.normal(size=[a.extent for a in t.axes]) for t in source().inputs}
    (name,) = source().outputs
    expected = evaluate(source(), inputs)[name]
    for variant in result.found:
        np.testing.assert_allclose(evaluate(variant.program, inputs)[name], expected, rtol=1e-6)
    assert result.rejected == 0


def test_two_products_of_low_rank_or_one_of_a_sum_of_weights():
    result = found(low_rank())
    shapes = {tuple(sorted(len(n.reduced) + len(n.axes) for n in v.program.nests)) for v in result.found}
    assert {(2, 3, 3, 3), (2, 3, 3)} <= shapes
    assert result.best.us <= result.written.us


def test_a_norm_is_applied_after_the_product():
    result = found(norm_product())
    last = [v.program.nests[-1] for v in result.found]
    assert any(not n.is_reduction for n in last), "the product of what is not normalised is scaled"
    assert any(n.is_reduction for n in last), "as it is written"


def test_a_quotient_is_taken_after_the_sum():
    result = found(weighted_mean(), most=5)
    assert any(
        isinstance(v.program.nests[-1].body, Apply) and v.program.nests[-1].body.op == "div" for v in result.found
    )


def test_a_wrong_variant_needs_the_check():
    """Abstractly, sums move past all factors: without a comparison of numbers, (x . x) (y . z) would do for (x . y) (z . x)."""
    shape = (BATCH, WIDTH)
    source = written(program(lambda x, y, z: (x * y).sum(1) * (z * x).sum(1), shape, shape, shape))
    right = Prefixes(source, Bounds(3)).run().found
    unchecked = Prefixes(source, Bounds(3), verified=False).run().found
    assert set(right) < set(unchecked)
    wrong = source.nests(next(n for n in unchecked if n not in right))
    assert not agree(source.program, wrong) and not agree_in_fields(source.program, wrong)


def test_what_the_check_rejects_is_counted_and_never_the_best():
    result = variants(low_rank(), operations, Bounds(4), check=lambda one, other: False)
    assert [v.program for v in result.found] == [result.written.program] and result.rejected > 0
    assert result.best is result.written


def test_bounds_keep_the_best_so_far_and_do_not_depend_on_the_machine():
    few = [variants(low_rank(), operations, Bounds(4, prefixes=300)) for _ in range(2)]
    assert not few[0].counted.complete and few[0].counted.prefixes == 300
    assert forms(few[0]) == forms(few[1]) <= forms(found(low_rank()))
    none = variants(low_rank(), operations, Bounds(4, seconds=0.0, prefixes=10**6))
    assert none.best.us <= none.written.us
    small = variants(low_rank(), operations, Bounds(4, elements=BATCH * WIDTH))
    assert forms(small) < forms(found(low_rank()))


def test_tensors_of_equal_shapes_have_different_elements():
    """As they had not, the product of one matrix with itself was a variant of that of two."""
    source = written(gated())
    draws = [source.table.value(n) for n in source.inputs]
    assert all(not np.array_equal(a, b) for n, a in enumerate(draws) for b in draws[:n] if a.shape == b.shape)


def test_functions_of_one_tensor_are_one_operator_and_products_are_contractions():
    source = written(norm_product())
    rows = [source.table.rows[n] for n in source.operators]
    assert [type(r) for r in rows].count(Contract) == 2
    (function,) = (r.function for r in rows if isinstance(r, Map))
    assert [n.op for n in postorder(function) if isinstance(n, Apply)] == ["add", "rsqrt"]


def test_long_programs_are_taken_in_parts():
    def function(x, a, b):
        y = jnp.tanh(x @ a)
        return (y * jax.lax.rsqrt((y * y).sum(-1, keepdims=True))) @ b

    source = program(function, (BATCH, WIDTH), (WIDTH, RANK), (RANK, OUT))
    pieces = parts(source, 3)
    assert len(pieces) > 1 and all(len(p.nests) <= 3 for p in pieces)
    draw = np.random.default_rng(0)
    known = {t.name: draw.normal(size=[a.extent for a in t.axes]) for t in source.inputs}
    expected = evaluate(source, known)[source.outputs[0]]
    for piece in pieces:
        known |= evaluate(piece, known)
    np.testing.assert_allclose(known[source.outputs[0]], expected, rtol=1e-6)
    assert all(not isinstance(variants(p, operations, Bounds(3)), Refusal) for p in pieces)


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda x: (x, x + 1), "2 outputs"),
        (lambda x: jnp.where(x > 0, x, 0.0), "no operation on one or two tensors"),
        (lambda x: jnp.sort(x, -1), "not computed by a loop nest"),
    ],
)
def test_programs_that_have_no_operators_are_refused(function, reason):
    refused = variants(program(function, (RANK, RANK)), operations)
    assert isinstance(refused, Refusal) and reason in refused.reason
