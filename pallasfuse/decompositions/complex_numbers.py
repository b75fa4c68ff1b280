"""Complex numbers written as two real ones: their real and their imaginary parts.

XLA computes complex numbers element by element, and fuses them. But it computes a quotient with the care for infinities that C asks
for, which takes some hundred instructions, and nothing else here knows complex numbers: no other rule, no price, no kernel. Written
in parts, sums, products and quotients are arithmetic like any other. What has no rule here (Fourier transforms, exponentials, long
matrix products) gets numbers that are put together again, which XLA fuses with what computes them.

Values change by roundings. Quotients are computed by Smith's method (R. L. Smith, "Algorithm 116: complex division", 1962), which
neither overflows nor loses digits where the plain formula does. There may be other values where parts are infinite or no numbers: a
real number has no imaginary part here, and what is divided by a divisor with two infinite parts is no number. What is divided by
zero may be infinite with the other sign.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Atom, Writer, has_types_of
from pallasfuse.device import Device
from pallasfuse.jaxpr_frontend import flatten, left_by_user, with_bodies
from pallasfuse.primitive_names import WITH_BODIES

LONGEST_SUM = 8
"""Products of matrices with longer sums stay complex: a library multiplies them."""
_QUOTIENT_SAVES = {"gpu": 75.0, "cpu": 40.0}
"""XLA takes so many instructions more for a complex quotient than Smith's method. (Cauchy sums of 134 million quotients took 110
instructions for each on an H200, which are 35 in parts by the table of instructions: 1.7 ms were saved for 1.4. Elsewhere it is too
much: a program of soundings saved 0.1 ms for 1.7. Three programs with 1 to 9 million quotients took 1.3 to 3.3 ns less for each on
two cores.)"""
_COMPUTING = frozenset({"mul", "div", "reduce_sum", "dot_general", "integer_pow", "square"})
"""Rules that are worth it: the others only hand parts on."""

type _Real = Any
"""An array of real numbers, or a number."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A complex value in parts. imag: None where it is known to be zero, as the value was made from a real one."""

    real: _Real
    imag: _Real | None = None

    def each(self, compute: Callable[[_Real], _Real]) -> "Parts":
        """Returns what is computed from each part by itself, of which nothing comes from nothing."""
        return Parts(compute(self.real), None if self.imag is None else compute(self.imag))


type _Rule = Callable[[JaxprEqn, Sequence[Any]], Any]
"""Computes the result of an equation from its operands, complex ones as `Parts`; so is a complex result."""


def in_parts(jaxpr: Jaxpr, device: Device, exclude: Sequence[str] = ()) -> tuple[Jaxpr, float]:
    """Returns a jaxpr whose complex numbers are computed in parts, and the microseconds that its quotients save; itself where it
    computes none.

    exclude: as of `FuseOptions`.
    """
    try:
        made, quotients = _in_parts(jaxpr, tuple(exclude), device.platform)
    except Exception:  # a program must not fail because of a form of it
        return jaxpr, 0.0
    instructions = quotients * _QUOTIENT_SAVES.get(device.platform, 0.0)
    return made, 1e-3 * instructions / (
        device.vector_gop_s * (device.multiprocessors if device.platform == "cpu" else 1)
    )


def _in_parts(jaxpr: Jaxpr, exclude: tuple[str, ...], platform: str) -> tuple[Jaxpr, float]:
    """Returns a jaxpr as of `in_parts`, and counts its quotients, each as often as it is computed at least: those of a choice in
    the branch with the fewest, and none of a loop of unknown length."""
    if _compat.has_symbolic_shapes(jaxpr):
        return jaxpr, 0.0
    flat = flatten(jaxpr)
    writing = _Writing(flat, exclude, platform)
    for eqn in flat.eqns:
        writing.write(eqn)
    if not writing.changed:
        return jaxpr, 0.0
    made = writing.written()
    return (made, writing.quotients) if has_types_of(made.outvars, jaxpr.outvars) else (jaxpr, 0.0)


def _is_complex(atom: Atom) -> bool:
    return bool(jnp.issubdtype(_compat.dtype_of(atom), jnp.complexfloating))


