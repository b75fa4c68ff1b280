"""The weights of stacked layers, which the programs of the thirty-first set share."""

from dataclasses import replace
from typing import Any

import jax

from benchmarks.workloads.registry import Random
from benchmarks.workloads.twenty_sixth_parts import drawn


def drawn_with_stack(structs: Any, stack: str, dtype: Any = None) -> Any:
    """This describes weights of a module in which what `stack` names has a first axis of layers."""

    def stacked(path: Any) -> bool:
        return any(stack in str(getattr(k, "key", getattr(k, "name", k))) for k in path)

    def one(path: Any, s: Any) -> Any:
        return jax.ShapeDtypeStruct(s.shape[1:], s.dtype) if stacked(path) else s

    def all_layers(path: Any, s: Any, r: Random) -> Random:
        return replace(r, shape=tuple(s.shape)) if stacked(path) else r

    single = drawn(jax.tree_util.tree_map_with_path(one, structs), dtype)
    return jax.tree_util.tree_map_with_path(all_layers, structs, single)
