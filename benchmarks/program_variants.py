"""The ways to run a program: `jax.jit`, fused by price alone, checked on a clock, tuned. Each is compiled, or says why not.

Checks and tuning keep what they find in a folder of their own for every run, so that nothing is known from before.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import pallasfuse as pf
from benchmarks.program_timing import Contender, reason_of
from benchmarks.workloads.registry import Built, Random, draw

Row = dict[str, Any]
Fuse = Callable[[Callable[..., Any]], Any]

TUNE_S = 3.0
"""The seconds that tuning one program may take, unless the user says otherwise."""
_LIMITS = ("seconds", "budget_s", "limit_s", "time_s", "timeout_s")
"""Names that `pf.tune` may have for its time limit."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a program: compiled, or the reason why it is not."""

    label: str
    call: Any = None
    temporary_bytes: int | None = None
    lower_s: float = 0.0
    compile_s: float = 0.0
    reason: str = ""
    entry: str = ""
    """The entry computation of the optimised HLO: what is launched, with shapes."""
    lowered: str = ""
    """A hash of what is compiled: equal for equal programs."""
    optimised: str = ""
    """A hash of what the compiler makes of it, whatever its instructions are called."""
    same_as: str = ""
    """The label of an equal variant, which is measured for both."""

    @property
    def row(self) -> Row:
        found: Row = {"temporary_bytes": self.temporary_bytes, "compile_s": round(self.compile_s, 3)}
        found |= {"lower_s": round(self.lower_s, 4)} if self.lower_s else {}
        found |= {"same_as": self.same_as} if self.same_as else {}
        return found

    def again(self, label: str, lower_s: float) -> "Variant":
        """Another variant that is the same program."""
        return dataclasses.replace(
            self, label=label, lower_s=lower_s, compile_s=0.0, entry="", same_as=self.same_as or self.label
        )

    @property
    def contender(self) -> Contender:
        return Contender(self.call, self.reason)


def compiled(label: str, lower: Callable[[], Any], known: Sequence[Variant] = (), *, entry: bool = False) -> Variant:
    """The variant that `lower` lowers. known: variants whose executable is taken where it is the same program.

    entry: keep the HLO.
    """
    begin = middle = time.perf_counter()
    try:
        module = lower()
        middle = time.perf_counter()
        before = _hash(module.as_text())
        for other in known:
            if other.call is not None and other.lowered == before:
                return other.again(label, middle - begin)
        executable = module.compile()
    except Exception as failure:  # any program may fail in any way: the row says how
        return Variant(label, reason=reason_of(failure), compile_s=time.perf_counter() - begin)
    compile_s = time.perf_counter() - middle
    after = fingerprint(executable)
    for other in known:
        if after and other.optimised == after:
            return dataclasses.replace(other.again(label, middle - begin), compile_s=compile_s)
    try:
        temporary = int(executable.memory_analysis().temp_size_in_bytes)
    except Exception:
        temporary = None
    text = entry_text(executable) if entry else ""
    return Variant(label, executable, temporary, middle - begin, compile_s, entry=text, lowered=before, optimised=after)


_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)$")
"""Headings of the tables of source lines in a module's text, whose lines begin with a number."""


def fingerprint(executable: Any) -> str:
    """Returns a key that is equal for executables of one optimised HLO, whatever its modules, computations and instructions are
    called; '' if unknown."""
    try:
        lines = str(executable.as_text()).splitlines()
    except Exception:
        return ""
    text = "\n".join(x for x in lines if x and not x[0].isdigit() and not _TABLE.match(x))
    names: dict[str, str] = {}
    text = re.sub(r", metadata=\{[^}]*\}|^HloModule [^,]*|[\w.\-]+(?=: [a-z]\w*\[)", "", text, flags=re.MULTILINE)
    text = _without_constants(text)
    return _hash(re.sub(r"%[\w.\-]+", lambda m: names.setdefault(m.group(), f"%{len(names)}"), text))


