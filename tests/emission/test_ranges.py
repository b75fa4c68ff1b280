"""The pass before a kernel finds the ends of ranges that the float64 evaluation of their nests finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.emission.ranges import range_ends
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64
from pallasfuse.ir.evaluate import evaluate_nest
from pallasfuse.ir.expr import apply, const, convert, index, read
from pallasfuse.tiling.ranges import range_of

B, I, J = Axis("b", 3), Axis("i", 5), Axis("j", 7)  # noqa: E741
N = Axis("n", 7)


def whole(tensor, *axes):
    return read(tensor, axes, "int32")


PREDICATES = {
    "array": read("m", (I, J), "bool"),
    "transposed": read("t", (J, I), "bool"),
    "columns": read("c", (J,), "bool"),
    "rows": apply("lt", index(I), const(3, "int32")),
    "segments": apply("eq", whole("s", B, J), whole("s", B, N)),
    "lengths": apply("lt", index(J), read("l", (B,), "int32")),
    "one": apply("lt", index(J), read("z", (), "int32")),
    "diagonal": apply("eq", whole("d", J, J), index(J)),
    "floats": apply("and", apply("ne", read("f", (I, J), "float32"), const(0.0, "float32")), read("m", (I, J), "bool")),
    "chosen": apply("select", read("c", (J,), "bool"), read("m", (I, J), "bool"), const(True, "bool")),
    "converted": apply("gt", convert(read("m", (I, J), "bool"), "int32"), const(0, "int32")),
}


def tensors(seed):
    random = np.random.default_rng(seed)
    return {
        "m": random.random((5, 7)) < 0.3, "t": random.random((7, 5)) < 0.3, "c": random.random(7) < 0.3,
        "s": np.sort(random.integers(0, 3, (3, 7))).astype(np.int32), "l": np.array([0, 4, 9], np.int32), "z": np.int32(2),
        "d": random.integers(0, 7, (7, 7)).astype(np.int32), "f": (random.random((5, 7)) < 0.5).astype(np.float32),
    }  # fmt: skip


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("name", PREDICATES)
def test_ends_are_those_of_the_nests(name):
    predicate = PREDICATES[name]
    found = range_of(predicate, J, tuple(sorted(predicate.axes - {J})), number=0, all_if_none=False)
    for seed in range(4):
        arrays = tensors(seed)
        ends = jax.jit(lambda known: range_ends((found,), known))({k: jnp.asarray(x) for k, x in arrays.items()})
        assert set(ends) == {"j.left", "j.right", "j.count"}
        for nest in found.nests:
            want = evaluate_nest(nest, {k: np.asarray(x) for k, x in arrays.items()}, FLOAT64)
            assert ends[nest.name].dtype == jnp.int32
            np.testing.assert_array_equal(ends[nest.name], want)


def test_what_it_reads_is_read_once_and_no_predicate_is_stored():
    """One reduction of triples: XLA's kernels hold nothing as large as the mask."""
    segments = jnp.arange(4096, dtype=jnp.int32) // 512
    wide, other = Axis("j", 4096), Axis("i", 4096)
    predicate = apply("eq", read("s", (other,), "int32"), read("s", (wide,), "int32"))
    found = range_of(predicate, wide, (other,), number=1, all_if_none=True)
    compiled = jax.jit(lambda s: range_ends((found,), {"s": s})).lower(segments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
    ends = compiled(segments)
    np.testing.assert_array_equal(ends["j.right1"], (segments + 1) * 512)
    np.testing.assert_array_equal(ends["j.left1"], 4096 - segments * 512)
    np.testing.assert_array_equal(ends["j.count1"], np.full(4096, 512))
