"""Every program that was once wrong, on every emitter."""

import pytest

from tests.property.corpus import CORPUS, load

FILES = sorted(CORPUS.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_program_that_was_once_wrong(path):
    case, what, emitters = load(path)
    assert what, "a file of the corpus says what was wrong"
    assert not case.plain_verdict.problems, f"the bound is too small: {case.plain_verdict}"
    for emitter in emitters:
        verdict = case.judge(emitter)
        assert not verdict.problems, f"{emitter}: {verdict}\nonce: {what}"
