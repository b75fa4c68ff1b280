"""Blockbuster's rules: each keeps the values of its example, and evaluation tells every mutant from it."""

import numpy as np
import pytest

from pallasfuse.errors import Refusal
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.tree import RangeLoop
from pallasfuse.schedule.rule import Legality
from pallasfuse.schedule.rules import EXTENSION, PRIORITY, RULES
from tests.schedule.evaluate_trees import evaluate_trees
from tests.schedule.rule_examples import EXAMPLES

MUTANTS = [pytest.param(r, m, id=f"{r}-{m.name}") for r in RULES.values() for m in EXAMPLES[r.number][1]]


def inputs_of(program):
    rng = np.random.default_rng(0)
    return {t.name: rng.standard_normal([a.extent for a in t.axes]) for t in program.region.inputs}


def wanted(program):
    region = program.region
    values = evaluate(LoopProgram(region.inputs, region.nests, region.outputs), inputs_of(program))
    return {name: values[name] for name in region.outputs}


def same(program, want):
    have = evaluate_trees(program.region, program.body, inputs_of(program))
    return all(np.allclose(have[n], want[n], rtol=1e-12, atol=1e-12) for n in want)


def applied(rule, program, legality):
    """Yields what a rule makes of a program at each site in each body."""
    waiting = [()]
    while waiting:
        path = waiting.pop()
        yield from (rule.apply(program, site, legality) for site in rule.sites(program, path))
        waiting += [(*path, n) for n, node in enumerate(program.at(path)) if isinstance(node, RangeLoop)]


@pytest.mark.parametrize("rule", RULES.values(), ids=str)
def test_a_rule_keeps_the_values_of_its_example(rule):
    program = EXAMPLES[rule.number][0]()
    want = wanted(program)
    assert same(program, want)
    results = [p for p in applied(rule, program, Legality()) if not isinstance(p, Refusal)]
    assert results
    for result in results:
        assert result != program
        assert same(result, want), result


@pytest.mark.sampled(2, cover=("rule",))
@pytest.mark.parametrize(("rule", "mutant"), MUTANTS)
def test_evaluation_tells_a_mutant_from_its_rule(rule, mutant):
    program = (mutant.example or EXAMPLES[rule.number][0])()
    want = wanted(program)
    assert same(program, want)
    assert not same(mutant.apply(program), want)
    for result in applied(rule, program, Legality()):  # where the condition does not hold, the rule does not make it
        assert isinstance(result, Refusal) or same(result, want)


def test_every_rule_has_a_text_and_three_mutants():
    assert sorted(RULES) == list(range(1, 10))
    assert sorted((*PRIORITY, EXTENSION, 7)) == list(RULES)
    assert EXAMPLES.keys() == RULES.keys()
    for rule in RULES.values():
        assert len(EXAMPLES[rule.number][1]) >= 3
        assert all(map(str.strip, (rule.name, rule.before, rule.after, rule.condition)))
