"""Plans on disk: another process that traces the same program uses the plan, and neither searches nor derives.

A record has the kernels of a plan in canonical names, equal ones once, and the names of each; the reductions that are left, with
the reasons; the conditions. Everything else follows from the jaxpr: the order of the steps, and, when they are asked for, the
loop program and source lines. The key is a hash of the flat jaxpr, of the names of its arguments, of the target with the numbers
of its device, of the options, and of the versions of everything that plans. A record that does not fit is dropped.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import jax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.decisions import Grouping, Left, Original, Phase, Placed
from pallasfuse.environment import versions
from pallasfuse.first_time import IMPORTS, Later, shared, without_collection
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.ir.encoding import EncodingError, decode, encode
from pallasfuse.ir.fold import Accumulator, Fold, Frame, Group
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, Source
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.renaming import restored
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Buffer,
    Carry,
    Contract,
    Get,
    Instead,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Set,
    Split,
    Store,
    TileProgram,
    verify,
)
from pallasfuse.ir.tree import Do, Keep, Launch, Merge, RangeLoop, TreeKernel
from pallasfuse.jaxpr_frontend import Converted, flatten
from pallasfuse.jaxpr_frontend.converted import of_flat
from pallasfuse.jaxpr_frontend.names import tensor_names
from pallasfuse.jaxpr_frontend.places import operation_of
from pallasfuse.jaxpr_frontend.rebuilding import rewritten
from pallasfuse.leaving import left_function
from pallasfuse.options import FuseOptions
from pallasfuse.parts import digest
from pallasfuse.plan import Kernel, Plan
from pallasfuse.price.terms import Price, Term
from pallasfuse.primitive_names import WITH_BODIES
from pallasfuse.search.found import Rewriting, Searched
from pallasfuse.steps import fallbacks_of, steps_of
from pallasfuse.store import Identity, Record, current
from pallasfuse.targets import Target

_CLASSES: tuple[type, ...] = (
    Accumulator, Axis, Buffer, Carry, Contract, Do, External, Fold, Frame, Get, Group, Instead, Keep, Kernel, Launch, Let, Load,
    Lookup, Loop, Merge, Nest, Phase, Placed, Price, Range, RangeLoop, Reduce, Rewriting,
    Schedule, Searched, Segment, Set, Source, Split, Store, Tensor,
    Term, TileProgram, TreeKernel,
)  # fmt: skip
_SWITCH = "PALLASFUSE_KEEP_PLANS"
_TOKEN = re.compile("«[ats][0-9]+»")
_SOURCE = "«s"


def plan_of(jaxpr: Jaxpr, target: Target, options: FuseOptions, boundary: Boundary = NO_LOOP) -> Plan:
    """The plan of a jaxpr, as `pipeline.make_plan`: the one that was kept, if there is one; else it is made, and kept.

    Raises:
      FusionError: as `make_plan`.
    """
    return shared((plan_of, jaxpr, target, options, boundary), lambda: _plan_of(jaxpr, target, options, boundary))


def _plan_of(jaxpr: Jaxpr, target: Target, options: FuseOptions, boundary: Boundary) -> Plan:
    """The plan of a jaxpr, read or made: as `plan_of`, which a task asks about the same jaxpr once."""
    if not _may_be_kept(jaxpr, options):
        return _made(jaxpr, target, options, boundary)
    with without_collection():  # a collection in a process with a large model takes longer than to read a plan
        flat = flatten(jaxpr)
        identity = {**_identity(flat, target, options), "boundary": repr(boundary)}
        record = current().get(identity)
        if record is not None:
            try:
                return replace(_read(record, jaxpr, flat, target, options), boundary=boundary)
            except Exception as error:  # whatever it is: a record that does not fit is none
                what = f"{type(error).__name__}: {error}"
                current().warn("plan", f"a plan that was kept does not fit ({what}): it is made anew")
    plan = _made(jaxpr, target, options, boundary)
    written = _written(plan)
    if written is not None:
        current().update(identity, lambda _: written)
    return plan


def _made(jaxpr: Jaxpr, target: Target, options: FuseOptions, boundary: Boundary) -> Plan:
    with IMPORTS:  # takes longer than to read a plan that was kept
        from pallasfuse.pipeline import make_plan
    return make_plan(jaxpr, target, options, boundary)


def _may_be_kept(jaxpr: Jaxpr, options: FuseOptions) -> bool:
    """Does a plan depend on nothing but what the key has? Proofs are made each time; scopes are no part of the key."""
    asked = options.strict or options.verify is not None or options.tiles or options.schedule or options.exclude
    return not (
        os.environ.get(_SWITCH) == "0" or asked or jaxpr.effects or _compat.has_symbolic_shapes(jaxpr)
    )  # fmt: skip


def _identity(flat: Jaxpr, target: Target, options: FuseOptions) -> Identity:
    asked = [left_function(e.params.get("name")) is not None for e in flat.eqns]
    around = (_compat.argument_names(flat), [n for n, left in enumerate(asked) if left], jax.config.jax_enable_x64)
    return {
        **versions(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "of": "plan",
        "program": digest((*flat.constvars, *flat.invars), map(_without_bodies, flat.eqns), flat.outvars),
        "names": hashlib.sha256(repr(around).encode()).hexdigest()[:32],
        "target": f"{target.name} {hashlib.sha256(repr(_ordered(target)).encode()).hexdigest()[:32]}",
        "options": repr(options),
    }


def _without_bodies(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation without the bodies of its loop or its branches: a plan leaves them as they are, so that programs that
    differ in nothing else share it, with kernels in their bodies or without."""
    if eqn.primitive.name not in WITH_BODIES:
        return eqn
    return _compat.with_params(eqn, {k: v for k, v in eqn.params.items() if not _has_bodies(v)})


