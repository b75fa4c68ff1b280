"""Transitions of one row of monomials: found without SymPy, and what SymPy finds."""

import subprocess
import sys
from collections import OrderedDict

import pytest

from pallasfuse.errors import Refusal
from pallasfuse.repair import closure, derive, rules
from tests.repair.repair_cases import ACCEPTED, FIXED, J, over_j


@pytest.fixture
def both(monkeypatch):
    """Compares each transition with the one that fractions give; counts those that need none."""
    short, seen = closure._common_factor, []

    def compared(basis, aged):
        monkeypatch.setattr(closure, "_common_factor", short)
        found = closure.transition(basis, aged)
        monkeypatch.setattr(closure, "_common_factor", lambda row, aged: None)
        assert closure.transition(basis, aged) == found
        seen.append(len(basis) == 1 and short(basis[0], aged) is not None)
        return found

    monkeypatch.setattr(rules, "transition", compared)
    module = sys.modules["pallasfuse.repair.derive"]  # the function has its name
    monkeypatch.setattr(module, "_memo", OrderedDict())
    return seen


def test_monomials_give_what_fractions_give(both):
    for case in (*ACCEPTED[::2], *FIXED):
        if hasattr(case, "frames"):
            assert not isinstance(derive(over_j(case.text, case.frames), case.reducer, case.frames, over=(J,)), Refusal)
    assert any(both) and not all(both)


@pytest.mark.deep  # so does tests/test_imports.py, of a quotient
def test_a_softmax_imports_no_sympy():
    code = """
import sys
from pallasfuse.errors import Refusal
from pallasfuse.repair import derive
assert not isinstance(derive("exp(c - r)", "sum", ["r"]), Refusal)
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
