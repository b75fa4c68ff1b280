"""Operations that XLA runs one element at a time, decomposed into others that it fuses.

For some operations XLA has neither a library nor a loop that uses the vector units (which, depends on the platform). What they
compute can be said by operations for which it has. Whether that is faster, the price says, operation by operation, and then a clock
for the whole program (`written_out`). Values change as by another order of sums, no more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.decompositions import running, short_axes, windows
from pallasfuse.decompositions.writing import Writer, has_types_of
from pallasfuse.device import Device
from pallasfuse.first_time import IMPORTS
from pallasfuse.jaxpr_frontend import called, flatten, left_by_user
from pallasfuse.price.xla import price_xla

__all__ = ["decomposed"]

type Run = Callable[..., list[Any]]

_RULES: dict[str, Callable[[JaxprEqn], Run | None]] = {
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), windows.pool),
    "conv_general_dilated": windows.convolution,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), running.running),
}
_WITH_BODIES = frozenset({"scan", "while", "cond"})


def decomposed(jaxpr: Jaxpr, device: Device, exclude: Sequence[str] = (), *, gain: float) -> Jaxpr:
    """Returns the program with operations decomposed where that is predicted to be so many times as fast; itself where nothing is.

    What the user leaves to XLA stays as it is. exclude: as of `FuseOptions`.
    """
    if _compat.has_symbolic_shapes(jaxpr) or not _may_have_some(jaxpr, device):
        return jaxpr
    return _decomposed(jaxpr, device, tuple(exclude), gain)


def _decomposed(jaxpr: Jaxpr, device: Device, exclude: tuple[str, ...], gain: float) -> Jaxpr:
    flat = flatten(jaxpr)
    writer, changed = Writer(flat), False
    for eqn in flat.eqns:
        stays = eqn.effects or left_by_user(eqn, exclude) is not None
        if not stays and _write(writer, eqn, device, exclude, gain):
            changed = True
        else:
            writer.keep(eqn)
    made = writer.written() if changed else flat
    if device.platform == "cpu":
        apart = short_axes.with_short_axes_apart(made, lambda eqn: left_by_user(eqn, exclude) is None)
        if apart is not made and gain * _price_us(apart, device) <= _price_us(made, device):
            made, changed = apart, True
    return made if changed else jaxpr


def _write(writer: Writer, eqn: JaxprEqn, device: Device, exclude: tuple[str, ...], gain: float) -> bool:
    """Write an equation in another way; False where there is none that is faster."""
    name = eqn.primitive.name
    if name in _WITH_BODIES:
        params = {key: _parameter(value, device, exclude, gain) for key, value in eqn.params.items()}
        if all(params[key] is value for key, value in eqn.params.items()):
            return False
        writer.keep(_compat.with_params(eqn, params))
        return True
    rule = _RULES.get(name)
    run = None if rule is None else rule(eqn)
    if run is None or not _is_faster(eqn, run, device, gain):
        return False
    results = writer.emit(eqn, run, [writer.atom(a) for a in eqn.invars])
    if not has_types_of(results, eqn.outvars):
        return False
    for var, atom in zip(eqn.outvars, results, strict=True):
        writer.name(var, atom)
    return True


def _parameter[T](value: T, device: Device, exclude: tuple[str, ...], gain: float) -> T:
    """A parameter of a loop or a choice, with its bodies decomposed where they have the same types afterwards."""
    if isinstance(value, Jaxpr):
        made = _decomposed(value, device, exclude, gain) if _may_have_some(value, device) else value
        return made if has_types_of(made.outvars, value.outvars) else value  # type: ignore[return-value]
    if isinstance(value, tuple | list) and any(isinstance(v, Jaxpr) for v in value):
        found = [_parameter(v, device, exclude, gain) for v in value]
        same = all(new is old for new, old in zip(found, value, strict=True))
        return value if same else type(value)(found)  # type: ignore[call-arg]
    return value


def _may_have_some(jaxpr: Jaxpr, device: Device) -> bool:
    """Is there an operation that might be decomposed in a jaxpr, or in what it calls?"""
    seen = set[int]()  # equal layers call one function
    axes = device.platform == "cpu"

    def within(part: Jaxpr) -> bool:
        if id(part) in seen:
            return False
        seen.add(id(part))
        return any(
            eqn.primitive.name in _RULES
            or (axes and any(map(short_axes.is_short, eqn.outvars)))
            or any(map(within, called(eqn)))
            for eqn in part.eqns
        )

    return within(jaxpr)


def _is_faster(eqn: JaxprEqn, run: Run, device: Device, gain: float) -> bool:
    """Is an operation predicted to be so many times as fast in another way?"""
    structs = [_compat.struct_of(a) for a in eqn.invars]
    written = jax.make_jaxpr(lambda *values: _compat.bind(eqn, values))(*structs)
    return gain * _price_us(jax.make_jaxpr(run)(*structs), device) <= _price_us(written, device)


def _price_us(jaxpr: Jaxpr, device: Device) -> float:
    """The microseconds that XLA is predicted to take for a jaxpr."""
    with IMPORTS:
        from pallasfuse.jaxpr_frontend.conversion import convert
    return price_xla(convert(flatten(jaxpr)).program, device).us
