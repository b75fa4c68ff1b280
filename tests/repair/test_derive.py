"""What is accepted with which matrix, and what is refused with which reason."""

import gc
import threading
import time

import pytest

from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.ir.expr import apply, const, convert, read
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.repair import OLD, Frame, Repair, derive, parse_expr
from pallasfuse.repair import derive as _derive_function
from tests.repair.repair_cases import ACCEPTED, FIXED, REFUSED, Accepted, J, R, Refused, over_j


def derived(text: str, reducer: str = "sum", frames: tuple[Frame, ...] = (R,)) -> Repair:
    repair = derive(text, reducer, frames)
    assert isinstance(repair, Repair), repair
    return repair


@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_accepted_rank_matrix_and_conditions(case: Accepted) -> None:
    body = over_j(case.text, case.frames)
    repair = derive(body, case.reducer, case.frames, over=(J,))
    assert isinstance(repair, Repair), repair
    assert repair.rank == case.rank
    if case.matrix:
        assert repair.matrix == case.matrix
    assert repair.accumulators[0].term is body
    assert tuple(map(str, repair.nonzero)) == case.nonzero
    assert len(repair.conditions) == len(case.nonzero) + case.conditions
    frames = {f.name for f in case.frames}
    accumulators = {f"acc.{n}" for n in range(repair.rank)}
    for a in repair.accumulators:
        assert a.update.tensors <= frames | {f + OLD for f in frames} | accumulators | set(FIXED)
        assert not a.term.tensors & (accumulators | {f + OLD for f in frames})
        assert J not in a.update.axes


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_with_its_reason(case: Refused) -> None:
    answer = derive(over_j(case.text, case.frames), case.reducer, case.frames, over=(J,))
    assert isinstance(answer, Refusal), answer
    assert case.reason in answer.reason


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("square(c-r)", ["square(c - r)", "c - r", "1"]),
        ("(c-r)**3", ["(c - r) ** 3", "square(c - r)", "c - r", "1"]),
        ("exp(c-r)*(c-r)", ["exp(c - r) * (c - r)", "exp(c - r)"]),
        ("(c-r)*w", ["(c - r) * w", "w"]),
        ("cosh(c-r)", ["cosh(c - r)", "sinh(c - r)"]),
        ("sin(c-r)", ["sin(c - r)", "cos(c - r)"]),
        ("select(p, square(c-r), 0)", ["select(p, square(c - r), 0)", "select(p, c - r, 0)", "select(p, 1, 0)"]),
        ("exp(select(p, c-r, -inf))*(c-r)", ["exp(select(p, c - r, -inf)) * (c - r)", "select(p, exp(c - r), 0)"]),
        ("square((c-r)/d)", ["square((c - r) / d)", "(c - r) / square(d)", "1 / square(d)"]),
    ],
)
def test_companion_terms_are_simple(text: str, terms: list[str]) -> None:
    assert [str(a.term) for a in derived(text).accumulators] == terms


@pytest.mark.parametrize(
    ("text", "update"),
    [
        ("exp(c-r)", "acc.0 * exp(r.old - r)"),
        ("c*rsqrt(r)", "acc.0 * sqrt(r.old / r)"),
        ("square(c-r)", "acc.0 + acc.1 * (2 * (r.old - r)) + acc.2 * square(r.old - r)"),
    ],
)
def test_updates_take_differences_and_ratios_first(text: str, update: str) -> None:
    assert str(derived(text).accumulators[0].update) == update


def test_infinities_and_masks_never_reach_the_algebra() -> None:
    repair = derived("exp(select(p, c, -inf) - r) * select(q, w, nan)")
    assert repair.rank == 1
    assert repair.matrix == "[[exp(r.old - r)]]"


def test_shapes_of_frames_are_kept() -> None:
    r = read("x.max", (J,), "float32")
    c = read("c", (), "float32")
    repair = derive(apply("exp", apply("sub", c, r)), MAX, ["x.max"])
    assert isinstance(repair, Repair)
    assert repair.accumulators[0].update is apply(
        "mul", read("acc.0", (), "float32"), apply("exp", apply("sub", read("x.max.old", (J,), "float32"), r))
    )


def test_half_precision_accumulates_in_float32() -> None:
    r, c = read("r", (), "bfloat16"), read("c", (), "bfloat16")
    repair = derive(apply("square", apply("sub", c, r)), SUM, ["r"])
    assert isinstance(repair, Repair)
    assert {a.update.dtype for a in repair.accumulators} == {"float32"}
    assert [a.term.dtype for a in repair.accumulators] == ["bfloat16", "float32", "float32"]


def test_integer_frame_counts() -> None:
    """A mean by an integer count: the cast of the frame is the frame."""
    n, c = read("k", (), "int32"), read("c", (J,), "float32")
    repair = derive(apply("div", c, convert(n, "float32")), SUM, [Frame("k", "positive")])
    assert isinstance(repair, Repair)
    assert repair.matrix == "[[float32(k.old) / float32(k)]]"
    integers = derive(apply("mul", n, read("d", (), "int32")), SUM, ["k"])
    assert isinstance(integers, Refusal)
    assert "int32" in integers.reason


def test_invariants_are_only_what_the_caller_says() -> None:
    body = parse_expr("exp(s*(c-r))")
    assert isinstance(derive(body, "sum", ["r"]), Refusal)
    assert isinstance(derive(body, "sum", ["r"], invariant=["s"]), Repair)


