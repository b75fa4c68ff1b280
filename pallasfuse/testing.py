"""Assertions for the tests of programs that use fused functions. They are built on chex (`pip install 'pallasfuse[test]'`); see
docs/testing.md."""

import functools
import unittest
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallasfuse._compat import Jaxpr
from pallasfuse._compat import Literal as JaxprLiteral

try:
    import chex
except ImportError as error:
    raise ImportError("pallasfuse.testing is built on chex, which is not installed: pip install 'pallasfuse[test]', or "
                      "pip install chex") from error  # fmt: skip

from pallasfuse.jaxpr_frontend import PLAIN_CALLS, bodies, flatten, fused_calls
from pallasfuse.overrides import overridden
from pallasfuse.pipeline import prove_plan
from pallasfuse.plan import Kernel, Plan
from pallasfuse.primitive_names import FUSED_CALL
from pallasfuse.steps import kernels_behind
from pallasfuse.tolerance import Array, PlainResults, Tolerance, as_array, wide
from pallasfuse.variants import NAMES, Options, Variant, VariedCall, chosen, name_of

VARIANTS = NAMES
_SHOWN = 5
"""So many outputs that differ are described in a message."""


def assert_equivalent(
    fn: Callable[..., Any],
    *args: Any,
    variants: Variant | Iterable[Variant] | None = None,
    options: Options = None,
    rtol: float | None = None,
    atol: float | None = None,
    prove: bool = True,
    **kwargs: Any,
) -> None:
    """Assert that a function computes the same fused and plain, in several variants of running it.

    Args:
      fn: a function from `pallasfuse.fuse`; or one that calls some, whose plain version calls their plain functions; or any other,
        which is fused here.
      *args, **kwargs: as for a call: arrays, or `jax.ShapeDtypeStruct`s, for which values are drawn.
      variants: names from `VARIANTS`, or functions that take a function and return one with the same results, as `self.variant`
        of `chex.variants` does; one or several. None: every named variant that the plain function and the devices at hand allow.
      options: None: the function's own, but every kernel that can be derived runs, whether it is faster or not; 'own': what runs
        is what users run, priced and timed; or the `FuseOptions` to use.
      rtol, atol: compare with these, as `chex.assert_trees_all_close`, instead of with a tolerance that is derived for every output
        from the plain function's own error against float64 (`pallasfuse.tolerance`).
      prove: test the plan over finite fields as well, as `pallasfuse.verify` does. What that does not cover is no failure.

    Raises:
      AssertionError: an output differs, in shape, type or value, or the proof found a counterexample. The message names the
        variant, the output's place, the kernels that computed it, the largest error and what is allowed.
      ValueError: there is no such variant, the plain function does not allow it, or no tolerance can be derived.
      TypeError: an argument that is not static is no array.
      TraceError: the function cannot be traced with these arguments.
      unittest.SkipTest: the only variant is 'sharded', and there is one device.
    """
    wanted = chosen(variants)
    comparison = _Comparison(VariedCall(fn, args, kwargs, options), options, rtol, atol)
    for variant in wanted:
        reason = comparison.call.unusable(variant)
        if not reason:
            comparison.check(variant)
        elif wanted == ("sharded",):
            raise unittest.SkipTest(f"variant 'sharded': {reason}")
        elif variants is not None and variant != "sharded":
            raise ValueError(f"{comparison.call.name} has no variant {name_of(variant)!r}: {reason}")
    if prove:
        comparison.prove()