def _has_bodies(value: Any) -> bool:
    several = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(getattr(v, "jaxpr", v), Jaxpr) for v in several)


def _ordered(target: Target) -> list[Any]:
    """The fields of a target as text that is the same in every process: sets have no order."""
    values = [getattr(target, f.name) for f in fields(target)]
    return [sorted(v) if isinstance(v, frozenset) else v for v in values]


# --- writing


def _written(plan: Plan) -> Record | None:
    """The record of a plan; None where it cannot be written, or is not of the program as it is written, in names that all share."""
    with IMPORTS:
        from pallasfuse.pipeline import kernel_of

    apart = plan.converted.whole is not None and not plan.rewritings  # axes or terms
    if apart or any(k.original is None for k in plan.kernels):
        return None
    whole: dict[tuple[Original, Price], int] = {}
    kernels = []
    try:
        forms: list[Kernel] = []
        used: list[list[str]] = []
        for kernel in plan.kernels:
            assert kernel.original is not None
            key = kernel.original, kernel.replaced
            if key not in whole:
                whole[key] = len(forms)
                forms.append(kernel_of(kernel.original.group, kernel.original.placed, kernel.replaced))
                text = json.dumps(encode(forms[-1], _CLASSES, _names_of(plan.target)), ensure_ascii=False)
                used.append(sorted(set(_TOKEN.findall(text))))
            kernels.append([whole[key], {t: _stands_for(t, kernel.names) for t in used[whole[key]]}])
        nodes = encode(tuple(forms), _CLASSES, _names_of(plan.target))
    except (EncodingError, KeyError):
        return None
    content = {
        "joined": plan.converted.unjoined is not None,
        "leaves_reshapes": plan.converted.leaves_reshapes,
        "found_share": plan.target.device.found_share,
        "nodes": nodes,
        "kernels": kernels,
        "left": [[left.name, left.reason] for left in plan.grouping.left],
        "conditions": list(plan.own_conditions),
        "exceptions": list(plan.own_exceptions),
        "outdoes": plan.outdoes,
        "stored_beside": sorted(plan.stored_beside),
        "rewritings": encode(_without_lines(plan.rewritings), _CLASSES, {}),
    }
    return {"plan": content, "sum": _sum(content)}