def test_text_may_need_one_invariant_and_says_so() -> None:
    repair = derive("exp(s*(c-r))", "sum", ["r"])
    assert isinstance(repair, Repair)
    assert repair.conditions == ("s has one value for the whole reduction",)
    assert isinstance(derive("exp(c/r)", "sum", ["r"]), Refusal)  # nothing would be left to vary
    assert isinstance(derive("exp(c*d/r)", "sum", ["r"]), Refusal)


def test_signs_of_opaque_parts_are_used() -> None:
    c = read("c", (), "float32")
    assert isinstance(derive("pow(c, r)", "prod", [Frame("r", "positive")]), Refusal)
    assert isinstance(derive("pow(c, r)", "prod", [Frame("r", "positive")], signs={c: "positive"}), Repair)


def test_no_frame_is_an_identity_for_every_reducer() -> None:
    for name in ("sum", "max", "min", "prod"):
        repair = derived("round_even(c)*w", name)
        assert repair.rank == 1
        assert str(repair.accumulators[0].update) == "acc.0"
    bits = derive(apply("gt", read("c", (), "float32"), const(0, "float32")), "or", ["r"])
    assert isinstance(bits, Repair)
    refused = derive(apply("gt", read("r", (), "float32"), const(0, "float32")), "or", ["r"])
    assert isinstance(refused, Refusal)


def test_memo_hits_the_same_shape_over_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    first = derive("exp(memo_a - r) * memo_b * (memo_a + 3)", "sum", ["r"])
    assert isinstance(first, Repair)
    module = __import__(_derive_function.__module__, fromlist=["_solve"])

    def must_not_solve(problem: object) -> None:
        raise AssertionError(f"solved again: {problem}")

    monkeypatch.setattr(module, "_solve", must_not_solve)
    body = parse_expr("exp(other - m) * (u / w) * (other + 4)")
    second = derive(body, "sum", ["m"])
    assert isinstance(second, Repair)
    assert second.accumulators[0].term is body
    assert str(second.accumulators[0].update) == "acc.0 * exp(m.old - m)"
    with pytest.raises(AssertionError, match="solved again"):
        derive("exp(other - m) * (u / w) * (m + 4)", "sum", ["m"])
    with pytest.raises(AssertionError, match="solved again"):
        derive(body, "sum", [Frame("m", "positive")])


def test_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(_derive_function.__module__, fromlist=["_memo"])
    monkeypatch.setattr(module, "MEMO_SIZE", 4)
    for n in range(8):
        derive(f"c * r + {n}.5", "max", [Frame("r", "positive")])
    assert len(module._memo) <= 4


def test_refusals_are_memoised_with_their_own_names() -> None:
    assert "round_even(a / r)" in str(derive("round_even(a/r)", "sum", ["r"]))
    assert "round_even(b / m)" in str(derive("round_even(b/m)", "sum", ["m"]))


def test_threads_agree() -> None:
    texts = [f"exp({k}.5*(c-r))*(c-r)" for k in range(1, 5)] * 2
    answers: list[tuple[str, str]] = []
    errors: list[BaseException] = []

    def work(text: str) -> None:
        try:
            answers.append((text, derived(text).matrix))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in texts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(set(answers)) == 4
    assert len(answers) == 8


def test_the_same_text_twice_gives_the_same_answer() -> None:
    """No dependence on hashes of interned objects: derive again after the memo and the nodes are gone."""
    module = __import__(_derive_function.__module__, fromlist=["_memo"])
    before = [str(derive(c.text, c.reducer, c.frames)) for c in ACCEPTED[::8]]
    module._memo.clear()
    gc.collect()
    noise = [read(f"noise{n}", (), "float32") for n in range(100)]
    assert before == [str(derive(c.text, c.reducer, c.frames)) for c in ACCEPTED[::8]]
    assert len(noise) == 100


def test_speed() -> None:
    """Half a second of CPU for each case (typically 10 ms), of which every third is derived anew; SymPy is imported already."""
    module = __import__(_derive_function.__module__, fromlist=["_memo"])
    derived("cosh(c-r)")
    slow = {}
    for case in (*ACCEPTED, *REFUSED)[::3]:
        module._memo.clear()
        start = time.process_time()
        derive(over_j(case.text, case.frames), case.reducer, case.frames, over=(J,))
        elapsed = time.process_time() - start
        if elapsed > 0.5:
            slow[str(case)] = elapsed
    assert not slow


def test_every_unary_operation_answers() -> None:
    """Whatever op(c - r) and c * op(r) are, the answer is a repair or a reason, never an exception."""
    for op in OPS.values():
        if op.kind == "arithmetic" and op.arity == 1:
            assert isinstance(derive(f"{op.name}(c-r)", "sum", ["r"]), Repair | Refusal)
            assert isinstance(derive(f"c*{op.name}(r)", "sum", [Frame("r", "positive")]), Repair), op.name


@pytest.mark.parametrize("text", ["c +", "f(c)", "c if r else d", "exp(c, r)", "c[0]", "'a'"])
def test_text_that_is_not_an_expression(text: str) -> None:
    with pytest.raises(InvalidProgramError):
        parse_expr(text)


def test_parsing() -> None:
    c = read("c", (), "float32")
    assert parse_expr("c**2") is apply("integer_pow", c, const(2, "int32"), dtype="float32")
    assert parse_expr("c**0.5") is apply("pow", c, const(0.5, "float32"))
    assert parse_expr("-c/2") is apply("div", apply("neg", c), const(2, "float32"))
    assert parse_expr("select(p, c, -inf)").args[0] is read("p", (), "bool")
    assert parse_expr("float16(c)") is convert(c, "float16")