def _without_constants(text: str) -> str:
    """Returns HLO with constants where they are used: in a schedule their own places mean nothing."""
    kept, values = [], {}
    for line in text.splitlines():
        constant = re.fullmatch(r"\s*(%[\w.\-]+) = (\S+ constant\(.*\))", line)
        if constant:
            values[constant[1]] = constant[2]
        else:
            kept.append(re.sub(r"%[\w.\-]+", lambda m: values.get(m.group(), m.group()), line))
    return "\n".join(kept)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def entry_text(executable: Any) -> str:
    """The entry computation of the optimised HLO, without metadata and the settings of backends."""
    try:
        _, _, text = str(executable.as_text()).partition("\nENTRY ")
    except Exception:
        return ""
    lines = [re.sub(r", (metadata|backend_config|frontend_attributes)=\{.*", "", x.strip()) for x in text.splitlines()]
    return "\n".join(x for x in lines if " = " in x)[:20_000]


def lowered(function: Callable[..., Any], structs: tuple[Any, ...]) -> Any:
    """A function of the leaves of its arguments, lowered."""
    leaves, tree = jax.tree.flatten(structs)
    return jax.jit(lambda *flat: function(*jax.tree.unflatten(tree, flat))).lower(*leaves)


def whole(built: Built, fuse: Fuse) -> Callable[..., Any]:
    """The program with every step fused."""
    return fuse(built.function) if built.fused is None else built.fused(fuse)


def step(built: Built) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function that is fused inside a program, and its arguments as shapes and types."""
    return (built.function, built.structs) if built.step is None else (built.step[0], built.step_structs)


def fuse_with(target: str | None, *, check: bool, **options: Any) -> Fuse:
    """`pf.fuse` for a target, with or without the check on the clock, also where this version has none."""
    fields: dict[str, Any] = {"check": check} if has_check() else {}
    return functools.partial(pf.fuse, options=pf.FuseOptions(target=target, **fields, **options))


def has_check() -> bool:
    """This version checks plans on a clock."""
    return any(f.name == "check" for f in dataclasses.fields(pf.FuseOptions))


def has_tune() -> bool:
    """This version can tune."""
    return hasattr(pf, "tune")


@contextlib.contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Keeps in a folder what is found out on a clock, and looks for it only there."""
    before = os.environ.get("PALLASFUSE_CACHE_DIR")
    os.environ["PALLASFUSE_CACHE_DIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["PALLASFUSE_CACHE_DIR"]
        else:
            os.environ["PALLASFUSE_CACHE_DIR"] = before


def prime(built: Built, target: str | None, folder: str) -> None:
    """Check once beside other processes, for the compiler's cache only: what the clock says meanwhile is thrown away."""
    if has_check():
        with cache_in(folder), contextlib.suppress(Exception):
            lowered(whole(built, fuse_with(target, check=True)), built.structs)


def checked(built: Built, target: str | None, folder: str, known: Sequence[Variant]) -> tuple[Variant, Row]:
    """The program as a user's first call compiles it, checked on the device at hand, and what the check said."""
    fuse = fuse_with(target, check=True)
    with cache_in(folder):
        variant = compiled("checked", lambda: lowered(whole(built, fuse), built.structs), known)
        return variant, _verdicts(fuse, built)


def _verdicts(fuse: Fuse, built: Built) -> Row:
    function, structs = step(built)
    try:
        plan = fuse(function).explain(*structs)
    except Exception as failure:
        return {"verdicts": [reason_of(failure)]}
    verdicts = getattr(plan, "verdicts", ())
    return {"kernels_kept": len(plan.kernels), "verdicts": [str(v) for v in verdicts][:20]}


def tuned(
    built: Built, target: str | None, folder: str, known: Sequence[Variant], limit_s: float
) -> tuple[Variant, Row]:
    """The program after `pf.tune`, and how long that took."""
    fuse = fuse_with(target, check=True)
    function, _ = step(built)
    arguments = built.arrays() if built.step is None else _drawn(built.step[1])
    start = time.perf_counter()
    with cache_in(folder):
        try:
            parameters = inspect.signature(pf.tune).parameters
            limit = {n: limit_s for n in _LIMITS if n in parameters}
            pf.tune(fuse(function), *arguments, **limit)
        except Exception as failure:
            return Variant("tuned", reason=reason_of(failure)), {}
        seconds = time.perf_counter() - start
        del arguments
        variant = compiled("tuned", lambda: lowered(whole(built, fuse), built.structs), known)
    return variant, {"tune_s": round(seconds, 2)}


def _drawn(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, Random))
    drawn: tuple[Any, ...] = jax.tree.unflatten(tree, [draw(r, 7919 * n) for n, r in enumerate(leaves)])
    return drawn
