"""The part of a program that one kernel computes, as XLA would compute it, and a name by which equal parts are known as equal."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.ir.fold import Group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tree import Tree, renamed
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.plan import Kernel
from pallasfuse.targets import Target

CHOICE = "cond"
"""The operation that runs one of several branches. Programs that differ in these are not timed on drawn arguments: they take one
branch, which says nothing of the others."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_AXIS_NAME = re.compile(r"name='([^']*)'")
_UNSEEN = frozenset({"name", "debug_info", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "ctx_mesh"})
"""Parameters of equations that change nothing of what is computed."""


@dataclass(frozen=True, eq=False)
class Part:
    """Equations of a jaxpr, in their order, from the inputs of a kernel to its outputs. `names` are the kernel's own for them."""

    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    input_names: tuple[str | None, ...]
    """None for what the equations read and the kernel does not."""

    def run(self, *arrays: Any) -> list[Any]:
        """The outputs, computed equation by equation."""
        values: dict[Var, Any] = dict(zip(self.inputs, arrays, strict=True))
        for eqn in self.equations:
            found = _compat.bind(eqn, [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars])
            values.update(zip(eqn.outvars, found, strict=True))
        return [values[v] for v in self.outputs]

    @property
    def key(self) -> str:
        """A hash of the operations, shapes and types, the same for equal parts of a program, however their variables are called."""
        return digest(self.inputs, self.equations, self.outputs)


def way(group: Group, schedule: Schedule, target: Target) -> str:
    """Returns text that says how a kernel runs, the same for equal kernels.

    Axes and nests are numbered, because their names are the program's.
    """
    if schedule.tree:
        schedule = replace(schedule, tree=_numbered(group, schedule.tree))
    number = {a.name: str(n) for n, a in enumerate((*group.parallel, group.rolled))}
    text = _AXIS_NAME.sub(lambda found: f"name={number.get(found[1], found[1])}", repr(schedule))
    return f"{target.name}: {text}"


def _numbered(group: Group, tree: Tree) -> Tree:
    """The tree with numbers for names, in the order in which the group has them."""
    nests = group.nests
    axes = dict.fromkeys(
        a.name for a in (*group.parallel, group.rolled, *(a for n in nests for a in (*n.axes, *n.reduced)))
    )
    numbers = {name: f"a{n}" for n, name in enumerate(axes)}
    named = {name: f"n{n}" for n, name in enumerate(dict.fromkeys(n.name for n in nests))}
    kept = named | {name: f"t{n}" for n, name in enumerate(group.inputs)}
    return tuple(replace(k, name=f"k{n}") for n, k in enumerate(renamed(tree, numbers, named, kept)))


def way_of_kernel(kernel: Kernel) -> str:
    """Returns `way` of a kernel of a plan: equal ones have one text, which is made of what they have in common."""
    if kernel.original is None:
        return way(kernel.group, kernel.schedule, kernel.target)
    placed = kernel.original.placed
    return way(kernel.original.group, placed.schedule, placed.phases[0].target)


def primitives(jaxpr: Jaxpr) -> set[str]:
    """The names of all operations of a jaxpr, also inside others."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for inner in inside(eqn):
            found |= primitives(inner)
    return found


_UNTIMED = frozenset({"while", "pure_callback", "io_callback", "debug_callback", "infeed", "outfeed"})
"""A program with such operations is not run on drawn arguments: its loops might not end, its callbacks are the user's."""


def untimed(jaxpr: Jaxpr) -> list[str]:
    """Lists the operations of a program for which it is not run on drawn arguments, so that no clock sees it as a whole."""
    return sorted(primitives(jaxpr) & _UNTIMED)


