"""Calls inlined, dead equations dropped: a jaxpr becomes one flat list of equations."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.affine_constants import as_operations
from pallasfuse.errors import Refusal
from pallasfuse.leaving import left_function
from pallasfuse.primitive_names import FUSED_CALL, PLATFORMS

type Atom = Var | Literal

PLAIN_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "core_closed_call"))
"""Calls that mean their body in every way."""
BATCHED_AS_BODY = PLAIN_CALLS | frozenset((
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", FUSED_CALL,
))  # fmt: skip
"""Calls that mean their body, also under `vmap`; some have derivatives of their own."""
SOLVER = "custom_linear_solve"
"""A call of what solves a linear system; how its derivative is found is written beside it."""
ALL_CALLS = BATCHED_AS_BODY | frozenset(("custom_vmap_call", SOLVER))
"""Calls that mean their body where no transformation is left to come."""
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


@dataclass(frozen=True, slots=True)
class _Frame:
    """A jaxpr that is being copied: what its variables stand for, and the call that it came from."""

    jaxpr: Jaxpr
    eqns: Iterator[JaxprEqn]
    env: dict[Var, Atom]
    call: JaxprEqn | None
    source: Any  # replaces the source of its equations, unless None
    scopes: Any  # around the call that it came from; None where it came from none


def flatten(jaxpr: Jaxpr, calls: Set[str] = ALL_CALLS) -> Jaxpr:
    """`jaxpr` with every call inlined and without dead equations; the constants of inner jaxprs become its own, and
    those that nothing uses are dropped. The arguments stay as they are. A choice that all platforms make alike is inlined, too.

    An equation keeps the source of its own line, unless it belongs to a function of JAX: then it has the call's. Its scopes
    are those of all calls around it. A call that `pallasfuse.leave` has marked stays a call.
    """
    constvars, consts = list(jaxpr.constvars), list(jaxpr.consts)
    by_identity = {id(value): var for var, value in zip(constvars, consts, strict=True)}

    def const_var(var: Var, value: Any) -> Var:
        if id(value) not in by_identity:
            by_identity[id(value)] = fresh = Var(var.aval)
            constvars.append(fresh)
            consts.append(value)
        return by_identity[id(value)]

    eqns: list[JaxprEqn] = []
    env: dict[Var, Atom] = {}
    stack = [_Frame(jaxpr, iter(jaxpr.eqns), env, None, None, None)]
    while stack:
        frame = stack[-1]
        eqn = next(frame.eqns, None)
        if eqn is None:
            stack.pop()
            if frame.call is not None:
                for outer, inner in zip(frame.call.outvars, frame.jaxpr.outvars, strict=True):
                    stack[-1].env[outer] = _resolve(frame.env, inner)
            continue
        atoms = [_resolve(frame.env, a) for a in eqn.invars]
        source = eqn.source_info if frame.source is None else frame.source
        source, scopes = _compat.inside_scopes(source, eqn, frame.scopes)
        body = _body(eqn, calls)
        if body is None and (body := _branch_of_all_platforms(eqn)) is not None:
            _, *atoms = atoms
        if body is None and eqn.primitive.name == SOLVER and SOLVER in calls:
            body, taken = _solver(eqn)
            atoms = [atoms[n] for n in taken]
        if body is not None:
            inner_env: dict[Var, Atom] = dict(zip(body.invars, atoms, strict=True))
            inner_env |= {v: const_var(v, c) for v, c in zip(body.constvars, body.consts, strict=True)}
            of_call = None if _compat.is_user_function(body) else source
            stack.append(_Frame(body, iter(body.eqns), inner_env, eqn, of_call, scopes))
            continue
        outvars = [Var(v.aval) for v in eqn.outvars] if frame.call is not None else _bound(eqn.outvars)
        for old, new in zip(eqn.outvars, outvars, strict=True):
            frame.env[old] = new
        eqns.append(eqn.replace(invars=atoms, outvars=outvars, source_info=source))
    results = [_resolve(env, a) for a in jaxpr.outvars]
    needed, used = live(eqns, results)
    kept = [(var, value) for var, value in zip(constvars, consts, strict=True) if var in used]
    computed = {var: made for var, value in kept if (made := as_operations(value)) is not None}
    needed = [*(e for var, made in computed.items() for e in _computing(var, made, needed)), *needed]
    kept = [(var, value) for var, value in kept if var not in computed]
    return _compat.replace_jaxpr(jaxpr, [v for v, _ in kept], [c for _, c in kept], needed, results)


def _computing(var: Var, operations: Jaxpr, users: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The operations that compute a variable, with the source of the first equation that reads it."""
    source = next((e.source_info for e in users if var in e.invars), None)
    names: dict[Any, Var] = {v: Var(v.aval) for e in operations.eqns for v in e.outvars} | {operations.outvars[0]: var}
    eqns = []
    for eqn in operations.eqns:
        invars = [a if isinstance(a, Literal) else names[a] for a in eqn.invars]
        outvars = [names[v] for v in eqn.outvars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=source or eqn.source_info))
    return eqns


