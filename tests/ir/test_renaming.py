"""Canonical names: shared by programs that differ in names only, and given back in whatever is made from them."""

from dataclasses import replace

import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import const, index, mul, read, select
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, Source
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.renaming import UnknownNameError, canonical, ranked, readable, restored
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.targets import TRITON
from tests.programs_by_name import PROGRAMS, program


def scaled_sum(x="x", w="w", t=("t0", "t1"), i="i", j="j", line="a.py:1"):
    rows, columns = Axis(i, 8), Axis(j, 16)
    body = mul(read(x, (rows, columns), "float32"), read(w, (columns,), "float32"))
    total = Nest(t[0], (rows,), body, "float32", (columns,), SUM, Source(line), "highest")
    last = select(const(True, "bool"), read(t[0], (rows,), "float32"), const(2.0, "float32"))
    inputs = (Tensor(x, (rows, columns), "float32"), Tensor(w, (columns,), "float32"))
    return LoopProgram(inputs, (total, Nest(t[1], (rows,), last, "float32", source=Source(line))), (t[1],))


def test_names_and_lines_make_no_difference():
    # the names sort differently: j before i, t9 behind t10
    other = scaled_sum("b", "a", ("t9", "t10"), "z", "a1", "b.py:7")
    assert canonical(scaled_sum()).program == canonical(other).program
    assert canonical(scaled_sum()).names != canonical(other).names


def total_of(program, **changes):
    first, *others = program.nests
    return replace(program, nests=(replace(first, **changes), *others))


I, J = Axis("i", 8), Axis("j", 16)  # noqa: E741
X, W = read("x", (I, J), "float32"), read("w", (J,), "float32")
DIFFERENT = {
    "another reducer": total_of(scaled_sum(), reducer=MAX),
    "another precision": total_of(scaled_sum(), precision=None),
    "another type": total_of(scaled_sum(), dtype="float16"),
    "an element by its index": total_of(scaled_sum(), picks=True),
    "operands exchanged": total_of(scaled_sum(), body=mul(W, X)),
    "a constant": total_of(scaled_sum(), body=mul(X, const(2.0, "float32"))),
    "a position": total_of(scaled_sum(), body=select(mul(index(I), index(J)), X, W)),
    "another result": replace(scaled_sum(), outputs=("t0",)),
    "one more result": replace(scaled_sum(), outputs=("t0", "t1")),
    "the order of results": replace(scaled_sum(), outputs=("t1", "t0")),
    "another order in memory": replace(
        scaled_sum(), inputs=(Tensor("x", (J, I), "float32"), Tensor("w", (J,), "float32"))
    ),
    "another extent": LoopProgram(
        (Tensor("x", (I, J), "float32"), Tensor("w", (Axis("k", 16),), "float32")), scaled_sum().nests, ("t1",)
    ),
    "left to XLA": LoopProgram(
        scaled_sum().inputs, (External("t0", (I,), "float32", ("x", "w"), "no rule"), scaled_sum().nests[1]), ("t1",)
    ),
    "left to XLA for another reason": LoopProgram(
        scaled_sum().inputs, (External("t0", (I,), "float32", ("x", "w"), "sorts"), scaled_sum().nests[1]), ("t1",)
    ),
}


def test_everything_else_makes_a_difference():
    forms = [canonical(scaled_sum()).program, *(canonical(p).program for p in DIFFERENT.values())]
    assert len(set(forms)) == len(forms)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_its_own_names_again(name):
    form = canonical(program(name))
    assert "«" in str(form.program)
    assert restored(form.program, form.names) == program(name)


def test_axes_are_mapped():
    form = canonical(scaled_sum())
    assert [form.axes[a] for a in (I, J)] == [*form.program.inputs[0].axes]


def test_derived_names_and_texts_are_renamed_and_the_rest_stays_the_same_object():
    form = canonical(scaled_sum())
    total, rows = form.program.nests[0].name, form.axes[I]
    schedule = Schedule(((rows, 4),), form.axes[J], 8)
    made = (schedule, f"{total}.acc0 over {rows}", {total: read(f"{total}.next", (rows,), "float32")}, TRITON)
    found = restored(made, form.names)
    assert found == (Schedule(((I, 4),), J, 8), "t0.acc0 over i", {"t0": read("t0.next", (I,), "float32")}, TRITON)
    assert found[3] is TRITON
    untouched = (frozenset({"a"}), {"b": Schedule(((I, 4),), J, 8)})
    assert restored(untouched, form.names) is untouched


def test_a_cut_name_is_an_error():
    form = canonical(scaled_sum())
    with pytest.raises(UnknownNameError):
        restored(form.program.nests[0].name[:-1], form.names)


@pytest.mark.parametrize("changed", [{"x": "«t000000»"}, {"line": "a»b"}])
def test_a_program_with_such_names_has_no_canonical_form(changed):
    with pytest.raises(UnknownNameError):
        canonical(scaled_sum(**changed))


def test_a_reason_with_such_a_name_has_no_canonical_form():
    nest = External("t0", (I,), "float32", ("x",), "no rule for «t000000»")
    with pytest.raises(UnknownNameError):
        canonical(LoopProgram((Tensor("x", (I,), "float32"),), (nest,), ("t0",)))


def test_names_for_compilers_have_no_marks():
    assert readable("fused_«t000020»_«t000000»_0, «a000003» and t7") == "fused_t20_t0_0, a3 and t7"


def test_parts_that_are_equal_up_to_names_have_one_form():
    one, inputs = scaled_sum(), (Tensor("y", (I, J), "float32"), Tensor("v", (J,), "float32"))
    again = replace(one.nests[0], name="t2", body=mul(read("y", (I, J), "float32"), read("v", (J,), "float32")))
    whole = canonical(LoopProgram((*one.inputs, *inputs), (*one.nests, again), ("t1", "t2"))).program
    first, _, second = whole.nests
    (form, tokens), (other, others) = ranked(first), ranked(second)
    assert first != second and form == other and tokens != others
    assert restored(first, dict(zip(tokens, others, strict=True))) == second
    assert ranked(form)[0] == form


def test_parts_whose_names_sort_otherwise_have_forms_of_their_own():
    x, w = (read(f"«t00000{n}»", (I, J), "float32") for n in (1, 2))
    nests = [Nest("«t000003»", (I,), mul(*factors), "float32", (J,), SUM) for factors in ((x, w), (w, x))]
    assert ranked(nests[0])[0] != ranked(nests[1])[0]
    assert ranked(nests[0])[1] == ranked(nests[1])[1]
