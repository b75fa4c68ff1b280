"""Every program that was once wrong, on every emitter."""

import functools

import pytest

from tests.property.corpus import CORPUS, load

pytestmark = pytest.mark.optimized

FILES = {p.stem: p for p in sorted(CORPUS.glob("*.py"))}
CASES = [(name, emitter) for name, path in FILES.items() for emitter in load(path)[2]]


@functools.lru_cache(maxsize=1)
def loaded(name):
    """The case of a file, and what was wrong; what all emitters are compared with is computed once."""
    case, what, _ = load(FILES[name])
    return case, what


@pytest.mark.sampled(64, cover=("emitter",))
@pytest.mark.parametrize(("name", "emitter"), CASES)
def test_program_that_was_once_wrong(name, emitter):
    case, what = loaded(name)
    assert what, "a file of the corpus says what was wrong"
    assert not case.plain_verdict.problems, f"the bound is too small: {case.plain_verdict}"
    verdict = case.judge(emitter)
    assert not verdict.problems, f"{emitter}: {verdict}\nonce: {what}"
