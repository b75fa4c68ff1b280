"""Makes a failing program small: first the choices that it grew from, then its text."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax

from tests.property.growing import grow
from tests.property.mixes import live, words
from tests.property.programs import Input, Program, Recorded, Seeded


def shrink(seed: int, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """A smaller program than that of `seed` which still fails; the program itself where nothing smaller does."""
    stop = time.monotonic() + seconds
    recorded = Recorded(rest=Seeded(seed))
    best = grow(recorded)
    seen = {best.source}
    tried = 0

    def still_fails(program: Program) -> bool:
        nonlocal tried
        if time.monotonic() > stop or str(program) in seen:
            return False
        seen.add(str(program))
        tried += 1
        if tried % 20 == 0:
            jax.clear_caches()
        return fails(program)

    choices, improved = recorded.choices, True
    while improved and time.monotonic() < stop:
        improved = False
        for candidate in _fewer(choices):
            replay = Recorded(candidate)
            try:
                program = grow(replay)
            except Exception:
                continue
            if _size(program) < _size(best) and still_fails(program):
                best, choices, improved = program, _trim(replay.choices), True
                break
    return _shrink_text(best, still_fails)


def _size(program: Program) -> tuple[int, int, int, int]:
    elements = sum(_elements(i) for i in program.inputs)
    return (
        len(program.body) + len(program.results),
        len(program.inputs),
        elements,
        len(program.source) + sum(t for _, t in program.tiles),
    )


def _elements(i: Input) -> int:
    n = 1
    for e in i.shape:
        n *= e
    return n


def _trim(choices: list[int]) -> list[int]:
    while choices and choices[-1] == 0:
        choices = choices[:-1]
    return choices


def _fewer(choices: list[int]) -> Iterator[list[int]]:
    """Shorter and smaller lists of choices: without a run of choices, with a run set to zero, with one halved."""
    n = len(choices)
    length = n // 2
    while length:
        for start in range(0, n, length):
            yield choices[:start] + choices[start + length :]
        for start in range(0, n, length):
            if any(choices[start : start + length]):
                yield choices[:start] + [0] * len(choices[start : start + length]) + choices[start + length :]
        length //= 2
    for at, value in enumerate(choices):
        if value > 1:
            yield [*choices[:at], value // 2, *choices[at + 1 :]]


def _shrink_text(program: Program, fails: Callable[[Program], bool]) -> Program:
    improved = True
    while improved:
        improved = False
        for candidate in _simpler(program):
            if fails(candidate):
                program, improved = candidate, True
                break
    return program


def _simpler(program: Program) -> Iterator[Program]:
    for n in range(len(program.results)):
        if len(program.results) > 1:
            yield _cleaned(program, results=(*program.results[:n], *program.results[n + 1 :]))
    for n in reversed(range(len(program.body))):
        name, value = program.body[n].split(" = ", 1)
        earlier = {i.name for i in program.inputs} | {line.split(" = ", 1)[0] for line in program.body[:n]}
        for operand in sorted(words(value) & earlier):
            swapped = tuple(re.sub(rf"\b{name}\b", operand, line) for line in program.body[n + 1 :])
            results = tuple(dict.fromkeys(operand if r == name else r for r in program.results))
            yield _cleaned(program, body=(*program.body[:n], *swapped), results=results)
    for n, i in enumerate(program.inputs):
        if i.dtype not in ("float32", "bool"):
            yield replace(program, inputs=(*program.inputs[:n], replace(i, dtype="float32"), *program.inputs[n + 1 :]))
        if i.offset or i.scale != 1.0:
            yield replace(
                program, inputs=(*program.inputs[:n], replace(i, offset=0.0, scale=1.0), *program.inputs[n + 1 :])
            )
    for size in (4, 1, 2):
        if any(t != size for _, t in program.tiles):
            yield replace(program, tiles=tuple((a, size) for a, _ in program.tiles))
    if program.tiles:
        yield replace(program, tiles=())


def _cleaned(program: Program, **changes: tuple[str, ...]) -> Program:
    """With these changes, without dead statements and inputs."""
    changed = replace(program, **changes)  # type: ignore[arg-type]
    body = tuple(live(list(changed.body), list(changed.results)))
    used = set().union(*(words(line) for line in (*body, *changed.results)))
    inputs = tuple(i for i in changed.inputs if i.name in used) or changed.inputs
    return replace(changed, body=body, inputs=inputs)
