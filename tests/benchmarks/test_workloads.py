"""The registry of whole programs: every one traces at every size, and is planned at the smallest; missing packages are rows."""

import sys

import jax
import pytest

import pallasfuse as pf
from benchmarks import program_report, program_workers, workloads
from benchmarks.program_kernels import evaluate
from benchmarks.program_measurement import Settings, measure, prepare
from benchmarks.program_variants import cache_in, compiled, fingerprint, has_check, lowered, step
from benchmarks.workloads.registry import draw, integers, normal

ENTRIES = {entry.name: entry for entry in workloads.programs()}
CASES = [(entry.group, entry.name) for entry in ENTRIES.values()]


def built(name, size):
    try:
        return workloads.build(ENTRIES[name], size)
    except workloads.NotInstalledError as missing:
        pytest.skip(str(missing))


@pytest.mark.sampled(180, cover=())
@pytest.mark.parametrize(("group", "name"), CASES)
def test_a_program_traces_at_every_size(group, name):
    assert ENTRIES[name].group == group
    results = []
    for size in workloads.SIZES:
        program = built(name, size)
        results.append(jax.eval_shape(program.function, *program.structs))
    assert len({jax.tree.structure(r) for r in results}) == 1, "the sizes are those of one program"
    assert all(leaf.size for leaf in jax.tree.leaves(results))


@pytest.mark.sampled(150, cover=())
@pytest.mark.parametrize(("group", "name"), CASES)
def test_a_program_is_planned_at_the_smallest_size(group, name):
    function, structs = step(built(name, "tiny"))
    plan = pf.fuse(function).explain(*structs)
    assert plan.converted.jaxpr.eqns, group
    assert plan.text


def test_names_are_found_by_prefix_of_name_or_group():
    assert [e.name for e in workloads.programs(("lora",))] == ["lora-1", "lora-8", "lora-16"]
    assert [e.name for e in workloads.programs(("lora-1",))] == ["lora-1"]  # a whole name
    assert {e.group for e in workloads.programs(("held-out",))} == {"held-out"}
    assert len(list(workloads.programs(("held-out",)))) >= 10
    assert not list(workloads.programs(("no such program",)))


class Pipe:
    """The end of a pipe that a process of the benchmark serves, without the process."""

    def __init__(self, *orders):
        self.orders, self.answers = [*orders, ("stop", "")], []

    def recv(self):
        return self.orders.pop(0)

    def send(self, answer):
        self.answers.append(answer)


def served(*orders, **settings):
    pipe = Pipe(*orders)
    program_workers.serve(pipe, {"size": "tiny", **settings})
    return pipe.answers


def test_a_missing_package_is_a_row(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "haiku", None)  # as if it were not installed
    ((order, name, row),) = served(("compile", "haiku-attention"), folder=str(tmp_path))
    assert (order, name) == ("compile", "haiku-attention")
    assert row == {"name": name, "not_installed": "not installed: haiku"}
    assert "not installed: haiku" in program_report.line(row)


def test_a_program_that_fails_is_a_row(monkeypatch, tmp_path):
    def build(size):
        raise ZeroDivisionError(f"at {size}")

    broken = workloads.Program("lora-1", "adapter", build)
    monkeypatch.setattr(workloads, "programs", lambda names: iter([broken]))
    ((_, _, row),) = served(("compile", "lora-1"), folder=str(tmp_path))
    assert row == {"name": "lora-1", "failed": "ZeroDivisionError: at tiny"}


def test_the_row_of_a_program_has_every_column(monkeypatch, tmp_path):
    monkeypatch.delenv("PALLASFUSE_CHECK", raising=False)
    first, second = served(
        ("compile", "soft-assignment"), ("measure", "soft-assignment"), folder=str(tmp_path), all_kernels=True
    )
    assert first == ("compile", "soft-assignment", None)
    row = second[2]
    assert {"jit", "fused", "checked"} <= set(row)
    assert set(row["speedup"]) >= {"fused", "checked"}
    assert all(row[label]["temporary_bytes"] is not None for label in ("jit", "fused", "checked"))
    assert row["plan_s"] > 0
    assert row["predicted_xla_us"] > 0
    assert row["fused"]["error"] < 1e-5
    assert set(row["error64"]) >= {"jit"}
    assert max(row["error64"].values()) < 1e-5
    assert row["kernels"], "there is something to fuse"
    for kernel in row["kernels"]:
        assert kernel["predicted_us"] > 0
        assert kernel["alone"]["own_us"] > 0
        assert kernel["xla"]["own_us"] > 0
    assert row["checked"]["verdicts"] or not row["kernels_planned"]
    assert "hlo" not in row["jit"], "only of raw rows"
    assert row["name"] in program_report.line(row)
    assert program_report.summary([row])["failed"] == {}


def test_raw_rows_have_no_check(tmp_path):
    entry = ENTRIES["chain-S1"]
    settings = Settings("tiny", str(tmp_path), full=False, kernels=False)
    row = measure(prepare(entry, settings), settings)
    assert "checked" not in row
    assert "fusion(" in row["jit"]["hlo"]
    assert not list(tmp_path.iterdir())


def test_programs_are_equal_whatever_their_instructions_are_called():
    def first(x, y):
        return jax.nn.softmax(x @ y)

    def second(these, those):
        @jax.jit
        def product(a, b):
            return a @ b

        return jax.nn.softmax(product(these, those))

    structs = (jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 32), "float32"))
    variants = [compiled("first", lambda: lowered(first, structs))]
    variants.append(compiled("second", lambda: lowered(second, structs), variants))
    other = compiled("third", lambda: lowered(lambda x, y: jax.nn.softmax(x @ y, 0), structs), variants)
    assert [v.same_as for v in (*variants, other)] == ["", "first", ""]
    assert fingerprint(variants[0].call) != fingerprint(other.call)


def test_what_does_not_compile_says_why():
    def wrong():
        raise ValueError("not for\n this device")

    found = compiled("wrong", wrong)
    assert found.call is None
    assert found.reason == "ValueError: not for this device"


def test_the_equations_of_a_kernel_are_evaluated_from_its_inputs():
    plan = pf.fuse(lambda x: jax.nn.softmax(2 * x).sum(0)).explain(jax.ShapeDtypeStruct((4, 8), "float32"))
    jaxpr = plan.converted.jaxpr
    x = jax.random.normal(jax.random.key(0), (4, 8))
    (found,) = evaluate(jaxpr, {jaxpr.invars[0]: x}, [jaxpr.outvars[0]])
    assert jax.numpy.allclose(found, jax.nn.softmax(2 * x).sum(0), atol=1e-6)


def test_drawn_arguments_are_what_was_described():
    values = draw(normal(1000, 3, scale=0.1, offset=5.0), 0)
    assert abs(float(values.mean()) - 5.0) < 0.05
    assert sorted(draw(integers(6, below=6, distinct=True), 0).tolist()) == list(range(6))
    ramp = draw(integers(50, below=7, ramp=True), 0)
    assert (ramp[1:] >= ramp[:-1]).all()
    assert 0 <= int(ramp.min()) <= int(ramp.max()) < 7


def test_the_cache_is_where_it_is_asked_for_and_as_before_afterwards(monkeypatch):
    import os

    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", "before")
    with cache_in("during"):
        assert os.environ["PALLASFUSE_CACHE_DIR"] == "during"
    assert os.environ["PALLASFUSE_CACHE_DIR"] == "before"
    assert has_check()
