"""The registry of whole programs: a function of plain JAX, and how to make its arguments at a size.

A size is "gpu" (half precision, as large as users run), "cpu" (float32, a fraction of a second) or "tiny" (for tests). Arguments
are described first (`Random`), so that a program can be compiled before any memory is taken.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Size = Literal["gpu", "cpu", "tiny"]
SIZES: tuple[Size, ...] = ("gpu", "cpu", "tiny")


class NotInstalledError(Exception):
    """A package that a program needs is missing; the message names it."""


@dataclass(frozen=True, slots=True)
class Random:
    """An array to draw: normal values times `scale` plus `offset`, or integers below `below`.

    distinct: the integers are a permutation of those below `below`. ramp: they are sorted.
    """

    shape: tuple[int, ...]
    dtype: Any
    scale: float = 1.0
    offset: float = 0.0
    below: int = 2
    distinct: bool = False
    ramp: bool = False

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Built:
    """A program at a size: call `function(*arguments)`, where every leaf of `arguments` is a `Random`.

    fused: what takes the place of `function` with every step fused; by default `fuse(function)`. It gets `fuse`, which wraps
    a function. step: the function inside it that is fused, and its arguments, for the plan.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    fused: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    step: tuple[Callable[..., Any], tuple[Any, ...]] | None = None

    @property
    def structs(self) -> tuple[Any, ...]:
        """The arguments as shapes and types."""
        return _structs(self.arguments)

    @property
    def step_structs(self) -> tuple[Any, ...]:
        """The arguments of the step."""
        assert self.step is not None
        return _structs(self.step[1])

    def arrays(self, seed: int = 0) -> tuple[Any, ...]:
        """The arguments, drawn."""
        leaves, tree = jax.tree.flatten(self.arguments, is_leaf=_is_random)
        return jax.tree.unflatten(tree, [draw(r, seed + 7919 * n) for n, r in enumerate(leaves)])


@dataclass(frozen=True, slots=True)
class Program:
    """An entry of the registry. `build` imports what it needs and may raise `NotInstalledError`."""

    name: str
    group: str
    build: Callable[[Size], Built]


_REGISTRY: dict[str, Program] = {}


def program(name: str, group: str) -> Callable[[Callable[[Size], Built]], Callable[[Size], Built]]:
    """Register the decorated builder."""

    def register(build: Callable[[Size], Built]) -> Callable[[Size], Built]:
        add(name, group, build)
        return build

    return register


def add(name: str, group: str, build: Callable[[Size], Built]) -> None:
    """Register a builder."""
    assert name not in _REGISTRY, f"two programs are called {name}"
    _REGISTRY[name] = Program(name, group, build)


def programs(prefixes: tuple[str, ...] = ()) -> Iterator[Program]:
    """Every program whose name or group begins with one of the prefixes; all without any. A whole name stands for itself alone."""
    whole = {p for p in prefixes if p in _REGISTRY}
    begun = tuple(p for p in prefixes if p not in whole)
    for entry in _REGISTRY.values():
        if (
            not prefixes
            or entry.name in whole
            or (begun and entry.name.startswith(begun))
            or entry.group.startswith(prefixes)
        ):
            yield entry


def build(entry: Program, size: Size) -> Built:
    """The program at a size.

    Raises:
      NotInstalledError: a package is missing.
    """
    try:
        return entry.build(size)
    except ModuleNotFoundError as error:
        raise NotInstalledError(f"not installed: {error.name}") from error


def pick(size: Size, gpu: Any, cpu: Any, tiny: Any) -> Any:
    """The one of three that belongs to the size."""
    return {"gpu": gpu, "cpu": cpu, "tiny": tiny}[size]


def half(size: Size) -> Any:
    """Returns the element type for a size: bfloat16 on the GPU, float32 elsewhere."""
    return jnp.bfloat16 if size == "gpu" else jnp.float32


def normal(*shape: int, dtype: Any = jnp.float32, scale: float = 1.0, offset: float = 0.0) -> Random:
    return Random(shape, jnp.dtype(dtype), scale, offset)


def weight(*shape: int, dtype: Any = jnp.float32) -> Random:
    """A matrix that keeps the variance of what it multiplies: [..., inputs, outputs]."""
    return Random(shape, jnp.dtype(dtype), shape[-2] ** -0.5)


def gain(n: int, dtype: Any = jnp.float32) -> Random:
    """The scale of a norm: near one."""
    return Random((n,), jnp.dtype(dtype), 0.1, 1.0)


def integers(*shape: int, below: int, distinct: bool = False, ramp: bool = False) -> Random:
    return Random(shape, jnp.dtype(jnp.int32), below=below, distinct=distinct, ramp=ramp)


def booleans(*shape: int) -> Random:
    """Describes random booleans of which three of four are true."""
    return Random(shape, jnp.dtype(bool))


def like(structs: Any, dtype: Any = None) -> Any:
    """Weights for the parameters of a module, as `jax.eval_shape` of its initialisation gives them. dtype: of all floats."""

    def of(s: Any) -> Random:
        kind = jnp.dtype(dtype) if dtype is not None and jnp.issubdtype(s.dtype, jnp.floating) else jnp.dtype(s.dtype)
        if len(s.shape) < 2:
            return Random(tuple(s.shape), kind, 0.05, 1.0 if len(s.shape) == 1 else 0.0)
        return Random(tuple(s.shape), kind, float(np.prod(s.shape[:-1])) ** -0.5)

    return jax.tree.map(of, structs)


def draw(spec: Random, seed: int) -> jax.Array:
    """An array of a description. Large ones repeat after a prime number of elements, so that no two rows are equal."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(spec.shape))
    if jnp.issubdtype(spec.dtype, jnp.floating):
        period = min(count, 1_000_003)
        values = (rng.standard_normal(period, np.float32) * spec.scale + spec.offset).astype(spec.dtype)
        return jnp.asarray(np.resize(values, count).reshape(spec.shape))
    if spec.dtype == bool:
        return jnp.asarray(rng.random(count).reshape(spec.shape) < 0.75)
    flat = rng.permutation(spec.below)[:count] if spec.distinct else rng.integers(0, spec.below, count)
    flat = np.sort(flat) if spec.ramp else flat
    return jnp.asarray(flat.reshape(spec.shape).astype(spec.dtype))


def _structs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    structs: tuple[Any, ...] = jax.tree.map(lambda r: r.struct, arguments, is_leaf=_is_random)
    return structs


def _is_random(leaf: Any) -> bool:
    return isinstance(leaf, Random)
