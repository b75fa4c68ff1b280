"""Proof of the kernel of a loop: each of its trips, from any state, is a trip of the loop, and begins with what the one before
hands on.

That is an induction over the trips, whatever their number: so the fields need to hold no more than one trip, and the kernel that is
tested, of few trips over short axes, speaks for all. `from_any_state` makes a tile program of a kernel whose trips are given their
states, and store what they were handed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pallasfuse import _compat
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_nest
from pallasfuse.ir.evaluate_tiles import evaluate_tiles_over
from pallasfuse.ir.expr import Expr, Read, apply, const, index, read, rebuild, select, with_args
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Carry, Contract, Let, Load, Loop, Reduce, Statement, Store, TileProgram, verify
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.loop_calls import KernelOfLoop
from pallasfuse.proof.deciding import Tests, decide
from pallasfuse.proof.instance import MOST_ELEMENTS, all_axes, levels_of, nest_volume
from pallasfuse.proof.predicates import asks_for_no_number, compares, one_sided, with_no_numbers
from pallasfuse.proof.proving import proof_of, to_loops
from pallasfuse.proof.result import Counterexample, Proof, Record
from pallasfuse.proof.selections import selections
from pallasfuse.proof.stages import duplicates, inlining
from pallasfuse.recurrences import recurrence_of, trip_of
from pallasfuse.tiling.legalize import exactly
from pallasfuse.tiling.recurrence import Layout, Recurrence, each_of, last_of, lower_recurrence
from pallasfuse.verification.bound import miss_probability, sizes, trials_for
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import Chain, tower
from pallasfuse.verification.shrink import Shrinking, integers_of, shrinking, small_integers
from pallasfuse.verification.value import Value

_TRIPS = 4
"""The trips of a loop that is tested: its first and last one, and two between."""
_EXTENTS = (3, 2)
"""Extents of short axes. Of three positions a tile is padded, of two it is not."""
_MANY_TRIALS = 3000
"""More than these are avoided by shorter axes, if possible."""
_MOST_TRIALS = 20_000
_BATCH_ELEMENTS = 1 << 20
_PROBES = 32


@dataclass(frozen=True, slots=True)
class Trip:
    """The definition of a loop: the program of a trip, and what the scan says of its operands and results."""

    program: LoopProgram
    constants: tuple[str, ...]
    carried: tuple[tuple[str, str], ...]
    """The tensors that a trip reads from the one before, each with the name of the value that takes its place in the next."""
    sliced: tuple[str, ...]
    stacked: tuple[str, ...]
    backwards: bool

    @staticmethod
    def of(loop: KernelOfLoop, converted: Converted) -> "Trip":
        """Reads the roles of operands and results off the equation of a loop. converted: the program of its trip."""
        counts = _compat.scan_counts(loop.loop)
        assert counts is not None
        constants, carried = counts
        names = tuple(t.name for t in converted.program.inputs)
        results = tuple(str(r) for r in converted.results)
        states = tuple(zip(names[constants : constants + carried], results[:carried], strict=True))
        return Trip(
            converted.program, names[:constants], states, names[constants + carried :], results[carried:],
            bool(loop.loop.params["reverse"]),
        )  # fmt: skip

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands of the loop, in the order of its equation."""
        return (*self.constants, *(before for before, _ in self.carried), *self.sliced)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results of the loop in its kernel, in the order of its equation."""
        return (*(last_of(before) for before, _ in self.carried), *map(each_of, self.stacked))


def prove_loop(loop: KernelOfLoop, *, delta: float = 1e-9, seed: int = 0) -> Proof:
    """Test every stage from the body of a loop to the kernel that runs all its trips; delta: as of `prove`."""
    record = Record()
    extents: Mapping[str, int] = {}
    try:
        converted = trip_of(loop.loop)
        if isinstance(converted, Refusal):
            raise InvalidProgramError(f"{loop.kernel.name} is the kernel of a loop that has none: {converted}")
        selections(loop.loop.params["jaxpr"], loop.kernel.name, seed, record)
        for stage in (inlining, duplicates):
            stage(converted, record)
        to_loops(converted, (), delta, seed, record)
        trip = Trip.of(loop, converted)
        recurrence = _kernel_as_lowered(loop, trip, record) if record.counterexample() is None else None
        if recurrence is not None and record.counterexample() is None:
            extents = _test_kernel(loop, trip, recurrence, delta, seed, record)
    except Exception as error:  # a user's call must not fail because of its verifier
        record.uncovered[
            f"the verifier failed ({type(error).__name__}: {error}): a bug in pallasfuse, please report it"
        ] = None
    return proof_of(record, extents, tuple(record.given))


def _kernel_as_lowered(loop: KernelOfLoop, trip: Trip, record: Record) -> Recurrence | None:
    """The recurrence of which a kernel is what lowering makes; None, with the reason noted, where it is none."""
    stage = f"own lowering of {loop.kernel.name}"
    record.stages[stage] = None
    found = recurrence_of(loop.loop)
    if isinstance(found, Refusal):
        record.uncovered[f"{stage}: {found}"] = None
        return None
    if (loop.operands, loop.results) != (trip.operands, trip.results):
        record.wrong = Counterexample(
            stage,
            "operands and results",
            (),
            f"{trip.operands} to {trip.results}",
            f"{loop.operands} to {loop.results}",
        )
    if lower_recurrence(found[0], loop.layout, loop.target) != loop.kernel and record.wrong is None:
        record.wrong = Counterexample(
            stage, loop.kernel.name, (), "the program that its loop and layout give", "another"
        )
    return found[0]


def _test_kernel(
    loop: KernelOfLoop, trip: Trip, recurrence: Recurrence, delta: float, seed: int, record: Record
) -> Mapping[str, int]:
    """Tests the kernel of a loop over short axes of several extents, lowered with its layout. Returns the extents of the first."""
    tested: list[dict[str, int]] = []
    for number, longest in enumerate(_EXTENTS):
        small = _short(trip.program, longest)
        if isinstance(small, Refusal):
            record.uncovered[f"lowering of {loop.kernel.name}: {small}"] = None
            break
        test = LoopTest(loop, trip, recurrence, small, record)
        tested.append({a.name: a.extent for a in sorted(test.program.order)})
        if tested[-1] in tested[:-1]:
            break
        test.run(delta, seed + 17 * number)
        if record.counterexample() is not None:
            break
    return tested[0] if tested else {}


def _short(program: LoopProgram, longest: int) -> Shrinking | Refusal:
    """Maps axes to short ones, of at most so many positions, or more where positions are compared with numbers."""
    for most in (longest + small_integers(program), 2):
        small = shrinking(program, dict.fromkeys(all_axes(program), most))
        if isinstance(small, Refusal):
            if max((nest_volume(n) for n in program.nests), default=0) > MOST_ELEMENTS:
                return Refusal(f"a trip has no instance over short axes ({small}): verify it with small arguments")
            return shrinking(program, {a: a.extent for a in all_axes(program)})
        if _needed(small.of(program), 1e-9)[0] <= _MANY_TRIALS:
            break
    return small


def _needed(program: LoopProgram, delta: float) -> tuple[int, float]:
    """Returns (trials, the probability that one misses a difference) for the results of a trip."""
    known = sizes(program)
    results = [known[name] for name in program.outputs if name in known]
    if not results:
        return 2, 0.0
    largest = max(results, key=miss_probability)
    return trials_for(largest, delta), miss_probability(largest)


class LoopTest:
    """Tests the kernel of a loop against the program of its trip, over short axes, on random operands and states."""

    def __init__(
        self, loop: KernelOfLoop, trip: Trip, recurrence: Recurrence, small: Shrinking, record: Record
    ) -> None:
        """Lowers the loop over short axes. recurrence: of the loop. small: the map to these axes."""
        self.record, self.body = record, small.of(trip.program)
        self.trip, self.stage = trip, f"lowering of {loop.kernel.name}"
        self.time = Axis(recurrence.time.name, _TRIPS)
        own = Recurrence(
            recurrence.name, small.of(recurrence.body), self.time, recurrence.carried, recurrence.sliced,
            recurrence.stacked, recurrence.backwards,
        )  # fmt: skip
        self.kernel = lower_recurrence(own, _short_layout(loop.layout, small), exactly(loop.target))
        self.program = from_any_state(self.kernel, [before for before, _ in trip.carried])
        self.long_body = trip.program
        self.draws_no_numbers = False
        self.decided: dict[str, set[bool]] = {}

    def run(self, delta: float, seed: int) -> None:
        """Makes batches of trials until every element is determined often enough, or the kernel is found to be wrong."""
        self._copies(seed)
        tests = decide(self.record, self.body, seed, partial(self._over_fields, delta, seed), self._batch)
        if asks_for_no_number(self.body) and self.record.counterexample() is None:
            self._probe_no_numbers(seed)
        for line in one_sided(self.decided, self.long_body, self.body):
            self.record.uncovered[line] = None
        self.record.settle(tests.needed, tests.miss, tests.made)

    def _over_fields(self, delta: float, seed: int, record: Record, chain: Chain) -> Tests:
        nests = [n for n in self.body.nests if isinstance(n, Nest)]
        needed, miss = _needed(self.body, delta)
        elements = _TRIPS * max((nest_volume(n) for n in nests), default=1)
        batch = max(32, min(needed + 8, _BATCH_ELEMENTS // elements, _MOST_TRIALS))
        limit = max(8 * needed + 64, _MOST_TRIALS) if needed <= _MOST_TRIALS else batch
        literals, levels, done = integers_of(self.body), levels_of(nests), 0
        while True:
            fields = FiniteFields(tower(levels, batch, seed * 7919 + done, chain), literals)
            self._batch(record, fields)
            done += batch
            fewest = min(c.fewest for c in record.comparisons.values())
            enough = fewest >= needed or (fewest == 0 and done > 8 * needed)
            if done >= limit or enough or record.counterexample() is not None:
                return Tests(needed, miss, done, fields.constants)

    def _probe_no_numbers(self, seed: int) -> None:
        """Runs a batch in which some elements are no numbers, for a trip that asks for them. It looks for a difference; no bound
        comes from it."""

        def over_fields(record: Record, chain: Chain) -> Tests:
            levels = levels_of([n for n in self.body.nests if isinstance(n, Nest)])
            fields = FiniteFields(tower(levels, _PROBES, seed * 7919 + 1_000_003, chain), integers_of(self.body))
            self._batch(record, fields)
            return Tests(_PROBES, 0.0, _PROBES, fields.constants)

        before, self.record.comparisons, self.draws_no_numbers = self.record.comparisons, {}, True
        decide(self.record, self.body, seed, over_fields, self._batch)
        wrong = {k: c for k, c in self.record.comparisons.items() if c.mismatch is not None}
        self.record.comparisons, self.draws_no_numbers = before | wrong, False

    def _batch(self, record: Record, fields: FiniteFields) -> None:
        trip, trials = self.trip, fields.tower.trials
        given = {t.name: self._drawn([a.extent for a in t.axes], t.dtype, fields) for t in self.program.inputs}
        axes = {d.name: d for d in self.body.definitions()}
        for name in (*trip.operands, *(state_of(before) for before, _ in trip.carried)):
            if name not in given:  # the kernel reads it nowhere, which the trip may
                own = axes[name.removeprefix(_STATE)]
                changes = name in trip.sliced or name.startswith(_STATE)
                shape = [a.extent for a in own.axes]
                given[name] = self._drawn([_TRIPS, *shape] if changes else shape, own.dtype, fields)
        found = evaluate_tiles_over(self.program, given, fields)
        handed = {before: given[before] for before, _ in trip.carried}
        order = range(_TRIPS)
        for number in reversed(order) if trip.backwards else order:
            known = {name: given[name] for name in trip.constants}
            known |= {name: given[name].take((number,)) for name in trip.sliced}
            known |= {before: given[state_of(before)].take((number,)) for before, _ in trip.carried}
            self._compute(known, fields)

            def compare(name: str, expected: Value, got: Value, number: int = number) -> None:
                record.compare(self.stage, f"{name} of trip {number}", expected, got.take((number,)), trials)

            for before, after in trip.carried:
                compare(begun_of(before), handed[before], found[begun_of(before)])
                compare(next_of(before), known[after], found[next_of(before)])
                handed[before] = known[after]
            for name in dict.fromkeys(trip.stacked):
                compare(each_of(name), known[name], found[each_of(name)])
        for before, _ in trip.carried:
            record.compare(self.stage, last_of(before), handed[before], found[last_of(before)], trials)
        record.notes.update(fields.notes)

    def _drawn(self, shape: list[int], dtype: str, fields: FiniteFields) -> Value:
        value = fields.random(shape, dtype)
        return with_no_numbers(value, fields.tower.generator) if self.draws_no_numbers else value

    def _compute(self, known: dict[str, Value], fields: FiniteFields) -> None:
        """Adds what a trip computes to what is known."""
        for nest in self.body.nests:
            assert isinstance(nest, Nest)
            value = known[nest.name] = evaluate_nest(nest, known, fields).typed(nest.dtype)
            if compares(nest.body) and value.real is not None and value.real.shape[-1] > 1:
                self.decided.setdefault(nest.name, set()).update(np.unique(value.real).tolist())

    def _copies(self, seed: int) -> None:
        """Runs the trips of the kernel as they are emitted, with the loads ahead of them, in Pallas' interpret mode.

        Each trip stores what it has loaded, which must be its own slices, element for element, and how many came before it.
        """
        import jax
        import jax.numpy as jnp

        from pallasfuse.emission import pallas_kernel

        stage = f"trips and loads of {self.kernel.name}, as they are emitted"
        self.record.stages[stage] = None
        program, generator = copies_of(self.kernel), np.random.default_rng(seed)
        wanted = {COUNT: np.arange(_TRIPS)[:: -1 if self.trip.backwards else 1]}
        for t in program.inputs:
            most = 2 if t.dtype == "bool" else 100
            wanted[t.name] = generator.integers(0, most, [a.extent for a in t.axes])
        with jax.default_device(jax.devices("cpu")[0]):
            arrays = {t.name: jnp.asarray(wanted[t.name], t.dtype) for t in program.inputs}
            found = jax.jit(partial(pallas_kernel.call, program, interpret=True))(arrays)
        for name, array in found.items():
            own = _source_of(name)
            have, want = np.asarray(array), wanted[own].astype(array.dtype)
            if not np.array_equal(have, want) and self.record.wrong is None:
                at = tuple(int(n) for n in np.argwhere(have != want)[0])
                self.record.wrong = Counterexample(stage, own, at, str(want[at]), str(have[at]))


def _short_layout(layout: Layout, small: Shrinking) -> Layout:
    """Maps a layout to short axes: blocks have one position, the whole axis, or two positions, as in the layout."""

    def tile(axis: Axis, actual: int) -> int:
        short = small.axis(axis).extent
        return 1 if actual == 1 else 1 << (short - 1).bit_length() if actual >= axis.extent else min(2, short)

    return replace(layout, grid=tuple((small.axis(a), tile(a, t)) for a, t in layout.grid))


# --- a kernel whose trips are given their states

_STATE = "state."


def state_of(before: str) -> str:
    """Names the input that has a state for every trip, in place of what the trip before hands on."""
    return f"{_STATE}{before}"


def begun_of(before: str) -> str:
    """Names the output that has what every trip was handed."""
    return f"begun.{before}"


def next_of(before: str) -> str:
    """Names the output that has what every trip hands on, from the state that it was given."""
    return f"next.{before}"


def from_any_state(program: TileProgram, carried: list[str]) -> TileProgram:
    """Makes a kernel of the same loop in which every trip computes from a state that it loads, beside the one that it is handed.

    A trip stores both what it was handed (`begun_of`) and what it hands on (`next_of`). Beyond the end of its axes, where a tile is
    padded, a state is any number: nothing may depend on it. carried: the tensors that the loop carries, in its order.

    Raises:
      InvalidProgramError: the program is no such kernel.
    """
    loops = [s for s in program.body if isinstance(s, Loop)]
    if len(loops) != 1 or len(loops[0].segments) != 1 or len(loops[0].carries) != len(carried):
        raise InvalidProgramError(f"tile program {program.name} is no loop that carries {', '.join(carried)}")
    (loop,) = loops
    (segment,) = loop.segments
    own = {c.name: f"any.{c.name}" for c in loop.carries}
    inputs, outputs = list[Tensor](), list[Tensor]()
    first, last, carries = list[Statement](), list[Statement](), list[Carry]()
    for before, c in zip(carried, loop.carries, strict=True):
        axes = loop.axis, *_order_of(program, before, c)
        stored = axes[1:]
        inputs.append(Tensor(state_of(before), axes, c.dtype))
        outputs += [Tensor(begun_of(before), axes, c.dtype), Tensor(next_of(before), axes, c.dtype)]
        loaded, other = f"loaded.{c.name}", f"beyond.{c.dtype}"
        first += [Load(loaded, state_of(before), axes, c.dtype)]
        value: Expr = read(loaded, axes, c.dtype)
        padded = [a for a in stored if a.extent % program.tile(a)]
        if padded:
            first += [] if any(t.name == other for t in inputs) else [Load(other, other, (), c.dtype)]
            inputs += [] if any(t.name == other for t in inputs) else [Tensor(other, (), c.dtype)]
            value = select(_inside(padded), value, read(other, (), c.dtype))
        first += [Let(own[c.name], c.axes, value), Store(begun_of(before), axes, read(c.name, c.axes, c.dtype))]
        after = own.get(c.next_name, c.next_name)
        last.append(Store(next_of(before), axes, read(after, c.axes, c.dtype)))
        carries.append(replace(c, next_name=after))
    body = tuple(_reading(s, own) for s in segment.body)
    changed = replace(
        loop, carries=tuple(carries), segments=(replace(segment, body=(*first, *body, *last)),)
    )  # fmt: skip
    return verify(replace(
        program, inputs=(*program.inputs, *inputs), outputs=(*program.outputs, *outputs),
        body=tuple(changed if s is loop else s for s in program.body),
    ))  # fmt: skip


def _order_of(program: TileProgram, before: str, carry: Carry) -> tuple[Axis, ...]:
    """Returns the axes of a carried tensor in its order in memory."""
    found = next((t.axes for t in program.inputs if t.name == before), carry.axes)
    return found if set(found) == set(carry.axes) else carry.axes


def _inside(axes: list[Axis]) -> Expr:
    """Makes the predicate that is true inside some axes."""
    here = [apply("lt", index(a), const(a.extent, "int32")) for a in axes]
    found = here[0]
    for other in here[1:]:
        found = apply("and", found, other)
    return found


def _reading(statement: Statement, names: Mapping[str, str]) -> Statement:
    """Returns a statement with other names for some of the values that it reads."""

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Read):
            return read(names.get(node.tensor, node.tensor), node.indices, node.dtype)
        return with_args(node, args)

    match statement:
        case Let() | Reduce() | Store():
            return replace(statement, value=rebuild(statement.value, step))
        case Contract():
            return replace(statement, lhs=rebuild(statement.lhs, step), rhs=rebuild(statement.rhs, step))
    return statement


# --- a kernel that copies

_COPY = "copy."
COUNT = "count"
"""The output that has how many trips came before each."""


def _source_of(copy: str) -> str:
    return copy.removeprefix(_COPY).partition("@")[0]


def copies_of(program: TileProgram) -> TileProgram:
    """Makes a kernel of the same loop whose trips store what they load, and count themselves, and compute nothing else."""
    (loop,) = (s for s in program.body if isinstance(s, Loop))
    (segment,) = loop.segments
    loads = [s for s in segment.body if isinstance(s, Load) and loop.axis in s.indices]
    dtypes_of = {t.name: t.dtype for t in program.inputs}
    names = {s.name: f"{_COPY}{s.tensor}@{n}" for n, s in enumerate(loads)}
    outputs = tuple(Tensor(names[s.name], s.indices, dtypes_of[s.tensor]) for s in loads)
    stores = tuple(Store(names[s.name], s.indices, read(s.name, s.indices, s.dtype)) for s in loads)
    count, one = read("trips", (), "int32"), const(1, "int32")
    counting = Let("counted", (), apply("add", count, one)), Store(COUNT, (loop.axis,), count)
    carries = (Carry("trips", (), "int32", const(0, "int32"), "counted"),)
    body = (replace(loop, carries=carries, segments=(replace(segment, body=(*loads, *counting, *stores)),)),)
    loaded = {s.tensor for s in loads}
    inputs = tuple(t for t in program.inputs if t.name in loaded)
    counted = Tensor(COUNT, (loop.axis,), "int32")
    return verify(replace(program, inputs=inputs, outputs=(*outputs, counted), body=body))
