"""Reducers: the associative, commutative operations that a nest can fold an axis with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallasfuse.ir import dtypes


@dataclass(frozen=True, slots=True)
class Reducer:
    """An associative, commutative fold. `combine` names the scalar op that joins two partial results."""

    name: str
    combine: str
    reduce: Callable[..., Any]

    def identity(self, dtype: str) -> float | int | bool:
        """The value that changes nothing when it is combined with a value of type `dtype`."""
        match self.name:
            case "sum":
                return 0.0 if dtypes.is_float(dtype) else 0
            case "prod":
                return 1.0 if dtypes.is_float(dtype) else 1
            case "and":
                return True
            case "or":
                return False
            case "max" if dtypes.is_float(dtype):
                return -np.inf
            case "min" if dtypes.is_float(dtype):
                return np.inf
            case "max":
                return int(np.iinfo(dtype).min) if dtype != "bool" else False
            case "min":
                return int(np.iinfo(dtype).max) if dtype != "bool" else True
        raise AssertionError(self.name)

    def __str__(self) -> str:
        return self.name


SUM = Reducer("sum", "add", np.sum)
PROD = Reducer("prod", "mul", np.prod)
MAX = Reducer("max", "max", np.max)
MIN = Reducer("min", "min", np.min)
AND = Reducer("and", "and", np.all)
OR = Reducer("or", "or", np.any)

REDUCERS: dict[str, Reducer] = {r.name: r for r in (SUM, PROD, MAX, MIN, AND, OR)}