def left_by_user(eqn: JaxprEqn, exclude: Sequence[str]) -> Refusal | None:
    """Returns why an equation is left to XLA, where the user asks for it; exclude: scopes, as of `FuseOptions`."""
    function = left_function(eqn.params.get("name"))
    if function is not None:
        return Refusal(f"pallasfuse.leave({function}) asks for XLA")
    scopes = f"/{_compat.scopes_of(eqn)}/" if exclude else ""
    found = next((name for name in exclude if f"/{name.strip('/')}/" in scopes), None)
    return None if found is None else Refusal(f"FuseOptions(exclude={found!r}) asks for XLA")


def fused_calls(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields the fused calls in a jaxpr and in its equations' bodies; those inside of another fused call are a part of its plan."""
    for eqn in jaxpr.eqns:
        if "call" in eqn.params and eqn.primitive.name == FUSED_CALL:
            yield eqn.params["call"]
        else:
            for body in bodies(eqn):
                yield from fused_calls(body)


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    values = eqn.params.values()
    return [j for v in values for j in (v if isinstance(v, list | tuple) else (v,)) if isinstance(j, Jaxpr)]


def with_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr], *, scoped: bool = False) -> JaxprEqn:
    """Returns an equation with its bodies changed; itself where `change` returns each of them as it is.

    scoped: bodies know that they are in the scopes around the equation, as JAX names scopes anew in each.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            inside = _compat.within_scopes_of(value, eqn) if scoped else value
            made = change(inside)
            return value if made is inside else made
        if isinstance(value, tuple | list) and any(isinstance(v, Jaxpr) for v in value):
            found = [changed(v) for v in value]
            same = all(new is old for new, old in zip(found, value, strict=True))
            return value if same else type(value)(found)
        return value

    params = {key: changed(value) for key, value in eqn.params.items()}
    same = all(params[key] is value for key, value in eqn.params.items())
    return eqn if same else _compat.with_params(eqn, params)


def called(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters, and that of a fused function."""
    inside = getattr(eqn.params.get("call"), "jaxpr", None)
    return [*bodies(eqn), *([inside] if isinstance(inside, Jaxpr) else [])]


def _body(eqn: JaxprEqn, calls: Set[str]) -> Jaxpr | None:
    if eqn.primitive.name not in calls or left_function(eqn.params.get("name")) is not None:
        return None
    if any(_compat.tracks_array_reference(e) for e in eqn.effects):
        return None
    bodies = [eqn.params.get(key) for key in _BODIES]
    bodies.append(getattr(eqn.params.get("call"), "jaxpr", None))  # a fused function inside a fused function
    body = next((b for b in bodies if isinstance(b, Jaxpr)), None)
    return body if body is not None and len(body.invars) == len(eqn.invars) else None


def _branch_of_all_platforms(eqn: JaxprEqn) -> Jaxpr | None:
    """Finds the branch that every platform takes, where platforms decide and none that programs are lowered for has its own."""
    named = eqn.params.get("branches_platforms")
    if named is None or any(p in PLATFORMS for platforms in named for p in platforms or ()):
        return None
    return next((b for b, p in zip(eqn.params["branches"], named, strict=True) if p is None), None)


def _solver(eqn: JaxprEqn) -> tuple[Jaxpr, list[int]]:
    """Returns what solves a linear system, and the numbers of the operands that it reads."""
    counts = eqn.params["const_lengths"]
    before = counts.matvec + counts.vecmat
    right_sides = range(before + counts.solve + counts.transpose_solve, len(eqn.invars))
    return eqn.params["jaxprs"].solve, [*range(before, before + counts.solve), *right_sides]


def _resolve(env: dict[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env.get(atom, atom)


def _bound(outvars: list[Var]) -> list[Var]:
    """Dropped outputs get a variable, so that each output of an equation has one."""
    return [v if type(v) is Var else Var(v.aval) for v in outvars]


def live(eqns: list[JaxprEqn], results: list[Atom]) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations and the variables that a result or an effect depends on."""
    used = {a for a in results if isinstance(a, Var)}
    live = []
    for eqn in reversed(eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            live.append(eqn)
            used.update(a for a in eqn.invars if isinstance(a, Var))
    return live[::-1], used
