"""The kernels of a schedule tree against the nests that they compute, over finite fields."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.evaluate import evaluate_nest
from pallasfuse.ir.evaluate_tiles import evaluate_tiles_over
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.neutrality import fills_of
from pallasfuse.ir.part import Part
from pallasfuse.ir.tile_program import Contract, Loop, Reduce, Statement, TileProgram, every
from pallasfuse.proof.deciding import Tests, decide
from pallasfuse.proof.instance import MOST_ELEMENTS, assume, draw, levels_of, nest_volume
from pallasfuse.proof.result import Counterexample, Proof, Record
from pallasfuse.repair.signs import Sign
from pallasfuse.targets import Tails
from pallasfuse.tiling.tree_values import Bounded
from pallasfuse.verification.bound import miss_probability, sizes, trials_for
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import Chain, tower
from pallasfuse.verification.shrink import integers_of
from pallasfuse.verification.value import Value
from pallasfuse.verification.visits import wrong_visits

_MOST_TRIALS = 20_000
_BATCH_ELEMENTS = 1 << 21


def prove_tree(
    part: Part, programs: Sequence[TileProgram], bounded: Sequence[Bounded], tails: Tails, *, delta: float = 1e-9, seed: int = 0
) -> Proof:  # fmt: skip
    """Tests whether kernels that run one after the other compute the nests of a part, at its own extents.

    Args:
      bounded: the loops that `lower_tree` bounded by masks.
      delta: the probability with which wrong kernels may pass.
    """
    record = Record()
    test = _TreeTest(part, programs, tails, record)
    try:
        for program in programs:
            bounds_of_loops(program, bounded, seed, record)
        if test.elements > MOST_ELEMENTS:
            record.uncovered[f"a statement has {test.elements} elements: prove the tree over shorter axes"] = None
        elif record.wrong is None:
            test.run(delta, seed)
    except InvalidProgramError as error:
        record.wrong = Counterexample("the machine that runs tiles", "", (), "a valid program", str(error))
    found = record.counterexample()
    extents = {a.name: a.extent for a in part.axes.values()}
    return Proof(
        found is None and not record.uncovered, 1.0 if found else record.bound, record.trials, extents, tuple(record.stages),
        tuple(record.notes), tuple(record.given), tuple(record.uncovered), found,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _TreeTest:
    part: Part
    programs: Sequence[TileProgram]
    tails: Tails
    record: Record

    @property
    def whole(self) -> LoopProgram:
        return LoopProgram(self.part.inputs, self.part.nests, self.part.outputs)

    @property
    def far(self) -> frozenset[float]:
        """The numbers that masks fill in: infinities over fields."""
        fills = (fills_of(n.body) for n in self.part.nests if n.is_reduction)
        return frozenset(n for f in fills if f is not None for n in f.numbers)

    @property
    def elements(self) -> int:
        """The largest number of elements of a nest, or of the tiles that one statement computes."""
        tiles = (
            math.prod(p.tile(a) for a in (*s.axes, *s.over))
            for p in self.programs for s in every(p.body) if isinstance(s, Contract | Reduce)
        )  # fmt: skip
        return max((*map(nest_volume, self.part.nests), *tiles))

    def run(self, delta: float, seed: int) -> None:
        tests = decide(self.record, self.whole, seed, partial(self._over_fields, delta, seed), self._batch, self.far)
        self.record.settle(tests.needed, tests.miss, tests.made)

    def _over_fields(self, delta: float, seed: int, record: Record, chain: Chain) -> Tests:
        known = sizes(self.whole)
        largest = max((known[n.name] for n in self.part.nests), key=miss_probability)
        needed, miss = trials_for(largest, delta), miss_probability(largest)
        elements = max(self.elements, 1)
        batch = max(32, min(needed + 8, _BATCH_ELEMENTS // elements, _MOST_TRIALS))
        limit = max(8 * needed + 64, _MOST_TRIALS) if needed <= _MOST_TRIALS else batch
        done = 0
        while True:
            made = tower(levels_of(self.part.nests), batch, seed * 7919 + done, chain)
            fields = FiniteFields(made, integers_of(self.whole), far=self.far)
            self._batch(record, fields)
            done += batch
            fewest = min(c.fewest for c in record.comparisons.values())
            enough = fewest >= needed or (fewest == 0 and done > 8 * needed)
            if done >= limit or enough or record.counterexample() is not None:
                return Tests(needed, miss, done, fields.constants)

    def _batch(self, record: Record, fields: FiniteFields) -> None:
        signs: Mapping[str, Sign] = Graph(self.whole).signs
        values: dict[str, Value] = {t.name: draw(signs, t.name, t.axes, t.dtype, fields) for t in self.part.inputs}
        have = dict(values)
        for nest in self.part.nests:
            value = evaluate_nest(nest, values, fields).typed(nest.dtype)
            values[nest.name] = assume(signs, nest.name, value, fields)
        for program in self.programs:
            found = evaluate_tiles_over(program, have, fields, move_last_block_back=self.tails == "exact")
            have |= found
            for name, value in found.items():
                if name in values:
                    record.compare(
                        f"kernel {program.name}", name, values[name], value, fields.tower.trials, unfinished=True
                    )
        record.notes.update(fields.notes)


def bounds_of_loops(program: TileProgram, bounded: Sequence[Bounded], seed: int, record: Record) -> None:
    """The bounds of loops: every position that counts is visited, and what is called unmasked is."""
    generator = np.random.default_rng(seed)
    for around, loop in _with_windows(program.body, {}):
        known = next((b for b in bounded if b.loop is loop), None)
        if known is None:
            continue
        stage = f"bounds of {program.name}"
        record.stages[stage] = None
        grid = {**dict(program.grid), **around}
        wrong = wrong_visits(replace(program, grid=tuple(grid.items())), loop, known.guards.predicates, generator)
        if wrong is not None and record.wrong is None:
            record.wrong = Counterexample(stage, str(loop.axis), (), "every element that counts", wrong)


def _with_windows(body: Sequence[Statement], around: dict) -> Iterator[tuple[dict, Loop]]:  # type: ignore[type-arg]
    """Yields every loop, with the tiles of those around it."""
    for s in body:
        if isinstance(s, Loop):
            yield around, s
            for segment in s.segments:
                yield from _with_windows(segment.body, {**around, s.axis: segment.tile})
