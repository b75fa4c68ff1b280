"""Do two loop programs compute the same? Evaluated in float64 and over finite fields, over short axes, on drawn inputs."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from itertools import count

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.evaluate import evaluate, evaluate_program
from pallasfuse.ir.expr import rename_axes
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.search.egraph import plain_name
from pallasfuse.verification.compare import Comparison
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import tower
from pallasfuse.verification.value import Value

_TOLERANCE = 1e-9
_MOST_ELEMENTS = 1 << 20
_LEVELS, _TRIALS = 3, 8
"""The levels of a tower of finite fields, one more than exponentials that may be nested, and how often inputs are drawn."""


def agree(one: LoopProgram, other: LoopProgram, seed: int = 0) -> bool:
    """Are the outputs of two programs of the same inputs equal, but for rounding?

    A number that stands for the extent of an axis does not shrink with it. So where programs differ over short axes, those axes,
    and their copies, stay as long as they are over which the first program sums what it has not multiplied. Programs for which
    that would take too long count as different.
    """
    axes = _axes(one) | _axes(other)
    sums = (n for n in one.nests if isinstance(n, Nest) and n.precision is None)
    summed = {(plain_name(a), a.extent) for n in sums for a in n.reduced}
    whole = {a for a in axes if (plain_name(a), a.extent) in summed}
    return _agree(one, other, _short(axes), seed) or _agree(one, other, _short(axes, whole), seed)


def _agree(one: LoopProgram, other: LoopProgram, short: Mapping[Axis, Axis], seed: int) -> bool:
    programs = [_over(p, short) for p in (one, other)]
    try:
        for program in programs:
            verify(program)
    except InvalidProgramError:  # a tensor is read along axes of which one stays as it is
        return False
    if max(volume((*n.axes, *n.reduced)) for p in programs for n in p.nests if isinstance(n, Nest)) > _MOST_ELEMENTS:
        return False
    draw = np.random.default_rng(seed)
    shapes = {t.name: [a.extent for a in t.axes] for t in programs[0].inputs}
    inputs = {n: draw.uniform(0.5, 1.5, shape) * draw.choice([-1.0, 1.0], shape) for n, shape in shapes.items()}
    first, second = (evaluate(p, inputs) for p in programs)
    return all(np.allclose(first[n], second[n], rtol=_TOLERANCE, atol=_TOLERANCE) for n in one.outputs)


def agree_in_fields(one: LoopProgram, other: LoopProgram, seed: int = 0) -> bool:
    """Are the outputs of two programs of the same inputs equal over finite fields, on drawn inputs over short axes?"""
    short = _short(_axes(one) | _axes(other))
    first, second = (_over(p, short) for p in (one, other))
    fields = FiniteFields(tower(_LEVELS, _TRIALS, seed))
    inputs = {t.name: fields.random([a.extent for a in t.axes], t.dtype) for t in first.inputs}
    expected, found = (evaluate_program(p, inputs, fields, _external) for p in (first, second))
    for name in one.outputs:
        compared = Comparison()
        compared.add(expected[name], found[name], _TRIALS)
        if compared.mismatch is not None or compared.fewest == 0:
            return False
    return True


def _external(nest: External, _: dict[str, Value]) -> Value:
    raise InvalidProgramError(f"cannot evaluate {nest.name!r}: {nest.reason}")


def _axes(program: LoopProgram) -> set[Axis]:
    axes = {a for t in program.inputs for a in t.axes}
    return axes | {a for n in program.nests if isinstance(n, Nest) for a in (*n.axes, *n.reduced)}


def _short(axes: Set[Axis], whole: Set[Axis] = frozenset()) -> dict[Axis, Axis]:
    """An axis of two or more elements for each, equally long ones for equally long ones, but for those that stay as they are."""
    lengths = count(2)
    of = {extent: extent if extent == 1 else next(lengths) for extent in sorted({a.extent for a in axes})}
    return {a: a if a in whole else Axis(a.name, of[a.extent]) for a in axes}


def _over(program: LoopProgram, short: Mapping[Axis, Axis]) -> LoopProgram:
    """The program over other axes."""

    def over(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        return tuple(short[a] for a in axes)

    inputs = tuple(Tensor(t.name, over(t.axes), t.dtype) for t in program.inputs)
    nests = tuple(
        replace(n, axes=over(n.axes), reduced=over(n.reduced), body=rename_axes(n.body, short))
        for n in program.nests
        if isinstance(n, Nest)
    )
    return LoopProgram(inputs, nests, program.outputs)
