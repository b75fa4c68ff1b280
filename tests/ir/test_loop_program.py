"""Loop programs: every invariant that `verify` checks, their text, and their float64 evaluation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.evaluate import evaluate, evaluate_expr
from pallasfuse.ir.expr import add, apply, const, convert, div, index, mul, read, select
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, Source, as_xla_runs, verify
from pallasfuse.ir.reducers import MAX, MIN, SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert as converted

I, J, K = Axis("i", 3), Axis("j", 4), Axis("k", 4)  # noqa: E741
X = Tensor("x", (I, J), "float32")
MAXIMUM = Nest("m", (I,), read("x", (I, J), "float32"), "float32", (J,), MAX)
SHIFTED = Nest("y", (I, J), apply("sub", read("x", (I, J), "float32"), read("m", (I,), "float32")), "float32")
GOOD = LoopProgram((X,), (MAXIMUM, SHIFTED), ("y",))


def test_a_good_program_and_its_text():
    assert verify(GOOD) is GOOD
    assert str(GOOD) == (
        "input x: float32[i:3, j:4]\nm[i]: float32 max[j:4]= x[i, j]\ny[i, j]: float32 = x[i, j] - m[i]\nreturn y"
    )


def test_text_of_what_xla_computes():
    program = LoopProgram((X,), (External("s", (I, J), "float32", ("x",), "sort is not a nest"),), ("s",))
    assert str(verify(program)).splitlines()[1] == "s[i, j]: float32 = xla(x)  # sort is not a nest"


@pytest.mark.parametrize(
    ("nests", "outputs", "message"),
    [
        ((MAXIMUM, MAXIMUM), ("m",), "'m': defined twice"),
        ((replace(MAXIMUM, name="x"),), ("x",), "'x': defined twice"),
        ((SHIFTED, MAXIMUM), ("y",), "'y': reads 'm' before it is defined"),
        ((External("s", (I,), "float32", ("nothing",), ""),), ("s",), "'s': reads 'nothing' before it is defined"),
        ((replace(MAXIMUM, axes=(I, J)),), ("m",), "'m': its axes are not distinct"),
        ((replace(MAXIMUM, axes=()),), ("m",), "'m': its body uses axes .*i"),
        ((replace(MAXIMUM, reducer=None),), ("m",), "'m': a reduction has a reducer and reduced axes"),
        ((replace(MAXIMUM, axes=(I, J), reduced=()),), ("m",), "'m': a reduction has a reducer and reduced axes"),
        ((replace(MAXIMUM, body=read("x", (J, I), "float32")),), ("m",), r"'m': reads x\[j, i\] with extents \[4, 3\]"),
        ((replace(MAXIMUM, body=read("x", (I,), "float32")),), ("m",), r"'m': reads x\[i\] with extents \[3\]"),
        ((MAXIMUM,), ("z",), "'z': is an output but is never defined"),
    ],
)
def test_each_invariant(nests, outputs, message):
    with pytest.raises(InvalidProgramError, match=message):
        verify(LoopProgram((X,), nests, outputs))


def test_another_axis_of_the_same_extent_may_read_a_dimension():
    verify(LoopProgram((X,), (Nest("t", (I, K), read("x", (I, K), "float32"), "float32"),), ("t",)))


def test_sources_and_axes_print_shortly():
    assert str(Source()) == "<unknown line>"
    assert str(Source("f.py:3")) == "f.py:3"
    assert str(I) == "i"
    assert volume((I, J)) == 12
    assert volume(()) == 1


# --- evaluation

RANDOM = np.random.default_rng(0)
XV = RANDOM.normal(size=(3, 4))


def run(*nests, inputs=(X,), **values):
    program = verify(LoopProgram(inputs, nests, (nests[-1].name,)))
    return evaluate(program, {"x": XV} | values)[nests[-1].name]


def test_chain_of_nests():
    total = Nest("t", (), apply("exp", read("y", (I, J), "float32")), "float32", (I, J), SUM)
    want = np.exp(XV - XV.max(1, keepdims=True)).sum()
    np.testing.assert_allclose(run(MAXIMUM, SHIFTED, total), want, rtol=1e-14)


def test_kept_axes_may_be_in_any_order():
    got = run(Nest("t", (J, I), mul(read("x", (I, J), "float32"), convert(index(J), "float32")), "float32"))
    np.testing.assert_array_equal(got, (XV * np.arange(4)).T)


def test_matrix_product_with_renamed_axes():
    gram = Nest("g", (J, K), mul(read("x", (I, J), "float32"), read("x", (I, K), "float32")), "float32", (I,), SUM)
    np.testing.assert_allclose(run(gram), XV.T @ XV, rtol=1e-14)


def test_diagonal():
    square = Tensor("s", (J, K), "float32")
    value = RANDOM.normal(size=(4, 4))
    trace = Nest("t", (), read("s", (J, J), "float32"), "float32", (J,), SUM)
    np.testing.assert_allclose(run(trace, inputs=(square,), s=value), np.trace(value))


def test_a_reduction_may_broadcast_over_an_axis_that_its_body_lacks():
    np.testing.assert_allclose(run(Nest("t", (), read("c", (), "float32"), "float32", (I, J), SUM),
                                   inputs=(Tensor("c", (), "float32"),), c=np.array(2.5)), 30.0)  # fmt: skip


def test_empty_reductions_give_the_identity():
    empty = Axis("e", 0)
    inputs = (Tensor("z", (I, empty), "float32"),)
    for reducer, want in ((SUM, 0.0), (MAX, -np.inf), (MIN, np.inf)):
        nest = Nest("t", (I,), read("z", (I, empty), "float32"), "float32", (empty,), reducer)
        np.testing.assert_array_equal(run(nest, inputs=inputs, z=np.zeros((3, 0))), [want] * 3)


def test_integers_divide_and_convert_by_truncation():
    k, n = (Tensor(t, (I,), "int32") for t in "kn")
    values = {"k": np.array([-7, 7, -7]), "n": np.array([2, -2, -2])}
    reads = [read(t, (I,), "int32") for t in "kn"]
    got = run(Nest("t", (I,), div(*reads), "int32"), inputs=(k, n), **values)
    np.testing.assert_array_equal(got, [-3, -3, 3])
    assert got.dtype == np.int64
    np.testing.assert_array_equal(
        run(Nest("t", (I,), apply("rem", *reads), "int32"), inputs=(k, n), **values), [-1, 1, -1]
    )
    half = evaluate_expr(convert(read("h", (I,), "float32"), "int32"), (I,), {"h": np.array([-1.7, 1.7, 0.2])})
    np.testing.assert_array_equal(half, [-1, 1, 0])


def test_select_ignores_what_is_not_chosen():
    body = select(apply("gt", read("x", (I, J), "float32"), const(0.0, "float32")),
                  apply("log", read("x", (I, J), "float32")), const(0.0, "float32"))  # fmt: skip
    np.testing.assert_allclose(run(Nest("t", (I, J), body, "float32")), np.log(np.where(XV > 0, XV, 1.0)))


def test_float_casts_do_not_round():
    body = add(convert(read("x", (I, J), "float32"), "float16"), const(0.0, "float16"))
    np.testing.assert_array_equal(run(Nest("t", (I, J), body, "float16")), XV)


def test_what_only_xla_can_compute_must_be_given():
    program = LoopProgram((X,), (External("s", (I, J), "float32", ("x",), "sort is not a nest"),), ("s",))
    with pytest.raises(InvalidProgramError, match="cannot evaluate 's': sort is not a nest"):
        evaluate(program, {"x": XV})
    np.testing.assert_array_equal(evaluate(program, {"x": XV, "s": np.sort(XV)})["s"], np.sort(XV))


def test_numbers_that_are_known_are_no_operations_of_xla():
    """It computes them when it compiles: the correction of a variance, and whether values are left after it."""
    loops = converted(jax.make_jaxpr(lambda x: jnp.sqrt(jnp.var(x, -1) + 1))(jnp.ones((4, 8)))).program
    assert any("select" in str(n.body) for n in loops.nests)
    run = {n.name: n for n in as_xla_runs(loops, one_by_one=False).nests}
    wanted = [loops.outputs[0]]
    for name in wanted:
        wanted += [t for t in run[name].reads if t in run] if name in run else []
    assert all("select" not in str(run[name].body) and "nan" not in str(run[name].body) for name in wanted)
    assert any("/ 8" in str(run[name].body) for name in wanted)