def _without_lines(rewritings: tuple[Rewriting, ...]) -> tuple[Rewriting, ...]:
    """The rewritings of a plan without their source lines, which change when the user edits the file."""
    return tuple(
        replace(r, nests=tuple(replace(n, source=Source()) for n in r.nests), old=tuple(replace(n, source=Source()) for n in r.old))
        for r in rewritings
    )  # fmt: skip


def _stands_for(token: str, names: Mapping[str, str]) -> str:
    """Returns what a record keeps of a token: a name, or for a source line the tensor that is defined there. Lines move."""
    return names[token.replace(_SOURCE, "«t")] if token.startswith(_SOURCE) else names[token]


def _sum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _names_of(target: Target) -> dict[str, Target]:
    """The target and those that stand in for it, by their names: a record never says what a target is."""
    found: dict[str, Target] = {}
    other: Target | None = target
    while other is not None:
        found[other.name] = other
        other = other.fallback
    return found


# --- reading


class _Kept(Kernel):
    """A kernel of a record. What is not needed to run it gets its own names when it is asked for."""

    def __init__(self, whole: Kernel, original: Original, names: Mapping[str, str]) -> None:
        for name, value in (("original", original), ("names", names), ("_whole", whole)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(name)
        value = restored(getattr(self._whole, name), self.names)
        object.__setattr__(self, name, value)
        return value

    __class__ = property(lambda self: Kernel)  # type: ignore[assignment]  # what `==` compares and `dataclasses.replace` makes

    def __reduce__(self) -> tuple[type[Kernel], tuple[Any, ...]]:
        return Kernel, tuple(getattr(self, f.name) for f in fields(Kernel))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.names[name] for name in self._whole.reads)

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(self.names[nest.name] for nest in self._whole.group.outputs)

    @property
    def reductions(self) -> tuple[str, ...]:
        return tuple(self.names[name] for name in self._whole.reductions if name in self.names)


_FIELDS = frozenset(f.name for f in fields(Kernel))


class _Names(Mapping[str, str]):
    """The names that canonical ones stand for; source lines are looked up in the jaxpr, when they are asked for."""

    def __init__(self, given: Mapping[str, str], lines: Later[Mapping[str, str]]) -> None:
        self._given, self._lines = given, lines

    def __getitem__(self, token: str) -> str:
        name = self._given[token]
        if not token.startswith(_SOURCE):
            return name
        lines = self._lines.value
        return lines[name] if name in lines else lines[operation_of(name) or name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(self),)


def _read(record: Record, jaxpr: Jaxpr, flat: Jaxpr, target: Target, options: FuseOptions) -> Plan:
    """The plan of a record.

    Raises:
      EncodingError, KeyError and others: the record is damaged, or is not of this program.
    """
    content = record["plan"]
    if record["sum"] != _sum(content):
        raise EncodingError("its sum is not that of its contents")
    target = target.on(replace(target.device, found_share=content["found_share"]))
    rewritings = decode(content["rewritings"], _CLASSES, {})
    converted = _converted(jaxpr, flat)
    if rewritings:
        converted = _rewritten(converted, rewritings, mixed=target.platform == "gpu")
    if content["joined"]:
        converted = _joined(converted, leaves_reshapes=content["leaves_reshapes"])
    lines: Later[Mapping[str, str]] = Later(lambda: dict(_lines(converted)))
    whole = decode(content["nodes"], _CLASSES, _names_of(target))
    originals = [_original(kernel) for kernel in whole]
    kernels = tuple(_Kept(whole[n], originals[n], _Names(names, lines)) for n, names in content["kernels"])
    for kernel in kernels:
        _refuse_others(kernel, converted.variable)
    steps = tuple(steps_of(converted, kernels))
    stored_beside = frozenset(content["stored_beside"])
    if not stored_beside <= converted.variable.keys():
        raise EncodingError("a tensor that XLA is to store is not in the program")

    def grouping() -> Grouping:
        left = (Left(name, reason, Source(lines.value.get(name, ""))) for name, reason in content["left"])
        return Grouping(tuple(k.group for k in kernels), tuple(left), tuple(k.replaced for k in kernels))

    grouped = Later(grouping)
    left = Later(lambda: tuple(fallbacks_of(converted, grouped.value, steps, options)))
    conditions, exceptions = tuple(content["conditions"]), tuple(content["exceptions"])
    return Plan(
        converted, target, grouped, kernels, left, conditions, exceptions, steps, options, rewritings=rewritings,
        outdoes=content["outdoes"], stored_beside=stored_beside,
    )  # fmt: skip


