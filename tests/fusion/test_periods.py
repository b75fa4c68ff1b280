"""Where a long program repeats itself."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.fusion.segments import Run, longest_run, signature
from pallasfuse.jaxpr_frontend import convert


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("abcdef", None),
        ("abcabc", None),  # twice is not often enough
        ("abcabcabc", Run(0, 9, 3)),
        ("xyabcabcabcabz", Run(2, 13, 3)),
        ("aaaaaaa", Run(0, 7, 1)),
        ("aabaabaab", Run(0, 9, 3)),
        ("xxxabababab", Run(3, 11, 2)),
        ("ababab" + "-" + "cdefcdefcdef", Run(7, 19, 4)),
    ],
)
def test_the_longest_run_with_its_smallest_period(text, found):
    assert longest_run([ord(c) for c in text]) == found


def nests(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    return convert(jaxpr).program.nests


def test_a_signature_is_that_of_the_operation():
    def function(x, y, z):
        return (
            x + 1,
            y + 1,
            x + 2,
            x * 1,
            z + 1,
            jnp.float16(x) + 1,
            x.sum(0),
            y.sum(0),
            x.sum(1),
            x.max(0),
            jnp.sort(x),
        )

    found = [signature(n) for n in nests(function, (8, 16), (8, 16), (16, 8))]
    assert found[0] == found[1]
    sums = [signature(n) for n in nests(lambda x, y: (x.sum(0), y.sum(0)), (8, 16), (8, 16))]
    assert sums[0] == sums[1]
    assert len(set(found)) == len(found) - 2