class _Writing:
    """This writes a jaxpr with complex numbers in parts, where there are rules for what computes them."""

    def __init__(self, jaxpr: Jaxpr, exclude: tuple[str, ...], platform: str) -> None:
        self.changed = False
        """Is there something that is worth it?"""
        self.quotients = 0.0
        self._writer, self._exclude, self._platform = Writer(jaxpr), exclude, platform
        self._rules = {**_RULES, **(_ON_GPUS if platform == "gpu" else {})}
        self._parts: dict[Var, Parts] = {}
        """The atoms of the parts of variables of the jaxpr."""
        self._whole: set[Var] = set()
        """The variables that are there as complex numbers."""

    def write(self, eqn: JaxprEqn) -> None:
        """Appends an equation, in parts where there is a rule for it."""
        if not any(map(_is_complex, (*eqn.invars, *eqn.outvars))) and eqn.primitive.name not in WITH_BODIES:
            self._writer.keep(eqn)
            return
        rule = self._rules.get(eqn.primitive.name) if self._may(eqn) else None
        if rule is None or not self._ruled(eqn, rule):
            self._kept(eqn)

    def written(self) -> Jaxpr:
        """Returns the jaxpr as it is written."""
        last = self._writer.jaxpr.eqns[-1]
        for atom in self._writer.jaxpr.outvars:
            self._put_together(last, atom)
        return _compat.without_unused(self._writer.written())

    def _ruled(self, eqn: JaxprEqn, rule: _Rule) -> bool:
        """Appends an equation in parts; False where its rule does not fit."""
        atoms: list[Atom] = []
        (out,) = eqn.outvars

        def taken(atom: Atom | None) -> int | None:
            if atom is None:
                return None
            atoms.append(atom)
            return len(atoms) - 1

        places: list[Any] = []
        for operand in eqn.invars:
            if not _is_complex(operand):
                places.append(taken(self._writer.atom(operand)))
            elif isinstance(operand, Literal):
                value = np.asarray(operand.val)
                places.append(Parts(value.real, value.imag if np.any(value.imag) else None))
            else:
                parts = self._parts_of(eqn, operand)
                places.append(Parts(taken(parts.real), taken(parts.imag)))
        literal = [isinstance(o, Literal) and _is_complex(o) for o in eqn.invars]
        has_imaginary: list[bool] = []

        def run(*values: Any) -> list[Any]:
            def of(place: Any, known: bool) -> Any:
                if known:
                    return place
                if isinstance(place, Parts):
                    return Parts(values[place.real], None if place.imag is None else values[place.imag])
                return values[place]

            result = _of_type_of(out, rule(eqn, [of(p, known) for p, known in zip(places, literal, strict=True)]))
            has_imaginary[:] = [isinstance(result, Parts) and result.imag is not None]
            if not isinstance(result, Parts):
                return [result]
            return [result.real] if result.imag is None else [result.real, result.imag]

        try:
            made = self._writer.emit(eqn, run, atoms)
        except NotImplementedError:
            return False
        self.changed |= eqn.primitive.name in _COMPUTING
        if eqn.primitive.name == "div" and not literal[1] and places[1].imag is not None:
            self.quotients += prod(_compat.shape_of(out))
        if _is_complex(out):
            self._parts[out] = Parts(made[0], made[1] if has_imaginary[0] else None)
        else:
            self._writer.name(out, made[0])
        return True

    def _kept(self, eqn: JaxprEqn) -> None:
        """Appends an equation as it is, but for its bodies, with its complex operands put together."""
        for operand in eqn.invars:
            self._put_together(eqn, operand)
        if eqn.primitive.name in WITH_BODIES and self._may(eqn):
            counted: list[float] = []

            def in_parts_too(body: Jaxpr) -> Jaxpr:
                made, quotients = _in_parts(body, self._exclude, self._platform)
                counted.append(quotients)
                return made

            made = with_bodies(eqn, in_parts_too, scoped=bool(self._exclude))
            trips = {"scan": float(eqn.params.get("length", 0)), "cond": 1.0}.get(eqn.primitive.name, 0.0)
            self.quotients += trips * min(counted, default=0.0)
            self.changed |= made is not eqn
            eqn = made
        self._writer.keep(eqn)

    def _may(self, eqn: JaxprEqn) -> bool:
        """May an equation be written in parts, or has the user left it to XLA?"""
        return not eqn.effects and left_by_user(eqn, self._exclude) is None

    def _parts_of(self, eqn: JaxprEqn, operand: Var) -> Parts:
        """Returns the parts of an operand of an equation, which are taken once."""
        if operand not in self._parts:
            taken = self._writer.emit(eqn, lambda x: [lax.real(x), lax.imag(x)], [self._writer.atom(operand)])
            self._parts[operand] = Parts(*taken)
            self._whole.add(operand)
        return self._parts[operand]

    def _put_together(self, eqn: JaxprEqn, operand: Atom) -> None:
        """Lets an operand of an equation be there as a complex number."""
        if isinstance(operand, Literal) or operand not in self._parts or operand in self._whole:
            return
        parts = self._parts[operand]
        atoms = [parts.real] if parts.imag is None else [parts.real, parts.imag]
        self._writer.name(operand, *self._writer.emit(eqn, lambda *both: [_together(Parts(*both))], atoms))
        self._whole.add(operand)


