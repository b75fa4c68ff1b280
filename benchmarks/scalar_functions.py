"""How long each scalar function takes on the device at hand, beside its price: the source of `pallasfuse/price/operations.py`.

    python benchmarks/scalar_functions.py
    python benchmarks/scalar_functions.py sin cos --elements-of-a-thread 8 32 128

Each program applies a function several times to every element and adds the results up. On a GPU the first column is XLA's loop, and
further ones are Triton kernels of four warps with more and more elements in a thread: beyond some thousands of instructions their
code does not stay in a multiprocessor's cache. Times are microseconds; on a CPU, which must be otherwise idle, of wall time.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.program_kernels import device_at_hand
from benchmarks.program_timing import kernel_times
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import price_xla

type Scalar = Callable[[Any], Any]

FUNCTIONS: dict[str, Scalar] = {
    "nothing": lambda x: x, "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log, "log1p": jnp.log1p,
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan,
    "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh, "atanh": jnp.arctanh,
    "acosh": lambda x: jnp.arccosh(x + 1), "logistic": lax.logistic, "erf": lax.erf, "erfc": lax.erfc, "erf_inv": lax.erf_inv,
    "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "cbrt": jnp.cbrt, "div": lambda x: 1.5 / x, "pow": lambda x: lax.pow(x, x),
    "atan2": lambda x: jnp.arctan2(x, x + 0.3), "rem": lambda x: lax.rem(x, x + 0.3), "round_even": jnp.round,
    "sign": jnp.sign, "floor": jnp.floor, "nextafter": lambda x: jnp.nextafter(x, jnp.full_like(x, 2)),
    "lgamma": lax.lgamma, "digamma": lax.digamma, "igamma": lambda x: lax.igamma(x + 0.5, x), "bessel_i0e": lax.bessel_i0e,
    "zeta": lambda x: lax.zeta(x + 1.5, x), "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), x),
}  # fmt: skip
TIMES = {"gpu": 8, "cpu": 4}
"""How often a program applies a function to an element, by platform."""
ELEMENTS = {"gpu": 1 << 22, "cpu": 1 << 20}
_THREADS = 128


def repeated(function: Scalar, times: int) -> Scalar:
    """Returns the sum of a function of an element and of numbers beside it."""

    def program(x: Any) -> Any:
        return sum((function(x + n / 128) for n in range(times)), x * 0)

    return program


def in_kernel(function: Scalar, each: int, shape: Any) -> Scalar:
    """Returns a Triton kernel that applies a function to so many elements in each thread."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def kernel(read: Any, written: Any) -> None:
        written[...] = function(read[...])

    block = pl.BlockSpec((each * _THREADS,), lambda n: (n,))
    return pl.pallas_call(
        kernel, out_shape=shape, grid=(shape.size // (each * _THREADS),), in_specs=[block], out_specs=block,
        compiler_params=triton.CompilerParams(num_warps=_THREADS // 32),
    )  # fmt: skip


def microseconds(call: Any, *arguments: Any) -> float:
    """Times a compiled call: sums of kernel times on a GPU, the least wall time of several on a CPU."""
    jax.block_until_ready(call(*arguments))
    if jax.default_backend() == "gpu":
        return statistics.median(sum(us for _, us in launches) for launches in kernel_times(call, arguments, 5))
    found = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        found.append(1e6 * (time.perf_counter() - start))
    return min(found)


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each function: what is measured and what is predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="functions; all by default")
    parser.add_argument("--elements", type=int, help="of the array; by default as for the numbers of the price")
    parser.add_argument("--elements-of-a-thread", type=int, nargs="*", default=[], help="also Triton kernels (GPU)")
    options = parser.parse_args(words)
    device = device_at_hand()
    count, times = options.elements or ELEMENTS[device.platform], TIMES[device.platform]
    x = jax.random.uniform(jax.random.key(0), (count,), minval=0.1, maxval=0.9)
    print(f"{count} elements, {times} times: {device.kind}")
    for name in options.names or FUNCTIONS:
        program = repeated(FUNCTIONS[name], times)
        measured_us = microseconds(jax.jit(program).lower(x).compile(), x)
        predicted_us = price_xla(convert(jax.make_jaxpr(program)(x)).program, device).us
        line = f"{name:<12} {measured_us:9.1f} us, predicted {predicted_us:9.1f} ({predicted_us / measured_us:.2f})"
        for each in options.elements_of_a_thread:
            try:
                call = (
                    jax.jit(in_kernel(FUNCTIONS[name], each, jax.ShapeDtypeStruct(x.shape, x.dtype))).lower(x).compile()
                )
                line += f"  {each}: {microseconds(call, x):.1f}"
            except Exception as failure:  # Pallas does not lower all of them
                line += f"  {each}: {type(failure).__name__}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
