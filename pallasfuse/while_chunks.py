"""Loops that go on while a condition holds, in chunks of steps that are one kernel.

After each trip of such a loop XLA asks whether to go on, and each trip starts several kernels. A chunk makes some steps at a time,
of which those after the last one leave everything as it is. It is a loop of known length, and so may be one kernel (`recurrences`).
Its steps ask the condition themselves, and hand on whether the loop goes on: who asked again outside might round otherwise, and
wait for ever for a chunk that is done.

A batch of loops (`jax.vmap` of one) goes on while any of them does, and leaves those that are done as they are. Its steps need not
ask whether the others go on, so that blocks share the batch out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.decompositions.writing import Run, traced_as, with_some_instead, with_source_of
from pallasfuse.jaxpr_frontend import called, flatten, left_by_user, with_bodies
from pallasfuse.recurrences import AsKernel
from pallasfuse.unrolled_loops import priced_us

_FEWEST, _MOST = 4, 64
"""The steps of a chunk. Fewer save little; beyond many, what is asked after each takes no time."""
_LEAST_TRIPS = 2
"""A loop is taken to make so many trips at least: a chunk, with what is asked of it once, is not predicted to take longer than XLA
takes for these, beyond the error of prices. A loop that ends after one may take twice as long."""


@dataclass(frozen=True, slots=True)
class _While:
    """Holds the parts of a while loop."""

    eqn: JaxprEqn
    condition: Jaxpr
    body: Jaxpr
    of_condition: int
    """The operands that only the condition reads: the first ones."""
    of_body: int
    """Those that only the body reads, which come next."""

    @staticmethod
    def of(eqn: JaxprEqn) -> "_While":
        condition, body = (flatten(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
        return _While(eqn, condition, body, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])

    def goes_on(self, operands: Sequence[Any], state: Sequence[Any]) -> Any:
        """Returns whether the loop goes on; of a batch, which of its loops do."""
        (found,) = _compat.eval_jaxpr(self.condition, self.condition.consts, *operands[: self.of_condition], *state)
        return found

    def after(self, operands: Sequence[Any], on: Any, state: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns what goes on after a step, and the state then. What does not go on stays as it is."""
        known = operands[self.of_condition : self.of_condition + self.of_body]
        found = _compat.eval_jaxpr(self.body, self.body.consts, *known, *state)
        made = [jnp.where(_over(on, new), new, old) for new, old in zip(found, state, strict=True)]
        return on & self.goes_on(operands, made), made


def _over(on: Any, value: Any) -> Any:
    """Returns what says of the loops of a batch which go on, for every element of a value that they hand on."""
    return jnp.reshape(on, (*jnp.shape(on), *(1,) * (jnp.ndim(value) - jnp.ndim(on))))


def in_chunks(jaxpr: Jaxpr, as_kernel: AsKernel) -> Jaxpr:
    """Returns a jaxpr whose while loops go on in chunks, where these are kernels that are short enough; itself where none does."""
    if not any(e.primitive.name == "while" or called(e) for e in jaxpr.eqns):
        return jaxpr

    def chunked(eqn: JaxprEqn) -> Run | None:
        run = _chunked(eqn, as_kernel) if eqn.primitive.name == "while" else None
        if run is not None:
            return run
        inside = with_bodies(eqn, partial(in_chunks, as_kernel=as_kernel))
        return None if inside is eqn else lambda *operands: list(_compat.bind(inside, operands))

    return with_some_instead(flatten(jaxpr), chunked) or jaxpr


def _chunked(eqn: JaxprEqn, as_kernel: AsKernel) -> Run | None:
    """Returns a while loop that goes on in chunks; None where a chunk is no kernel, or takes too long (`_LEAST_TRIPS`)."""
    if eqn.effects or left_by_user(eqn, as_kernel.exclude) is not None:
        return None
    loop = _While.of(eqn)
    tried = _chunk(loop, _MOST, as_kernel)
    if tried is None:
        return None
    most_us = _LEAST_TRIPS * tried.us_of_xla / _MOST / as_kernel.device.price_error
    once_us = as_kernel.device.kernel_us + as_kernel.device.launch_us
    steps = _MOST
    while steps >= _FEWEST and once_us + (tried.us - once_us) * steps / _MOST > most_us:
        steps //= 2
    while steps >= _FEWEST:  # the kernel of a shorter chunk may take a little more than its share of the longest one
        chunk = tried if steps == _MOST else _chunk(loop, steps, as_kernel)
        if chunk is not None and chunk.us <= most_us:
            return chunk.run
        steps //= 2
    return None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Holds a loop that goes on in chunks, with the price of a chunk, and that of as many steps by XLA."""

    run: Run
    us: float
    us_of_xla: float


def _chunk(loop: _While, steps: int, as_kernel: AsKernel) -> _Chunk | None:
    """Returns a loop whose chunks are kernels; None where they cannot be."""
    count = loop.of_condition + loop.of_body

    def chunk(on: Any, *operands: Any) -> list[Any]:
        def step(state: tuple[Any, list[Any]], _: None) -> tuple[tuple[Any, list[Any]], None]:
            return loop.after(operands, *state), None

        (on, state), _ = lax.scan(step, (on, list(operands[count:])), length=steps)
        return [on, *state]

    atoms = [loop.condition.outvars[0], *loop.eqn.invars]
    written = flatten(with_source_of(loop.eqn, traced_as(loop.eqn, chunk, atoms)))
    found = with_some_instead(written, lambda e: as_kernel(e) if e.primitive.name == "scan" else None)
    if found is None:
        return None

    def run(*operands: Any) -> list[Any]:
        known, state = operands[:count], list(operands[count:])

        def after(whole: Sequence[Any]) -> list[Any]:
            on, *state = whole
            return list(_compat.eval_jaxpr(found, found.consts, on, *known, *state))

        _, *last = lax.while_loop(lambda whole: jnp.any(whole[0]), after, [loop.goes_on(operands, state), *state])
        return last

    device = as_kernel.device
    return _Chunk(run, priced_us(found, device), priced_us(written, device))