def _rewritten(converted: Converted, rewritings: tuple[Rewriting, ...], *, mixed: bool) -> Converted:
    """The program in the form that a plan is of.

    Raises:
      EncodingError: the program has none of that form.
    """
    axes = {t.name: t.axes for r in rewritings for t in r.leaves}
    found = rewritten(
        converted.original, converted.jaxpr, converted.variable, [r.nests for r in rewritings], axes, axes, _program, mixed=mixed
    )  # fmt: skip
    if found is None:
        raise EncodingError("its sums and products are not those of the program")
    return found


def _joined(converted: Converted, *, leaves_reshapes: bool) -> Converted:
    """The program with neighbouring axes as one, made when it is asked for."""

    def program() -> LoopProgram:
        with IMPORTS:
            from pallasfuse.fusion.joined_axes import with_joined_axes
        found = with_joined_axes(converted.program, leaves_reshapes=leaves_reshapes)
        assert found is not None
        return found

    return converted.joined(Later(program), leaves_reshapes=leaves_reshapes)


def _program(flat: Jaxpr, names: Mapping[Var, str]) -> Later[LoopProgram]:
    """The loop program of a flat jaxpr, made when it is asked for."""

    def program() -> LoopProgram:
        with IMPORTS:
            from pallasfuse.jaxpr_frontend.conversion import program_of
        return program_of(flat, names, ())

    return Later(program)


def _converted(jaxpr: Jaxpr, flat: Jaxpr) -> Converted:
    """A jaxpr that was flattened already; its loop program is made when it is asked for."""
    names = tensor_names(flat)
    return of_flat(jaxpr, flat, names, _program(flat, names))


def _original(kernel: Kernel) -> Original:
    if not isinstance(kernel, Kernel):
        raise EncodingError("it has something else among its kernels")
    for phase in (*kernel.phases, *(phase for rival in kernel.rivals for phase in rival.phases)):
        verify(phase.program)
    return Original(kernel.group, Placed(kernel.schedule, kernel.phases, kernel.declined, rivals=kernel.rivals))


def _refuse_others(kernel: _Kept, variable: Mapping[str, Var]) -> None:
    """Raises an error where a kernel reads or stores what the program has not, or has otherwise."""
    group, phases = kernel._whole.group, kernel._whole.phases
    tensors = {t.name: t for p in phases for t in (*p.program.given, *p.program.outputs)}
    ours = (*kernel._whole.reads, *(nest.name for nest in group.outputs))
    for name, own in zip(ours, (*kernel.reads, *kernel.stores), strict=True):
        var = variable[own]
        size = 1
        for axis in tensors[name].axes if name in tensors else ():
            size *= axis.extent
        if name in tensors and (size != _size(var) or tensors[name].dtype != str(_compat.dtype_of(var))):
            raise EncodingError(f"{own} is of another shape or type")


def _size(var: Var) -> int:
    size = 1
    for length in _compat.shape_of(var):
        size *= length
    return size


def _lines(converted: Converted) -> Iterator[tuple[str, str]]:
    """The source line of every tensor that an equation defines."""
    name_of = {var: name for name, var in converted.variable.items()}
    for eqn in converted.jaxpr.eqns:
        summary = _compat.source_summary(eqn)
        for var in eqn.outvars:
            yield name_of[var], summary