def equivalence(
    fn: Callable[..., Any],
    *,
    variants: str | Sequence[str] = VARIANTS,
    options: Options = None,
    rtol: float | None = None,
    atol: float | None = None,
    prove: bool = True,
) -> Callable[[Callable[[], Any]], type[chex.TestCase]]:
    """Turns a function that returns arguments of `fn`, as a tuple, into a class of tests: one for each variant, one for the proof.

    ```
    @equivalence(model)
    def TestModel():
        return q, k, v
    ```

    The class is a `chex.TestCase`, which pytest, unittest and absl run. A variant that the plain function or the devices at hand do
    not allow is skipped. Parameters are those of `assert_equivalent`.
    """
    wanted = chosen(variants)

    def decorate(arguments: Callable[[], Any]) -> type[chex.TestCase]:
        @functools.cache
        def comparison() -> _Comparison:
            made = arguments()
            call = VariedCall(fn, made if isinstance(made, tuple) else (made,), {}, options)
            return _Comparison(call, options, rtol, atol)

        def test_of(variant: Variant) -> Callable[[Any], None]:
            def test(self: unittest.TestCase) -> None:
                if reason := comparison().call.unusable(variant):
                    self.skipTest(reason)
                comparison().check(variant)

            return test

        body: dict[str, Any] = {f"test_{name_of(v)}": test_of(v) for v in wanted}
        if prove:
            body["test_proof"] = lambda self: comparison().prove()
        body |= {"__module__": arguments.__module__, "__doc__": arguments.__doc__}
        return type(arguments.__name__, (chex.TestCase,), body)

    return decorate


@dataclass(frozen=True)
class _Difference:
    """Says how an output differs by more than is allowed."""

    text: str
    is_special: bool
    """The plain result or the fused one is NaN or infinite there."""


class _Comparison:
    """The checks of one call."""

    def __init__(self, call: VariedCall, options: Options, rtol: float | None, atol: float | None) -> None:
        self.call = call
        given = rtol is not None or atol is not None
        self.given = Tolerance(rtol or 0.0, atol or 0.0, "as given") if given else None
        if options is None and not any(plan.fuses for plan in call.plans):
            warnings.warn(f"{call.name}: no kernel was derived, so that nothing is tested: print(pallasfuse.fuse(...)"
                          ".explain(...)) says why", stacklevel=3)  # fmt: skip

    def check(self, variant: Variant) -> None:
        """Run a variant, and compare it with the plain function."""
        name, call, run = name_of(variant), self.call, self.call.variant(variant)
        try:
            with overridden(call.override), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*differentiating a fused function")
                ours = jax.tree.map(as_array, run.function(*run.leaves))
        except Exception as error:
            error.add_note(f"pallasfuse.testing: while {call.name} ran fused, in variant {name!r}")
            raise
        expected = run.expected()
        heading = f"{call.name}, fused, in variant {name!r}, differs from the plain function"
        try:
            chex.assert_trees_all_equal_shapes_and_dtypes(ours, expected.tree)
        except AssertionError as error:
            raise AssertionError(f"{heading} in the shapes or types of its outputs: {error}") from None
        found = [self._difference(expected, n, x) for n, x in enumerate(jax.tree.leaves(ours))]
        wrong = {n: difference for n, difference in enumerate(found) if difference is not None}
        if not wrong:
            return
        jaxpr = call.traced(run.function, run.leaves)
        lines = [f"{heading} in {len(wrong)} of {len(found)} outputs."]
        for n, difference in list(wrong.items())[:_SHOWN]:
            place = f"output{expected.paths[n]}" if expected.paths[n] else "the output"
            kernels = list({k.name: k for k in _kernels_of(jaxpr, n)}.values())
            by = ", ".join(map(_described, kernels)) or "XLA alone: no kernel takes part in it"
            lines += [f"{place}: {difference.text}", f"  computed by {by}"]
        proofs = [
            f"the proof finds a counterexample, too: {c}"
            for w in call.plans
            for p in w.all()
            if (c := _counterexample(p))
        ]
        exceptions = dict.fromkeys(e for p in call.plans for e in p.exceptions)
        if exceptions and any(d.is_special for d in wrong.values()):
            proofs += ["the plan has exceptions, of which this may be one; FuseOptions(strict=True) has none:"]
            proofs += [f"  {e}" for e in exceptions]
        raise AssertionError("\n".join([*lines, *proofs, _NEXT]))

    def _difference(self, expected: PlainResults, n: int, ours: Array) -> _Difference | None:
        plain = expected.leaves[n]
        tolerance = self.given or expected.tolerance(n)
        if _is_close(ours, plain, tolerance):
            return None
        if self.given is None:
            ours = np.where(expected.explained(n, ours, tolerance), plain, ours).astype(plain.dtype)
            if _is_close(ours, plain, tolerance):
                return None
        return _largest(ours, plain, tolerance)

    def prove(self) -> None:
        """Test the plans over finite fields."""
        for plan in (p for whole in self.call.plans for p in whole.all()):
            if (found := _counterexample(plan)) is not None:
                lines = [f"{self.call.name} is not what it was before it was fused: the proof finds a counterexample: {found}",
                         f"  the plan has {', '.join(map(_described, plan.kernels))}"]  # fmt: skip
                raise AssertionError("\n".join([*lines, _NEXT]))


