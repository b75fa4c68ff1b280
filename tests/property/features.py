"""What occurs in a program: read from its jaxpr, so that a feature counts only where it reached the compiler."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

BY_PRIMITIVE = {
    "transpose": "transposition", "rev": "reversal", "slice": "slice", "dynamic_slice": "slice", "gather": "gather",
    "split": "slice",
    "concatenate": "concatenation, padding", "pad": "concatenation, padding", "argmax": "argmax, argmin",
    "argmin": "argmax, argmin",
    "cumsum": "cumulative", "cummax": "cumulative", "cumprod": "cumulative", "reduce_prod": "product over an axis",
    "reduce_or": "any, all", "reduce_and": "any, all", "dot_general": "contraction", "scan": "loop inside",
    "jit": "call inside",
    "remat2": "call inside", "checkpoint": "call inside", "custom_jvp_call": "call inside", "reduce_sum": "sum",
    "reduce_max": "maximum",
    "reduce_min": "minimum", "reduce_precision": "cast", "exp": "elementary functions", "exp2": "elementary functions",
    "log": "elementary functions", "log1p": "elementary functions", "expm1": "elementary functions",
    "tanh": "elementary functions",
    "erf": "elementary functions", "sqrt": "elementary functions", "rsqrt": "elementary functions",
    "logistic": "elementary functions",
    "pow": "elementary functions", "sin": "elementary functions", "cos": "elementary functions", "select_n": "where",
    "iota": "positions",
}  # fmt: skip
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and", "argmax", "argmin")


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if eqn.params.get(key) is not None:
                yield from _equations(getattr(eqn.params[key], "jaxpr", eqn.params[key]))


def features(jaxpr: Any) -> frozenset[str]:
    """The features of a traced program. `jaxpr` as traced, not inlined."""
    found: set[str] = set()
    uses: Counter[Any] = Counter()
    behind: dict[Any, int] = {}
    for eqn in _equations(jaxpr):
        name = eqn.primitive.name
        found |= {BY_PRIMITIVE[name]} if name in BY_PRIMITIVE else set()
        variables = [v for v in eqn.invars if not hasattr(v, "val")]
        uses.update({v: 1 for v in variables})
        depth = max((behind.get(v, 0) for v in variables), default=0)
        if name in _REDUCTIONS:
            found |= _of_reduction(eqn)
            found |= {"dependent reductions"} if depth else set()
            depth += 1
        behind |= {v: depth for v in eqn.outvars}
        if name == "slice" and any(s != 1 for s in eqn.params["strides"] or ()):
            found |= {"strided"}
        if name == "broadcast_in_dim" and eqn.invars[0].aval.ndim:
            found |= {"broadcasting"}
        if name == "reshape" and len([n for n in eqn.invars[0].aval.shape if n > 1]) != len(
            [n for n in eqn.outvars[0].aval.shape if n > 1]
        ):
            found |= {"split or merged axes"}
        if name == "select_n":
            found |= {"nested where"} if any(_made_by(jaxpr, v) == "select_n" for v in variables[1:]) else set()
        for v in (*eqn.invars, *eqn.outvars):
            dtype = getattr(v.aval, "dtype", None)
            if dtype is not None and v.aval.shape:
                found |= {str(dtype)} if str(dtype) in ("bfloat16", "float16", "bool", "int8") else set()
                if jnp.issubdtype(dtype, jnp.integer) and name in (
                    "add",
                    "mul",
                    "rem",
                    "div",
                    "and",
                    "xor",
                    "or",
                    "sub",
                ):
                    found |= {"integer arithmetic"}
        if name == "convert_element_type" and eqn.invars[0].aval.shape:
            found |= {"cast"}
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    results = [v for v in jaxpr.outvars if not hasattr(v, "val")]
    found |= {"shared intermediate"} if any(uses[v] > 1 for v in made) else set()
    found |= {"intermediate returned"} if any(uses[v] for v in results if v in made) else set()
    found |= {"several results"} if len(results) > 1 else set()
    return frozenset(found)


def _of_reduction(eqn: Any) -> set[str]:
    axes, rank, shape = eqn.params["axes"], eqn.invars[0].aval.ndim, eqn.invars[0].aval.shape
    found = set()
    if rank > 1:
        found |= {"reduction over the first axis"} if 0 in axes and len(axes) < rank else set()
        found |= {"reduction over a middle axis"} if any(0 < a < rank - 1 for a in axes) else set()
        found |= {"reduction over several axes"} if len([a for a in axes if shape[a] > 1]) > 1 else set()
        found |= {"reduction over everything"} if len(axes) == rank else set()
    return found


def _made_by(jaxpr: Any, variable: Any) -> str:
    return next((e.primitive.name for e in jaxpr.eqns if variable in e.outvars), "")
