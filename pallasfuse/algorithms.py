"""Algorithms of products that a CPU does not have, asked for in another way that gives the same numbers.

A library may ask for an algorithm first, and without it where that fails, operation by operation. Once its function is traced, all
that is left of this is the algorithm.
"""

from typing import Any

from jax.lax import DotAlgorithmPreset

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn


def for_platform(jaxpr: Jaxpr, platform: str) -> Jaxpr:
    """Returns the jaxpr with products that its platform has; itself where they all are.

    On a CPU, float16 operands summed in float32 (`DotAlgorithmPreset.F16_F16_F32`) are what the default precision does when the
    result is float32: each product is exact there. Any other algorithm that is missing stays, for JAX to refuse.
    """
    return _rebuilt(jaxpr) if platform == "cpu" else jaxpr


def _rebuilt(jaxpr: Jaxpr) -> Jaxpr:
    eqns = [_rebuilt_equation(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return _compat.replace_jaxpr(jaxpr, jaxpr.constvars, jaxpr.consts, eqns, jaxpr.outvars)


def _rebuilt_equation(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive.name == "dot_general":
        return eqn.replace(params=eqn.params | {"precision": None}) if _is_exact_anyway(eqn) else eqn
    params = {name: _rebuilt_parameter(value) for name, value in eqn.params.items()}
    unchanged = all(params[name] is value for name, value in eqn.params.items())
    return eqn if unchanged else eqn.replace(params=params)


def _rebuilt_parameter(value: Any) -> Any:
    if isinstance(value, Jaxpr):
        return _rebuilt(value)
    if isinstance(value, list | tuple) and any(isinstance(v, Jaxpr) for v in value):
        rebuilt = [_rebuilt_parameter(v) for v in value]
        same = all(new is old for new, old in zip(rebuilt, value, strict=True))
        return value if same else type(value)(rebuilt)
    return value


def _is_exact_anyway(eqn: JaxprEqn) -> bool:
    """Says whether the default precision does what is asked for, or, with an operand of float32 (as derivatives have), more."""
    operands, results = ({_compat.dtype_of(a).name for a in atoms} for atoms in (eqn.invars, eqn.outvars))
    asked = eqn.params.get("precision") == DotAlgorithmPreset.F16_F16_F32
    return asked and operands <= {"float16", "float32"} and results == {"float32"}