_NEXT = """next: for the fused function f, print(pallasfuse.verify(f, *args)) tests every stage of its derivation,
print(f.explain(*args)) shows its kernels, and FuseOptions(target='interpret') runs them in the interpreter of Pallas.
This is a bug in pallasfuse, unless a tolerance was given that is too small: please report it. Without fuse, the function
computes what it says."""


def _counterexample(plan: Plan) -> Any:
    return prove_plan(plan).counterexample if plan.kernels else None


def _is_close(ours: Array, plain: Array, tolerance: Tolerance) -> bool:
    try:
        if tolerance.rtol or tolerance.atol:
            chex.assert_trees_all_close(wide(ours), wide(plain), rtol=tolerance.rtol, atol=tolerance.atol)
        else:
            chex.assert_trees_all_equal(wide(ours), wide(plain))
    except AssertionError:
        return False
    return True


def _largest(ours: Array, plain: Array, tolerance: Tolerance) -> _Difference:
    """Describes the element that differs most."""
    a, b = ours.astype(np.float64), plain.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (ours == plain) | (np.isnan(a) & np.isnan(b))
        apart = np.where(same, 0.0, np.abs(a - b))
        apart = np.where(np.isnan(apart), np.inf, apart)
    beyond = ~same & (apart >= tolerance.atol + tolerance.rtol * np.where(np.isfinite(b), np.abs(b), 0))
    at = np.unravel_index(int(np.argmax(np.where(beyond, apart, -1))), apart.shape)
    place = f" at [{', '.join(map(str, at))}]" if at else ""
    relative = f" + {tolerance.rtol:.3g} of the plain value" if tolerance.rtol else ""
    text = (f"the largest error is {apart[at]:.3g}{place}: fused {ours[at]}, plain {plain[at]}; wrong are "
            f"{int(beyond.sum())} of {beyond.size} elements\n  allowed is {tolerance.atol:.3g}{relative}: "
            f"{tolerance.origin}")  # fmt: skip
    return _Difference(text, not (np.isfinite(a[at]) and np.isfinite(b[at])))


def _described(kernel: Kernel) -> str:
    lines = dict.fromkeys(str(f.nest.source) for f in kernel.group.folds)
    return f"kernel {kernel.name} ({kernel.target.name}; {', '.join(lines)})"


def _kernels_of(jaxpr: Jaxpr, result: int) -> list[Kernel]:
    """The kernels that a result of a jaxpr with fused calls is computed by, the last one first."""
    flat = flatten(jaxpr, PLAIN_CALLS)
    made = {v: (eqn, n) for eqn in flat.eqns for n, v in enumerate(eqn.outvars)}
    wanted: list[Any] = [flat.outvars[result]]
    seen: set[Any] = set()
    found: list[Kernel] = []
    while wanted:
        atom = wanted.pop(0)
        if isinstance(atom, JaxprLiteral) or atom in seen or atom not in made:
            continue
        seen.add(atom)
        eqn, n = made[atom]
        wanted += eqn.invars
        if eqn.primitive.name == FUSED_CALL:
            found += kernels_behind(eqn.params["call"].plan_here(), n)
        for body in bodies(eqn):
            if len(body.outvars) == len(eqn.outvars):
                found += _kernels_of(body, n)
            else:
                found += [k for call in fused_calls(body) for p in call.plan_here().all() for k in p.kernels]
    return found
