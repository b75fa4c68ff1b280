"""Programs compared operation for operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.fusion.inline import deduplicate
from pallasfuse.ir.evaluate import evaluate_program
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.verification.structure import Positions, Structure, terms
from tests.programs_by_name import PROGRAMS, program, program_of

pytestmark = pytest.mark.any_jax

X, Y = (jax.ShapeDtypeStruct((3, 4), jnp.float32),) * 2
INPUTS = (11, 22)


def hashes(function, inputs=INPUTS):
    return terms(jax.make_jaxpr(function)(X, Y).jaxpr, inputs)


@jax.jit
def difference_and_product(x, y):
    return x - y, x * y


def calling(x, y):
    d, p = difference_and_product(x, y)
    return d / p


# --- terms of a jaxpr


def test_inlining_keeps_the_terms():
    closed = jax.make_jaxpr(lambda x, y: (calling(x, y), jax.nn.softmax(jax.nn.relu(x), -1)))(X, Y)
    converted = convert(closed)
    assert "pjit" not in str(converted.jaxpr)
    assert terms(converted.original, INPUTS) == terms(converted.jaxpr, INPUTS)


def test_swapped_outputs_of_a_call_are_noticed():
    original = jax.make_jaxpr(calling)(X, Y).jaxpr
    (call,) = [e for e in original.eqns if len(e.outvars) == 2]
    wrong = original.replace(
        eqns=[e.replace(outvars=e.outvars[::-1]) if e is call else e for e in original.eqns]
    )  # fmt: skip
    assert terms(original, INPUTS) == terms(original, INPUTS)
    assert terms(original, INPUTS) != terms(wrong, INPUTS)


def test_swapped_arguments_of_a_call_are_noticed():
    original = jax.make_jaxpr(calling)(X, Y).jaxpr
    wrong = original.replace(
        eqns=[e.replace(invars=e.invars[::-1]) if len(e.outvars) == 2 else e for e in original.eqns]
    )
    assert terms(original, INPUTS) != terms(wrong, INPUTS)


def test_every_operation_counts():
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.exp(x) + y * 2.0)(X, Y).jaxpr
    seen = {tuple(terms(jaxpr, INPUTS)), tuple(terms(jaxpr, INPUTS[::-1])), tuple(terms(jaxpr, (11, 11)))}
    for n, eqn in enumerate(jaxpr.eqns):
        changed = eqn.replace(invars=[eqn.invars[0], *eqn.invars[:1]][: len(eqn.invars)])
        if changed.invars != eqn.invars:
            seen.add(tuple(terms(jaxpr.replace(eqns=[*jaxpr.eqns[:n], changed, *jaxpr.eqns[n + 1 :]]), INPUTS)))
    assert len(seen) == 5


# --- hashes of a loop program


def evaluated(loops):
    domain = Structure()
    inputs = {t.name: domain.variable(t.name, [a.extent for a in t.axes]) for t in loops.inputs}
    return evaluate_program(loops, inputs, domain, lambda nest, _: domain.variable(nest.name, [5] * len(nest.axes)))


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "entropy", "two_softmaxes", "group_norm"])
def test_removing_duplicates_keeps_every_term(name):
    before, after = evaluated(program(name)), evaluated(deduplicate(program(name)))
    assert name in PROGRAMS
    for tensor, value in before.items():
        np.testing.assert_array_equal(value, after[tensor])


def test_a_wrong_duplicate_is_noticed():
    """The sum of the other array is taken for this one."""
    loops = program_of(lambda x, y: (jnp.sum(jnp.exp(x), -1), jnp.sum(jnp.exp(y), -1)), (3, 4), (3, 4))
    sums = [n for n in loops.nests if n.reduced]
    assert len(sums) == 2
    values = evaluated(loops)
    assert not (values[sums[0].name] == values[sums[1].name]).any()


def test_operations_types_and_positions_are_told_apart():
    domain = Structure()
    x, y = domain.variable("x", (2, 3)), domain.variable("y", (2, 3))
    values = [
        x, y, domain.apply("add", [x, y], "float32"), domain.apply("add", [y, x], "float32"),
        domain.apply("sub", [x, y], "float32"), domain.apply("add", [x, y], "float16"),
        domain.broadcast(domain.reduce(SUM, x, (1,), "float32"), (2, 3)),
        domain.broadcast(domain.reduce(MAX, x, (1,), "float32"), (2, 3)),
        domain.broadcast(domain.reduce(SUM, x, (0,), "float32"), (2, 3)),
        domain.broadcast(domain.constant(1.0, "float32", 2), (2, 3)),
        domain.broadcast(domain.constant(1, "int32", 2), (2, 3)),
        domain.integers(np.arange(6).reshape(2, 3), "int32"),
    ]  # fmt: skip
    flat = np.stack(values)
    assert len(np.unique(x)) == 6
    for n, a in enumerate(flat):
        for b in flat[:n]:
            assert not (a == b).any()


def test_positions_are_added_up_and_nothing_else_is():
    domain = Positions()
    rows, columns = (domain.integers(n, "int32") for n in (np.arange(4)[:, None], np.arange(6)[None]))

    def times(x, factor):
        return domain.apply("mul", [x, domain.constant(factor, "int32", 2)], "int32")

    found = domain.apply("add", [times(rows, 6), columns], "int32")
    wanted = domain.integers(np.arange(24), "int32")
    np.testing.assert_array_equal(found.ravel(), wanted)
    turned = domain.apply("add", [times(columns, 4), rows], "int32")  # as many different places, in another order
    assert sorted(turned.ravel()) == sorted(wanted.ravel()) and (turned.ravel() != wanted).any()
    x = domain.variable("x", (4, 6))
    for op, args, dtype in (
        ("add", [x, found], "int32"),
        ("sub", [found, found], "int32"),
        ("add", [found, found], "float32"),
    ):
        np.testing.assert_array_equal(domain.apply(op, args, dtype), Structure().apply(op, args, dtype))


def test_the_order_of_a_reduction_does_not_matter():
    domain = Structure()
    x = domain.variable("x", (2, 5))
    again = domain.take(x, (slice(None), np.array([3, 0, 4, 1, 2])))
    np.testing.assert_array_equal(domain.reduce(SUM, x, (1,), "float32"), domain.reduce(SUM, again, (1,), "float32"))
    twice = domain.take(x, (slice(None), np.array([3, 0, 4, 1, 1])))
    assert not (domain.reduce(SUM, x, (1,), "float32") == domain.reduce(SUM, twice, (1,), "float32")).any()
