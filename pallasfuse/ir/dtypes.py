"""Element types by name. Kept as strings so that the IR needs neither JAX nor ml_dtypes."""

import math
import re

_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
_MANTISSA_EXPONENT = {"bfloat16": (7, 8), "float16": (10, 5), "float32": (23, 8), "float64": (52, 11)}

SUPPORTED = frozenset(_BYTES)
HALF = frozenset({"float16", "bfloat16"})
"""Floats of 16 bits: what is computed of them is often float32 in between."""


_OPAQUE_BYTES = 8
"""The size of an element whose type does not name it: a random key."""


def itemsize_bytes(dtype: str) -> int:
    """The size of an element, also of a type outside `SUPPORTED`, as XLA's part of a program may have: `complex64`, `key<fry>`."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else _OPAQUE_BYTES


def is_float(dtype: str) -> bool:
    return dtype in _MANTISSA_EXPONENT


def is_integer(dtype: str) -> bool:
    return dtype in _BYTES and not is_float(dtype) and dtype != "bool"


def largest(dtype: str) -> float:
    """The largest finite value of a floating-point type."""
    mantissa, exponent = _MANTISSA_EXPONENT[dtype]
    return math.ldexp(2.0 - 2.0**-mantissa, 2 ** (exponent - 1) - 1)


def smallest(dtype: str) -> float:
    """The smallest positive normal number of a floating-point type. What is smaller loses digits, or is taken for zero."""
    _, exponent = _MANTISSA_EXPONENT[dtype]
    return math.ldexp(1.0, 2 - 2 ** (exponent - 1))


def limits(dtype: str) -> tuple[float, float]:
    """Returns the magnitudes from which on numbers are rounded to infinity, and up to which they are rounded to zero."""
    mantissa, exponent = _MANTISSA_EXPONENT[dtype]
    if dtype == "float64":
        return math.inf, 0.0
    bias = 2 ** (exponent - 1) - 1
    return math.ldexp(2.0 - 2.0 ** -(mantissa + 1), bias), math.ldexp(1.0, -bias - mantissa)


def accumulator(dtype: str) -> str:
    """The type in which a reduction over `dtype` values is carried: half types accumulate in float32."""
    return "float32" if dtype in HALF else dtype


def is_exact_cast(source: str, target: str) -> bool:
    """Says whether converting source -> target keeps every value (and every infinity and NaN)."""
    if source == target:
        return True
    if is_float(source) and is_float(target):
        return all(a <= b for a, b in zip(_MANTISSA_EXPONENT[source], _MANTISSA_EXPONENT[target], strict=True))
    if source == "bool":
        return True
    if not is_integer(source):
        return False
    if is_float(target):
        return 8 * _BYTES[source] <= _MANTISSA_EXPONENT[target][0] + 1
    signed, to_signed = (not t.startswith("u") for t in (source, target))
    return is_integer(target) and _BYTES[source] < _BYTES[target] and (to_signed or not signed)
