"""Two programs that compute the same agree, and others do not."""

from dataclasses import replace

import pytest

from pallasfuse.ir.expr import add, apply
from pallasfuse.search.agreement import agree
from tests.search.test_rewriting import CPU, PROGRAMS, M, N, f32, program_of, rewritings, with_nests


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_form_agrees_with_the_program(name):
    function, avals, _ = PROGRAMS[name]
    program = program_of(function, avals)
    (found,) = rewritings(program, CPU)
    assert agree(program, with_nests(program, found.nests))


def test_the_number_of_elements_of_a_sum_may_be_a_factor():
    """A bias that is added to every row is as often in the sum of the rows as there are rows."""
    program = program_of(lambda x, w, b: (x @ w + b).sum(0), (f32(N, N), f32(N, N), f32(N)))
    (found,) = rewritings(program, CPU)
    assert agree(program, with_nests(program, found.nests))


@pytest.mark.parametrize(
    "change", [lambda b: add(b, b), lambda b: apply("neg", b), lambda b: apply("abs", b), lambda b: b.args[0]]
)
def test_other_programs_differ(change):
    program = program_of(lambda a, b: a @ b, (f32(N, N), f32(N, M)))
    (product,) = program.nests
    assert agree(program, program)
    assert not agree(program, with_nests(program, [replace(product, body=change(product.body))]))
