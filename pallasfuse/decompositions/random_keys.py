"""Loops that draw random numbers, rewritten with the two words of each key in the key's place.

A key is opaque to a kernel, but what is made of it is not: Threefry encrypts a number with the words of a key (`random_words`).
Keys that a loop hands on, takes from outside or derives in a trip become pairs of words, and what it draws becomes maps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn, Literal
from pallasfuse.decompositions.random_words import (
    GENERATOR,
    WIDTHS,
    bits_of,
    encrypted,
    is_in_order,
    is_known_key,
    numbered,
)
from pallasfuse.decompositions.writing import Run
from pallasfuse.jaxpr_frontend import flatten

type Array = Any


class Words(NamedTuple):
    """Keys as their first words and their second words, arrays of the keys' shape."""

    first: Array
    second: Array


def of_words(eqn: JaxprEqn) -> Run | None:
    """Returns what computes a scan with words in place of keys; None where it has no keys, or does something else with them."""
    counts, body = _compat.scan_counts(eqn), flatten(eqn.params["jaxpr"])
    with_keys = list(filter(_is_of_keys, body.eqns))
    if not has_keys(eqn) or counts is None or not all(map(_has_rule, with_keys)):
        return None
    if not all(is_known_key(v) for e in (eqn, *with_keys) for v in (*e.invars, *e.outvars) if _is_key(v)):
        return None
    carried = counts[1]

    def run(*operands: Array) -> list[Array]:
        fixed, states, rows = _compat.scan_parts(tuple(map(_as_words, operands)), counts)

        def trip(state: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            known = dict(zip(body.constvars, map(_as_words, body.consts), strict=True))
            known |= zip(body.invars, (*fixed, *state, *row), strict=True)
            results = _evaluated(body, known)
            return tuple(results[:carried]), tuple(results[carried:])

        found = lax.scan(trip, states, rows, eqn.params["length"], reverse=eqn.params["reverse"])
        return [_as_key(x) if isinstance(x, Words) else x for part in found for x in part]

    return run


def has_keys(eqn: JaxprEqn) -> bool:
    """Does a loop take, hand on or make keys?"""
    return _is_of_keys(eqn) or any(map(_is_of_keys, flatten(eqn.params["jaxpr"]).eqns))


def _is_of_keys(eqn: JaxprEqn) -> bool:
    return any(map(_is_key, (*eqn.invars, *eqn.outvars)))


def _has_rule(eqn: JaxprEqn) -> bool:
    params = eqn.params
    if not is_in_order(eqn) or (eqn.primitive.name == "reshape" and params["dimensions"] is not None):
        return False
    if eqn.primitive.name == "random_bits" and params["bit_width"] not in WIDTHS:
        return False
    if eqn.primitive.name == "random_seed" and _compat.dtype_of(eqn.invars[0]).itemsize > 4:
        return False
    return eqn.primitive.name in _RULES and math.prod(params.get("shape", ())) < 1 << 32


def _is_key(atom: Any) -> bool:
    return _are_keys(_compat.dtype_of(atom))


def _are_keys(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _as_words(value: Array) -> Any:
    if not _are_keys(value.dtype):
        return value
    data = jax.random.key_data(value)
    return Words(data[..., 0], data[..., 1])


def _as_key(words: Words) -> Array:
    return jax.random.wrap_key_data(jnp.stack(words, -1), impl=GENERATOR)


def _evaluated(body: Any, known: dict[Any, Any]) -> list[Any]:
    """Computes the results of a body from what is known of its variables."""

    def look_up(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for e in body.eqns:
        values = [look_up(a) for a in e.invars]
        results = _RULES[e.primitive.name](e, values) if _is_of_keys(e) else _compat.bind(e, values)
        known |= zip(e.outvars, results, strict=True)
    return [look_up(v) for v in body.outvars]


def _split(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Makes keys of a key: each is its number, encrypted."""
    (keys,) = values
    return [Words(*numbered(keys.first, keys.second, tuple(eqn.params["shape"])))]


def _folded_in(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Makes a key of a key and a number, which is encrypted."""
    keys, number = values
    return [Words(*encrypted(keys.first, keys.second, jnp.zeros((), jnp.uint32), jnp.asarray(number, jnp.uint32)))]


def _of_seed(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Makes a key of a number of at most 32 bits: its second word."""
    second = jnp.asarray(values[0]).astype(jnp.uint32)
    return [Words(jnp.zeros_like(second), second)]


def _drawn(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    (keys,), shape = values, tuple(eqn.params["shape"])
    return [bits_of(keys.first, keys.second, shape, eqn.params["bit_width"])]


def _moved(move: Callable[[JaxprEqn, Array], Any]) -> Callable[[JaxprEqn, Sequence[Any]], list[Any]]:
    """Moves both words of keys alike."""

    def rule(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        (keys,) = values
        moved = [move(eqn, word) for word in keys]
        if isinstance(moved[0], list):
            return [Words(*pair) for pair in zip(*moved, strict=True)]
        return [Words(*moved)]

    return rule


def _chosen(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    which, *keys = values
    return [Words(*(lax.select_n(which, *words) for words in zip(*keys, strict=True)))]


def _pieces(eqn: JaxprEqn, word: Array) -> list[Array]:
    axis = eqn.params["axis"]
    return [lax.index_in_dim(word, n, axis, keepdims=False) for n in range(word.shape[axis])]


_RULES: Mapping[str, Callable[[JaxprEqn, Sequence[Any]], list[Any]]] = {
    "random_split": _split,
    "random_fold_in": _folded_in,
    "random_seed": _of_seed,
    "random_bits": _drawn,
    "random_wrap": lambda _, v: [Words(v[0][..., 0], v[0][..., 1])],
    "random_unwrap": lambda _, v: [jnp.stack(v[0], -1)],
    "random_clone": lambda _, v: [v[0]],
    "select_n": _chosen,
    "unstack": _moved(_pieces),
    "squeeze": _moved(lambda e, x: lax.squeeze(x, e.params["dimensions"])),
    "reshape": _moved(lambda e, x: lax.reshape(x, e.params["new_sizes"])),
    "slice": _moved(
        lambda e, x: lax.slice(x, e.params["start_indices"], e.params["limit_indices"], e.params["strides"])
    ),
    "broadcast_in_dim": _moved(
        lambda e, x: lax.broadcast_in_dim(x, e.params["shape"], e.params["broadcast_dimensions"])
    ),
}
"""The functions that compute what a trip may do with keys, by the name of the operation."""
