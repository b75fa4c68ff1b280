"""All stages of a plan, in order."""

from collections.abc import Mapping, Sequence

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.proof.groups import GroupTest, as_lowered, probe
from pallasfuse.proof.instance import Instance, all_axes
from pallasfuse.proof.lookups import lookups, over_stored
from pallasfuse.proof.masks import masks_vary
from pallasfuse.proof.parts_of_axes import parts_of_axes
from pallasfuse.proof.result import PlannedKernel, Proof, Record
from pallasfuse.proof.stages import bounds, conversion, duplicates, inlining, joining, short_shapes
from pallasfuse.targets import Target


def prove(converted: Converted, parts: Sequence[PlannedKernel], *, delta: float = 1e-9, seed: int = 0) -> Proof:
    """Test every stage from the jaxpr to the tile programs.

    Args:
      delta: the probability with which a wrong plan may pass (Mirage, theorem 3).
    """
    record = Record()
    instance: Instance | None = None
    try:
        for stage in (inlining, duplicates):
            stage(converted, record)
        for part in parts:
            bounds(converted, part, seed, record)
            lookups(converted, part, seed, record)
        parts = [over_stored(part) for part in parts]
        instance = to_loops(converted, parts, delta, seed, record)
        if converted.unjoined is not None and record.counterexample() is None:
            joining(converted, record)
            instance = Instance.of(converted, parts, record)
        if instance is not None:
            for number, part in enumerate(parts):
                if record.counterexample() is None:
                    test = GroupTest.small(instance, part, record)
                    masks_vary(part, instance, test.variants[0][1], test.bounded, seed, record)
                    test.run(delta, seed + 31 * number)
                if record.counterexample() is None:
                    probe(converted, part, seed, record)
                if record.counterexample() is None:
                    as_lowered(converted, part, record)
    except Exception as error:  # a user's call must not fail because of its verifier
        record.uncovered[
            f"the verifier failed ({type(error).__name__}: {error}): a bug in pallasfuse, please report it"
        ] = None
    extents = (
        {}
        if instance is None
        else {a.name: instance.small.axis(a).extent for a in sorted(all_axes(instance.converted.program))}
    )
    return proof_of(record, extents, () if instance is None else (*instance.assumed, *record.given))


def proof_of(record: Record, extents: Mapping[str, int], given: Sequence[str]) -> Proof:
    """The result of all that a record has."""
    found = record.counterexample()
    return Proof(
        found is None and not record.uncovered, 1.0 if found else record.bound, record.trials, extents, tuple(record.stages),
        tuple(record.notes), tuple(given), tuple(record.uncovered), found,
    )  # fmt: skip


def to_loops(
    converted: Converted, parts: Sequence[PlannedKernel], delta: float, seed: int, record: Record
) -> Instance | None:
    """Tests the stages from the jaxpr to its loops, with an axis for each dimension. Returns the instance, if there is one."""
    apart = converted.with_axes_apart
    instance = Instance.of(apart, parts if apart is converted else (), record)
    if instance is not None:
        parts_of_axes(instance, short_shapes(instance), delta, seed, record)
        conversion(instance, delta, seed, record)
    return instance


def disproved_form(converted: Converted, *, delta: float = 1e-9, seed: int = 0) -> str | None:
    """Where a program in another form is not the program before; None where they are equal, or that cannot be told over short axes.

    delta: the probability with which a wrong form may pass.
    """
    record = Record()
    try:
        instance = Instance.of(converted, (), record)
        if instance is not None:
            parts_of_axes(instance, short_shapes(instance), delta, seed, record)
    except Exception as error:  # a user's call must not fail because of its verifier
        return f"the verifier failed ({type(error).__name__}: {error})"
    found = record.counterexample()
    return None if found is None else str(found)


def short_kernels(converted: Converted, parts: Sequence[PlannedKernel]) -> list[tuple[Target, TileProgram]]:
    """The kernels of a plan, lowered over short axes: what an emitter can be tried on where the plan's own sizes are too large.

    Raises:
      InvalidProgramError: a kernel cannot be lowered over short axes.
    """
    record, parts = Record(), [over_stored(p) for p in parts]
    instance = Instance.of(converted, parts, record)
    if instance is None:
        raise InvalidProgramError("; ".join(record.uncovered))
    return [(phase.target, program) for p in parts
            for phase, program in zip(p.phases, GroupTest.small(instance, p, record).variants[-1][1], strict=True)]  # fmt: skip
