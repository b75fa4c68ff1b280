"""Plans on disk: another process has the same plan without planning, and nothing but a plan of this very program is used."""

import copy
import dataclasses
import hashlib
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import form_choice, kept_plans, pipeline, store
from pallasfuse.ir.encoding import EncodingError, decode, encode
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.store import Store
from pallasfuse.targets import find
from tests.ir.nested_programs import EXAMPLES
from tests.programs_by_name import PROGRAMS
from tests.test_repetition import arguments, model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Plans are kept in a folder of the test's own. Returns a function that forgets what is in memory, as a new process does."""
    monkeypatch.setenv("PALLASFUSE_KEEP_PLANS", "1")
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    return store._store_in.cache_clear


@pytest.fixture
def planned(monkeypatch):
    """The programs that were planned."""
    seen = []
    original = form_choice.choose_groups

    def choose(placements, **along):
        seen.append(placements.converted.program)
        return original(placements, **along)

    monkeypatch.setattr(form_choice, "choose_groups", choose)
    return seen


def softmax(x):
    return jax.nn.softmax(x * 2.0, -1)


ROWS = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
OPTIONS = FuseOptions(price=False)


def plan_of(function=softmax, *shapes, target="xla", options=OPTIONS):
    return kept_plans.plan_of(jax.make_jaxpr(function)(*(shapes or (ROWS,))), find(target), options)


def equal_kernels(ours, theirs):
    fields = ("name", "strategy", "axes", "tiles", "repairs", "flops", "visited_share", "group", "schedule", "phases", "declined",
              "price", "replaced", "reads", "stores")  # fmt: skip
    return all(getattr(a, f) == getattr(b, f) for a, b in zip(ours, theirs, strict=True) for f in fields)


@pytest.mark.sampled(12, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "triton", "mosaic_gpu"])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_kept_plan_is_the_plan(name, target, kept, planned):
    case = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(case.function)(*(jax.ShapeDtypeStruct(s, jnp.dtype(case.dtype)) for s in case.shapes))
    made = make_plan(jaxpr, find(target), OPTIONS)
    planned.clear()
    kept_plans.plan_of(jaxpr, find(target), OPTIONS)
    forms = len(planned)
    assert forms
    kept()
    again = kept_plans.plan_of(jaxpr, find(target), OPTIONS)
    assert len(planned) == forms
    assert str(again) == str(made)
    assert again.summary == made.summary
    assert equal_kernels(again.kernels, made.kernels)


def test_a_plan_that_outdoes_another_form_is_kept(kept, planned, monkeypatch):
    monkeypatch.setattr(form_choice, "_is_covered", lambda *args: True)
    shapes = jax.ShapeDtypeStruct((768, 768), jnp.float32), jax.ShapeDtypeStruct((768,), jnp.float32)
    options = FuseOptions(price=True, check=False)
    made = plan_of(lambda a, x: a.T @ a @ x, *shapes, options=options)
    planned.clear()
    kept()
    again = plan_of(lambda a, x: a.T @ a @ x, *shapes, options=options)
    assert made.outdoes and again.outdoes and not planned


def attended(q, k, v):
    return jax.nn.softmax(jnp.tanh(q @ jnp.swapaxes(k, 1, 2)), -1) @ v


def test_what_xla_is_to_store_beside_kernels_is_kept(kept, planned, monkeypatch):
    """A plan asks for it on a GPU where prices decide, and a record that names what the program has not is made anew."""
    first = []

    def stored(program, device, made, read):
        assert made and read
        first[:] = [program.nests[0].name]
        return frozenset(first)

    monkeypatch.setattr(pipeline, "stored_beside", stored)
    shapes = [jax.ShapeDtypeStruct((16, 2048, 64), jnp.bfloat16)] * 3
    options = FuseOptions(price=True, check=False)
    assert plan_of(attended, *shapes, target="xla", options=options).stored_beside == frozenset()
    made = plan_of(attended, *shapes, target="triton", options=options)
    assert made.stored_beside == frozenset(first) != frozenset()
    planned.clear()
    kept()
    again = plan_of(attended, *shapes, target="triton", options=options)
    assert again.stored_beside == made.stored_beside
    assert not planned
    other = kept_plans._written(dataclasses.replace(made, stored_beside=frozenset({"nothing"})))
    jaxpr = jax.make_jaxpr(attended)(*shapes)
    with pytest.raises(EncodingError, match="is not in the program"):
        kept_plans._read(other, jaxpr, kept_plans.flatten(jaxpr), find("triton"), options)


def test_equal_layers_are_read_as_equal_kernels(kept, planned):
    shapes = arguments(8, length=96)
    made, again = plan_of(model, *shapes), (kept(), plan_of(model, *shapes))[1]
    assert len(planned) == 1
    assert str(again) == str(made)
    assert len(again.repeated) == len(made.repeated) > 0
    assert pf.verify(pf.fuse(softmax, options=OPTIONS), jnp.ones((8, 64)), delta=1e-4).proof.holds


