"""What XLA does around kernels, read in what it compiles for an H100: what it stores for one in a loop's body is what the kernel's
price says, and rows that it reads from one are as good as others."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasfuse as pf
from benchmarks import h100
from pallasfuse.options import FuseOptions

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not h100.can_compile(), reason="needs requirements/aot-0.11.txt: make test-aot"),
]

_LAUNCHES = r"= (?:\(.*?\)|\S+) (?:fusion|fusion-start|copy|custom-call)\("


def launches_of_a_trip(function, arguments):
    """The launches in the body of the only loop of a compiled function."""
    text = h100.compile_for_h100(function, arguments).text
    (body,) = set(re.findall(r"body=%?([\w.\-]+)", text))
    (inside,) = re.findall(rf"^%?{re.escape(body)} .*?^}}", text, re.MULTILINE | re.DOTALL)
    return len(re.findall(_LAUNCHES, inside))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def softmax(x):
    return jax.nn.softmax(x, -1)


ROWS, MANY = array(512, 1024), array(5, 512, 1024)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda xs: lax.map(softmax, xs), [MANY]),
        (lambda c, xs: lax.scan(lambda c, x: (softmax(c + x), None), c, xs)[0], [ROWS, MANY]),
        (lambda c: lax.fori_loop(0, 9, lambda i, c: softmax(c), c), [ROWS]),
        (lambda xs: lax.scan(lambda c, x: (c, softmax(x)), 0.0, xs, reverse=True)[1], [MANY]),
    ],
    ids=["map", "scan", "fori", "backwards"],
)
def test_a_trip_launches_the_kernel_its_copies_and_the_counter(function, arguments):
    fused = pf.fuse(function, options=FuseOptions(check=False, price=False))
    (body,) = fused.explain(*arguments, target="triton").bodies
    (stored,) = body.plan.at_boundary.values()
    assert launches_of_a_trip(fused, arguments) == 1 + sum(t.amount for t in stored.terms) + 1


def test_rows_of_parts_that_a_kernel_knows_are_rows_to_xla():
    """The kernel has the keys' two axes; the softmax that is left reads rows of one, and is one kernel as without ours."""

    def scores(q, k):
        return jnp.tanh(jnp.einsum("bmd,bnd->bmn", q, k.reshape(64, 640, 64)))

    fused = pf.fuse(lambda q, k: pf.leave(softmax)(scores(q, k)), options=FuseOptions(check=False, price=False))
    arguments = [array(64, 80, 64), array(64, 8, 80, 64)]
    (kernel,) = fused.explain(*arguments, target="triton").kernels
    assert [a.extent for a in kernel.group.outputs[0].axes] == [64, 80, 8, 80]
    text = h100.compile_for_h100(fused, arguments).text
    assert len(re.findall(_LAUNCHES, text[text.index("ENTRY") :])) == 2