def _of_type_of(out: Var, value: Any) -> Any:
    """Returns a result in the shape of a variable: one that depends on literals alone may have none.

    Raises:
      NotImplementedError: it has another type.
    """
    shape, dtype = _compat.shape_of(out), _compat.dtype_of(out)
    wanted = jnp.finfo(dtype).dtype if isinstance(value, Parts) else dtype
    parts = value if isinstance(value, Parts) else Parts(value)
    if any(part is not None and jnp.result_type(part) != wanted for part in (parts.real, parts.imag)):
        raise NotImplementedError
    parts = parts.each(lambda part: jnp.broadcast_to(part, shape))
    return parts if isinstance(value, Parts) else parts.real


def _together(value: Parts) -> Any:
    return lax.complex(value.real, jnp.zeros_like(value.real) if value.imag is None else value.imag)


# --- rules


def _on_each_part(eqn: JaxprEqn, operands: Sequence[Any]) -> Parts:
    """Computes an operation that moves elements, or one that is linear: on each part by itself."""
    if all(not isinstance(x, Parts) or x.imag is None for x in operands):
        return Parts(_bound(eqn, [_real(x) for x in operands]))
    return Parts(*(_bound(eqn, [part(x) for x in operands]) for part in (_real, _imaginary)))


def _real(operand: Any) -> Any:
    return operand.real if isinstance(operand, Parts) else operand


def _imaginary(operand: Any) -> Any:
    """Returns the imaginary part of a complex operand, and others as they are: places, choices."""
    if not isinstance(operand, Parts):
        return operand
    return jnp.zeros_like(operand.real) if operand.imag is None else operand.imag