@pytest.mark.deep  # `test_a_plan_that_was_kept_imports_nothing_that_makes_plans` sees that no part of the planner is imported
def test_a_call_of_a_second_process_neither_plans_nor_imports_sympy(tmp_path):
    code = """
import sys
import jax, jax.numpy as jnp
import pallasfuse as pf
from pallasfuse.form_choice import Placements

def refuse(*args):
    raise AssertionError("planned")

if len(sys.argv) > 1:
    Placements.__init__ = refuse
def plain(x):  # its repair has sums in it, for which SymPy is needed
    return jnp.sum((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1)

f = pf.fuse(plain, target="xla", options=pf.FuseOptions(price=False))
x = jnp.linspace(-1, 1, 64 * 4096).reshape(64, 4096)
print(float(jnp.abs(f(x) - plain(x)).max()) < 1e-2, "sympy" in sys.modules)
"""
    around = os.environ | {"PALLASFUSE_KEEP_PLANS": "1", "PALLASFUSE_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(*args):
        ran = subprocess.run(
            [sys.executable, "-c", code, *args], env=around, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert "bug" not in ran.stderr
        return ran.stdout.split()

    assert run() == ["True", "True"]
    assert run("again") == ["True", "False"]


def the_file(folder):
    (file,) = (f for f in Path(folder).rglob("*.json") if '"of": "plan"' in f.read_text())
    return file


def change(folder, how, *, mend=True):
    """Changes the record of a plan on disk. mend: the sum is made to fit."""
    file = the_file(folder)
    content = json.loads(file.read_text())
    how(content["record"]["plan"])
    if mend:
        text = json.dumps(content["record"]["plan"], sort_keys=True)
        content["record"]["sum"] = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(content))


def of_another_program(plan):
    other = pf.fuse(lambda x: jax.nn.softmax(x[:, :512] * 3.0, -1), options=OPTIONS)
    converted = other.trace(ROWS).fuse("xla").tile().plan
    plan.update(kept_plans._written(converted)["plan"])


@pytest.mark.parametrize(
    "how",
    [
        lambda plan: plan["nodes"].pop(3),
        lambda plan: plan["nodes"].insert(0, ["Path", "/"]),
        lambda plan: plan["nodes"][0].__setitem__(0, "__import__"),
        lambda plan: plan["nodes"].append(["value", [0]]),
        lambda plan: plan["nodes"].append(["value", 3]),
        lambda plan: plan["kernels"][0].__setitem__(0, 5),
        lambda plan: plan["kernels"][0][1].clear(),
        lambda plan: plan.pop("nodes"),
        of_another_program,
    ],
)
def test_a_record_that_does_not_fit_is_planned_anew_with_one_warning(how, kept, planned, tmp_path):
    expected = str(plan_of())
    change(tmp_path, how)
    planned.clear()
    kept()
    with pytest.warns(UserWarning, match="a plan that was kept does not fit") as caught:
        assert str(plan_of()) == expected
    assert len(caught) == len(planned) == 1
    kept()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(plan_of()) == expected  # the record was replaced
    assert len(planned) == 1


def test_a_number_that_has_changed_is_noticed(kept, planned, tmp_path):
    """By the sum: the plan would be one of another program, and valid."""
    plan_of()

    def triple(plan):
        (node,) = (n for n in plan["nodes"] if n[:2] == ["const", 2.0])
        node[1] = 3.0

    change(tmp_path, triple, mend=False)
    kept()
    with pytest.warns(UserWarning, match="its sum is not that of its contents"):
        plan_of()
    assert len(planned) == 2


def test_what_a_plan_depends_on_is_part_of_the_key(kept, planned, monkeypatch):
    def renamed(y):
        return jax.nn.softmax(y * 2.0, -1)

    half = jax.ShapeDtypeStruct((32, 4096), jnp.float32)
    plan_of()
    plan_of()
    assert len(planned) == 1
    others = [
        lambda: plan_of(lambda x: jax.nn.softmax(x * 3.0, -1)),
        lambda: plan_of(renamed),
        lambda: plan_of(softmax, half),
        lambda: plan_of(target="triton"),
        lambda: plan_of(options=FuseOptions(price=True)),
        lambda: kept_plans.plan_of(jax.make_jaxpr(softmax)(ROWS), find("xla").judged(timed=True), OPTIONS),
    ]
    for number, other in enumerate(others, 2):
        other()
        assert len(planned) == number
    monkeypatch.setattr(kept_plans, "versions", lambda: {"pallasfuse": "another"})
    plan_of()
    assert len(planned) == len(others) + 2


@pytest.mark.parametrize(
    "options", [FuseOptions(strict=True), FuseOptions(verify="stages", price=False), FuseOptions(exclude=("norm",))]
)
def test_what_the_key_does_not_say_is_planned_each_time(options, kept, planned, tmp_path):
    plan_of(options=options)
    plan_of(options=options)
    assert len(planned) == 2
    assert not list(tmp_path.rglob("*.json"))


def test_source_lines_are_those_of_the_program_at_hand(kept, planned):
    first = plan_of(lambda x: jax.nn.softmax(x * 2.0, -1))
    kept()
    # another line
    second = plan_of(lambda x: jax.nn.softmax(x * 2.0, -1))
    assert len(planned) == 1
    lines = [int(str(p.kernels[0].group.source).split(":")[1].split()[0]) for p in (first, second)]
    assert lines[0] < lines[1]
    assert str(second.kernels[0].group.source) in str(second)


def test_a_kernel_that_was_kept_is_a_kernel_like_others(kept):
    def both(x, y):
        return softmax(x), jax.nn.log_softmax(y, -1)

    (made, other), (found, _) = (plan_of(both, ROWS, ROWS).kernels for _ in range(2))
    assert type(found) is not type(made)
    assert found == made
    assert made == found
    assert found != other
    for kernel in (made, found):
        assert copy.copy(kernel) == kernel
        assert copy.deepcopy(kernel) == kernel
        assert pickle.loads(pickle.dumps(kernel)) == kernel
        changed = dataclasses.replace(kernel, flops=1.0)
        assert changed.flops == 1.0
        assert changed != kernel
        assert changed.reads == kernel.reads
        assert pickle.loads(pickle.dumps(changed)).names == dict(kernel.names)
        assert dataclasses.asdict(kernel)["name"] == kernel.name


def test_a_folder_that_cannot_be_written_is_no_obstacle(kept, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert plan_of().kernels
    assert list(Store(tmp_path).entries()) == []


def test_only_named_classes_are_written_and_read():
    with pytest.raises(EncodingError, match="Path cannot be written"):
        encode((1, Path("/")), (), {})
    numbers = (1, 1.0, True, None, "1", float("inf"), {"a": (2, 3)}, frozenset(("x", "y")))
    written = json.loads(json.dumps(encode(numbers, (), {})))
    again = decode(written, (), {})
    assert again == numbers
    assert [type(x) for x in again] == [type(x) for x in numbers]
    with pytest.raises(EncodingError):
        decode([["FuseOptions"]], (), {})
    with pytest.raises(EncodingError):
        decode([["tuple", [0]]], (), {})


@pytest.mark.parametrize("name", EXAMPLES)
def test_programs_with_nested_loops_and_buffers_are_written_and_read(name):
    program = EXAMPLES[name].program("masked")
    assert decode(json.loads(json.dumps(encode(program, kept_plans._CLASSES, {}))), kept_plans._CLASSES, {}) == program


def test_a_kept_plan_is_for_the_device_as_its_program_finds_it(kept):
    """The matrix is larger than the cache, of which a kernel finds only a part filled with it."""
    large = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    options = FuseOptions(price=True)
    made = plan_of(jax.nn.logsumexp, large, target="triton", options=options)
    kept()
    again = plan_of(jax.nn.logsumexp, large, target="triton", options=options)
    assert made.kernels and 0 < made.target.device.found_share < 1
    assert again.target == made.target
    assert [k.target for k in again.kernels] == [k.target for k in made.kernels]


@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_programs_that_differ_in_bodies_share_a_plan(kept, planned, loop):
    """And yet each computes what it says: the record has no more than what is outside of the bodies."""

    def program(body):
        def function(x):
            y = softmax(x)
            if loop == "scan":
                y = jax.lax.scan(lambda c, _: (body(c), None), y, length=3)[0]
            elif loop == "while":
                y = jax.lax.while_loop(lambda c: jnp.sum(c) < 1e3, body, y)
            else:
                y = jax.lax.cond(jnp.sum(y) > 0.0, body, jnp.negative, y)
            return y - jnp.max(y, axis=-1, keepdims=True)

        return function

    x = jnp.linspace(-1.0, 1.0, 8 * 32).reshape(8, 32)
    for body in (lambda c: c * 2.0 + 1.0, lambda c: c * 3.0 + jnp.sum(c), lambda c: jnp.tanh(c) + c + 5.0):
        kept()
        function = program(body)
        fused = pf.fuse(function, options=OPTIONS)
        assert jnp.allclose(fused(x), function(x), rtol=1e-5)
        assert fused.explain(x).kernels
    assert len([p for p in planned if len(p.nests) > 5]) == 1, [
        len(p.nests) for p in planned
    ]  # the others are of bodies