def branches(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Yields the branches among which a program chooses as it runs, also those inside of others and of loops."""
    for eqn in jaxpr.eqns:
        for inner in inside(eqn):
            yield from (inner,) if eqn.primitive.name == CHOICE else ()
            yield from branches(inner)


def inside(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs inside of an equation, with that of a call which was fused itself."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, Jaxpr):
                yield inner
            elif isinstance(getattr(inner, "jaxpr", None), Jaxpr):
                yield inner.jaxpr


type Producers = Mapping[Var, tuple[int, JaxprEqn]]


def producers(converted: Converted) -> Producers:
    """The equation that defines each variable of the flat jaxpr, with its position."""
    return {v: (n, e) for n, e in enumerate(converted.jaxpr.eqns) for v in e.outvars}


def part_of(converted: Converted, kernel: Kernel, maker: Producers) -> Part:
    """Returns the equations that XLA would compute instead of a kernel: everything between its inputs and its outputs."""
    names = {converted.variable[n]: n for n in kernel.reads}
    outputs = tuple(converted.variable[n] for n in kernel.stores)
    chosen: dict[int, JaxprEqn] = {}
    others: dict[Var, None] = {}
    stack = [v for v in outputs if v not in names]
    while stack:
        variable = stack.pop()
        if variable not in maker:
            others[variable] = None
            continue
        number, eqn = maker[variable]
        if number not in chosen:
            chosen[number] = eqn
            stack.extend(v for v in eqn.invars if isinstance(v, Var) and v not in names)
    inputs = (*names, *others)
    return Part(tuple(chosen[n] for n in sorted(chosen)), inputs, outputs, (*names.values(), *(None for _ in others)))


def whole_key(jaxpr: Jaxpr) -> str:
    """A hash of a whole jaxpr, as `Part.key`; of its constants only the shapes count."""
    return digest((*jaxpr.constvars, *jaxpr.invars), jaxpr.eqns, jaxpr.outvars)


def digest(inputs: Iterable[Var], equations: Iterable[JaxprEqn], outputs: Iterable[Var | Literal]) -> str:
    """A hash of equations up to the names of their variables."""
    lines = _lines({}, inputs, equations, outputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _lines(
    numbers: dict[Var, int], inputs: Iterable[Var], equations: Iterable[JaxprEqn], outputs: Iterable[Var | Literal]
) -> list[str]:
    def seen(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{np.asarray(atom.val).tobytes().hex()}{_type(atom)}"
        return f"%{numbers.setdefault(atom, len(numbers))}"

    lines = [f"{seen(v)}{_type(v)}" for v in inputs]
    for eqn in equations:
        parameters = ",".join(f"{k}={_value(v)}" for k, v in sorted(eqn.params.items()) if k not in _UNSEEN)
        given = " ".join(map(seen, eqn.invars))
        made = " ".join(f"{seen(v)}{_type(v)}" for v in eqn.outvars)
        lines.append(f"{made}={eqn.primitive.name}[{parameters}]{given}")
    lines.append(" ".join(map(seen, outputs)))
    return lines


def _type(atom: Any) -> str:
    aval = atom.aval
    return f":{_name(aval.dtype)}{aval.shape}" if hasattr(aval, "shape") else f":{aval}"


@cache
def _name(dtype: Any) -> str:
    return str(dtype)


def _value(value: Any) -> str:
    """A parameter of an equation as text that does not depend on where in memory or under which name things live."""
    match value:
        case str() | int() | float() | None:
            return repr(value)
        case tuple() | list():
            return "(" + ",".join([_value(v) for v in value]) + ")"
        case np.dtype():
            return _name(value)
        case Jaxpr():
            return "{" + ";".join(_lines({}, (*value.constvars, *value.invars), value.eqns, value.outvars)) + "}"
        case Mapping():
            return "{" + ",".join(f"{k}:{_value(v)}" for k, v in value.items()) + "}"
        case np.ndarray():
            return f"{value.shape}{_name(value.dtype)}{hashlib.sha256(value.tobytes()).hexdigest()}"
    inner = getattr(value, "jaxpr", None)  # of a fused call inside another
    if isinstance(inner, Jaxpr):
        return _value(inner)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))