def _bound(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    """Computes an equation of other operands, with the same parameters."""
    (result,) = _compat.bind(eqn, operands)
    return result


def _of_sum(combine: Callable[[Any, Any], Any], eqn: JaxprEqn, operands: Sequence[Parts]) -> Parts:
    one, other = operands
    real = combine(one.real, other.real)
    if other.imag is None:
        return Parts(real, one.imag)
    if one.imag is None:
        return Parts(real, combine(jnp.zeros_like(other.imag), other.imag))
    return Parts(real, combine(one.imag, other.imag))


def _product(one: Parts, other: Parts, times: Callable[[Any, Any], Any]) -> Parts:
    """Multiplies two values by a product of real ones."""
    real = times(one.real, other.real)
    if one.imag is None and other.imag is None:
        return Parts(real)
    if one.imag is None:
        return Parts(real, times(one.real, other.imag))
    if other.imag is None:
        return Parts(real, times(one.imag, other.real))
    cross = times(one.real, other.imag) + times(one.imag, other.real)
    return Parts(real - times(one.imag, other.imag), cross)


def _of_product(eqn: JaxprEqn, operands: Sequence[Parts]) -> Parts:
    one, other = operands
    return _product(one, other, lambda x, y: x * y)


def _of_quotient(eqn: JaxprEqn, operands: Sequence[Parts]) -> Parts:
    """Divides by Smith's method: what is smaller in the divisor is divided by what is larger first."""
    value, divisor = operands
    if divisor.imag is None:
        return value.each(lambda part: part / divisor.real)
    a, b, c, d = value.real, value.imag, divisor.real, divisor.imag
    wide = jnp.abs(c) >= jnp.abs(d)
    larger, smaller = jnp.where(wide, c, d), jnp.where(wide, d, c)
    ratio = jnp.where(smaller == 0, smaller, smaller / larger)  # zero over zero is infinite afterwards
    length = larger + smaller * ratio
    if b is None:
        near, far = a / length, a * ratio / length
        return Parts(jnp.where(wide, near, far), -jnp.where(wide, far, near))
    real = jnp.where(wide, a + b * ratio, a * ratio + b) / length
    return Parts(real, jnp.where(wide, b - a * ratio, b * ratio - a) / length)


def _of_power(eqn: JaxprEqn, operands: Sequence[Parts]) -> Parts:
    """Squares a value; other powers have no rule."""
    if eqn.params.get("y", 2) != 2:
        raise NotImplementedError
    return _of_product(eqn, [operands[0], operands[0]])


def _of_length(eqn: JaxprEqn, operands: Sequence[Parts]) -> Any:
    """Returns the absolute value, without an overflow on the way."""
    (value,) = operands
    if value.imag is None:
        return jnp.abs(value.real)
    real, imag = jnp.abs(value.real), jnp.abs(value.imag)
    larger, smaller = jnp.maximum(real, imag), jnp.minimum(real, imag)
    ratio = jnp.where((smaller == 0) | jnp.isinf(larger), 0, smaller / larger)
    return larger * jnp.sqrt(1 + ratio * ratio)


def _of_matrices(eqn: JaxprEqn, operands: Sequence[Any]) -> Parts:
    """Multiplies matrices with short sums element by element."""
    one, other = (x if isinstance(x, Parts) else Parts(x) for x in operands)  # one of them may be real
    (over, other_over), (batch, other_batch) = eqn.params["dimension_numbers"]
    wanted = jnp.finfo(_compat.dtype_of(eqn.outvars[0])).dtype
    if {jnp.result_type(one.real), jnp.result_type(other.real)} != {wanted}:
        raise NotImplementedError  # they are multiplied in another type
    if prod(one.real.shape[d] for d in over) > LONGEST_SUM:
        raise NotImplementedError
    free = [d for d in range(one.real.ndim) if d not in (*over, *batch)]
    other_free = [d for d in range(other.real.ndim) if d not in (*other_over, *other_batch)]

    def laid_out(x: Any, dims: Sequence[int], before: int, after: int) -> Any:
        turned = jnp.transpose(x, dims)
        return jnp.expand_dims(turned, range(before, before + after))

    lhs = one.each(lambda x: laid_out(x, (*batch, *free, *over), len(batch) + len(free), len(other_free)))
    rhs = other.each(lambda x: laid_out(x, (*other_batch, *other_free, *other_over), len(batch), len(free)))
    last = range(lhs.real.ndim - len(over), lhs.real.ndim)
    return _product(lhs, rhs, lambda x, y: x * y).each(lambda x: jnp.sum(x, tuple(last)))


def _of_type(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    """Converts to a complex type; from one only to real numbers, which are the real parts."""
    (value,) = operands
    dtype = eqn.params["new_dtype"]
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        parts = value if isinstance(value, Parts) else Parts(value)
        return parts.each(lambda x: lax.convert_element_type(x, part))
    if dtype == jnp.bool_:
        raise NotImplementedError
    return lax.convert_element_type(value.real, dtype)


def _of_two(eqn: JaxprEqn, operands: Sequence[Any]) -> Parts:
    return Parts(*operands)


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys((
        "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "rev", "concatenate", "pad", "select_n",
        "dynamic_slice", "reduce_sum", "neg", "copy", "stack",
    ), _on_each_part),
    "add": partial(_of_sum, lambda x, y: x + y), "add_any": partial(_of_sum, lambda x, y: x + y),
    "sub": partial(_of_sum, lambda x, y: x - y), "mul": _of_product, "div": _of_quotient, "integer_pow": _of_power,
    "square": _of_power, "convert_element_type": _of_type, "complex": _of_two,
    "real": lambda eqn, operands: operands[0].real,
    "imag": lambda eqn, operands: _imaginary(operands[0]),
    "conj": lambda eqn, operands: Parts(operands[0].real, None if operands[0].imag is None else -operands[0].imag),
    "abs": _of_length,
}  # fmt: skip
"""These functions compute the results of operations in parts, by the names of the operations."""
_ON_GPUS: Mapping[str, _Rule] = {"dot_general": _of_matrices}
"""Rules for operations that XLA computes well on a CPU."""
