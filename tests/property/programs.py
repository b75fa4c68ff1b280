"""Random programs as Python source: where choices come from, what a program is, and a program under construction.

Programs are text so that a failure can be pasted into a regression. All choices go through a `Chooser`, so that Hypothesis can
draw them, a plain seed can replay them, and the shrinker can change them one by one.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AXIS_NAMES = "ijklmnopqrstuvwxyz"


class Chooser:
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int:
        raise NotImplementedError

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent


class Seeded(Chooser):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class Recorded(Chooser):
    """Replays `choices`, each the distance from the least one allowed, then asks `rest`; and keeps what was chosen."""

    def __init__(self, choices: Sequence[int] = (), rest: Chooser | None = None) -> None:
        self._given, self._rest = list(choices), rest
        self.choices: list[int] = []

    def integer(self, low: int, high: int) -> int:
        n = len(self.choices)
        if n < len(self._given):
            chosen = min(self._given[n], high - low)
        else:
            chosen = 0 if self._rest is None else self._rest.integer(low, high) - low
        self.choices.append(chosen)
        return low + chosen


class Drawn(Chooser):
    """Choices drawn from Hypothesis: a smaller number is a simpler choice."""

    def __init__(self, data: Any) -> None:
        from hypothesis import strategies as st

        self._data, self._integers = data, st.integers

    def integer(self, low: int, high: int) -> int:
        return low if low == high else self._data.draw(self._integers(low, high))


@dataclass(frozen=True)
class Input:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    offset: float = 0.0
    scale: float = 1.0

    def make(self, rng: np.random.Generator) -> np.ndarray:
        if self.dtype == "bool":
            return rng.random(self.shape) < 0.6
        if self.dtype.startswith("int"):
            return rng.integers(-5, 6, self.shape).astype(self.dtype)
        values = (rng.standard_normal(self.shape) * self.scale + self.offset).astype(np.float32)
        return np.asarray(jnp.asarray(values, self.dtype))


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]
    tiles: tuple[tuple[str, int], ...]
    data_seed: int = 0

    @property
    def source(self) -> str:
        lines = [f"def fn({', '.join(i.name for i in self.inputs)}):", *(f"    {b}" for b in self.body)]
        return "\n".join([*lines, f"    return {', '.join(self.results)}"]) + "\n"

    def function(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"jnp": jnp, "jax": jax, "np": np, "lax": jax.lax}
        exec(compile(self.source, "<program>", "exec"), scope)
        return scope["fn"]

    def arguments(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.data_seed)
        return [i.make(rng) for i in self.inputs]

    def __str__(self) -> str:
        inputs = "\n".join(f"# {i}" for i in self.inputs)
        return f"{inputs}\n# tiles={self.tiles} data_seed={self.data_seed}\n{self.source}"


@dataclass
class Growth:
    """A program under construction: statements so far, and what can be returned."""

    c: Chooser
    inputs: list[Input] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    spare: list[str] = field(default_factory=list)
    """Intermediate values that may be returned as well."""
    count: int = 0
    masked: bool = False

    def let(self, value: str) -> str:
        name = f"t{self.count}"
        self.count += 1
        self.body.append(f"{name} = {value}")
        return name

    def input(self, shape: tuple[int, ...], dtype: str | None = None, offset: float = 0.0, scale: float = 1.0) -> str:
        name = f"x{len(self.inputs)}"
        chosen = dtype or ("float32" if not self.c.chance(20) else self.c.pick(["bfloat16", "float16", "int32"]))
        self.inputs.append(Input(name, shape, chosen, offset, scale))
        return name if chosen in ("float32", "bool") else self.let(f"{name}.astype(jnp.float32)")
