"""Segments of long programs: they cover the program, stay within the limits, and are cut where little is alive."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.fusion.segments import _MOST_AGAIN, MOST_NESTS, MOST_REDUCTIONS, Run, longest_run, segments, signature
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.loop_program import Nest, verify
from pallasfuse.ir.renaming import canonical
from pallasfuse.jaxpr_frontend import convert

ROWS = jax.ShapeDtypeStruct((16, 512), jnp.float32)


def program_of(function):
    return convert(jax.make_jaxpr(function)(ROWS)).program


def layers(count):
    def function(x):
        for _ in range(count):
            e = jnp.exp(x - x.max(-1, keepdims=True))
            x = x + e / e.sum(-1, keepdims=True)
        return x

    return function


def test_a_program_within_the_limits_is_one_segment():
    program = program_of(layers(MOST_REDUCTIONS // 2))
    assert list(segments(program)) == [program]


@pytest.mark.parametrize("count", [MOST_REDUCTIONS // 2 + 1, MOST_REDUCTIONS, 100])
def test_layers_are_cut_where_only_one_value_is_alive(count):
    program = program_of(layers(count))
    parts = list(segments(program))
    assert [n.name for p in parts for n in p.nests] == [n.name for n in program.nests]
    for part in parts:
        verify(part)
        assert len(part.nests) <= MOST_NESTS
        assert sum(isinstance(n, Nest) and n.is_reduction for n in part.nests) <= MOST_REDUCTIONS
        assert len(part.inputs) == len(part.outputs) == 1
    assert parts[-1].outputs == program.outputs


def test_elementwise_chains_are_cut_by_length():
    def function(x):
        for n in range(3 * MOST_NESTS):
            x = jnp.sin(x) if n % 2 else jnp.cos(x)
        return x

    parts = list(segments(program_of(function)))
    assert 3 <= len(parts) <= 6
    assert all(len(p.nests) <= MOST_NESTS for p in parts)


def test_maps_of_positions_are_part_of_each_segment_that_reads_them():
    def function(x):
        visible = jnp.arange(x.shape[1]) <= jnp.arange(x.shape[0])[:, None]
        for _ in range(MOST_REDUCTIONS):
            x = x - jnp.where(visible, x, 0.0).sum(-1, keepdims=True)
        return x + 1

    parts = list(segments(program_of(function)))
    assert len(parts) == 1
    parts = list(segments(program_of(lambda x: function(function(x)))))
    assert len(parts) > 1
    for part in parts:
        verify(part)
        assert all(t.dtype != "bool" for t in part.inputs)


def test_maps_of_narrower_values_are_computed_again_behind_a_cut():
    """What crosses is the product in half precision and the largest of each row, not their difference in float32."""

    def function(x):
        logits = jnp.dot(x, jnp.cos(x).T).astype(jnp.bfloat16).astype(jnp.float32)
        shifted = logits - logits.max(-1, keepdims=True)
        results = [jnp.exp(shifted * n).sum(-1) for n in range(1, 2 * MOST_REDUCTIONS)]
        return results

    program = program_of(function)
    parts = list(segments(program))
    assert len(parts) > 1
    wide = {n.name for n in program.nests if len(n.axes) == 2 and n.dtype == "float32" and n.axes[0] != n.axes[1]}
    half = {n.name for n in program.nests if n.dtype == "bfloat16"}
    (crossing,) = half & set(parts[0].outputs)
    for part in parts[1:]:
        verify(part)
        assert crossing in {t.name for t in part.inputs}
        assert wide.isdisjoint(t.name for t in part.inputs)
        assert wide & {n.name for n in part.nests}
    inputs = {t.name: np.random.default_rng(0).normal(size=[a.extent for a in t.axes]) for t in program.inputs}
    values = dict(inputs)
    for part in parts:  # each from what those before it hand out
        found = evaluate(part, {t.name: values[t.name] for t in part.inputs})
        values |= {name: found[name] for name in part.outputs}
    want = evaluate(program, inputs)
    for name in program.outputs:
        np.testing.assert_allclose(values[name], want[name], rtol=1e-12)


def test_what_is_computed_again_behind_a_cut_is_a_few_maps():
    """A chain of sums on a half-precision product: what is far along it is stored, and the product read no more."""

    def function(x):
        y = jnp.dot(x, jnp.cos(x).T).astype(jnp.bfloat16).astype(jnp.float32)
        for n in range(40):
            y = y + n
        return [jnp.sin(y * n).sum(-1) for n in range(1, 2 * MOST_REDUCTIONS)]

    program = program_of(function)
    adds = {n.name for n in program.nests if getattr(n.body, "op", None) == "add"}
    parts = list(segments(program))
    assert len(parts) > 1 and len(adds) == 40
    assert all(len(adds & {n.name for n in part.nests}) <= _MOST_AGAIN for part in parts[1:])


def test_results_are_stored_once_and_read_behind_a_cut():
    def function(x):
        y = jnp.dot(x, jnp.cos(x).T).astype(jnp.bfloat16).astype(jnp.float32)
        return y, [jnp.sin(y * n).sum(-1) for n in range(1, 2 * MOST_REDUCTIONS)]

    program = program_of(function)
    first, *others = segments(program)
    result = program.outputs[0]
    assert result in first.outputs
    assert others and all(result in {t.name for t in part.inputs} for part in others)


def test_what_something_compares_crosses_a_cut_as_it_is():
    """The exponentials behind the cut are those whose largest was taken before it."""

    def function(x):
        y = jnp.exp(jnp.dot(x, jnp.cos(x).T).astype(jnp.bfloat16).astype(jnp.float32))
        top = y.max(-1, keepdims=True)
        return [jnp.sqrt(top - y).sum(0), *(jnp.sin(y * n).sum(-1) for n in range(1, 2 * MOST_REDUCTIONS))]

    program = program_of(function)
    (exp,) = [n.name for n in program.nests if getattr(n.body, "op", None) == "exp"]
    first, *others = segments(program)
    assert exp in first.outputs and others
    assert all(exp not in {n.name for n in part.nests} for part in others)


def test_every_output_is_made_by_a_segment():
    def function(x):
        results = []
        for _ in range(30):
            x = x - x.sum(-1, keepdims=True)
            results.append(x)
        return results

    program = program_of(function)
    made = [t for p in segments(program) for t in p.outputs]
    assert set(program.outputs) <= set(made)


@pytest.mark.parametrize("before", [0, 3])
def test_equal_layers_are_equal_segments(before):
    def function(x):
        for n in range(before):
            x = jnp.sin(x) + n * x.max(-1, keepdims=True)
        bias = jnp.cos(x[:1])
        for _ in range(8):
            y = x
            for _ in range(4):  # eight reductions a layer: two do not fit into half of a segment
                e = jnp.exp(y - y.max(-1, keepdims=True))
                y = jnp.tanh(y) + e / e.sum(-1, keepdims=True)
            x = x + y * bias
        return x.sum(0)

    parts = list(segments(program_of(function)))
    for part in parts:
        verify(part)
    forms = [canonical(p).program for p in parts]
    (layer, count), *_ = Counter(forms).most_common()
    assert count >= 7 and sum(isinstance(n, Nest) and n.is_reduction for n in layer.nests) == 8
    assert len(set(forms)) <= 3


def test_small_layers_share_segments():
    parts = list(segments(program_of(layers(48))))
    assert len(parts) == 8 and len({canonical(p).program for p in parts}) == 1


def test_two_kinds_of_layers_are_cut_for_themselves():
    def function(x):
        for _ in range(16):
            e = jnp.exp(x - x.max(-1, keepdims=True))
            x = x + e / e.sum(-1, keepdims=True)
        for _ in range(16):
            x = jnp.tanh(x) - x.min(-1, keepdims=True) * x.sum(-1, keepdims=True)
        return x

    forms = Counter(canonical(p).program for p in segments(program_of(function)))
    assert len(forms) <= 5 and len([n for n in forms.values() if n >= 2]) == 2


STEPS = [
    lambda x: x - x.max(-1, keepdims=True),
    lambda x: jnp.exp(x) / 3,
    lambda x: x / x.sum(-1, keepdims=True),
    lambda x: jnp.tanh(x) + x,
    lambda x: x - x.mean(0),
    lambda x: jnp.sqrt(jnp.abs(x)),
]


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_repetitions_is_cut(seed):
    """Short runs at the beginning, at the end, inside one another, and none: every nest is in one segment, in order."""
    rng = np.random.default_rng(seed)
    steps: list[int] = []
    while len(steps) < 90:
        layer = rng.integers(0, len(STEPS), rng.integers(1, 9)).tolist()
        steps += layer * int(rng.integers(1, 9))

    def function(x):
        for n in steps:
            x = STEPS[n](x)
        return x

    program = program_of(function)
    parts = list(segments(program))
    made = [n.name for p in parts for n in p.nests]
    assert dict.fromkeys(made).keys() == {n.name for n in program.nests}
    for part in parts:
        verify(part)
        assert sum(isinstance(n, Nest) and n.is_reduction for n in part.nests) <= MOST_REDUCTIONS


@pytest.mark.parametrize("repeated", [3, 4, 9])
@pytest.mark.parametrize("before", [0, 1])
def test_a_short_run_in_a_long_program(before, repeated):
    """The whole run fits into one segment: behind it comes what does not repeat."""

    def function(x):
        x = x * 2 if before else x
        for _ in range(repeated):
            x = jnp.tanh(x / x.sum(-1, keepdims=True)) * 3
        for n in range(2 * MOST_REDUCTIONS):
            x = x - n * x.max(-1, keepdims=True)
        return x

    program = program_of(function)
    parts = list(segments(program))
    assert [n.name for p in parts for n in p.nests] == [n.name for n in program.nests] and len(parts) > 1


def test_repeated_steps_inside_a_layer_are_not_cut():
    """Copies in a row, as libraries have them, look like layers of one operation: the chain around them stays together."""

    def function(x):
        for n in range(MOST_REDUCTIONS // 2 + 1):
            top = x.max(-1, keepdims=True) * (n + 1)
            for _ in range(5):
                top = jnp.tanh(top)
            e = jnp.exp(x - top)
            x = x + e / e.sum(-1, keepdims=True)
        return x

    parts = list(segments(program_of(function)))
    assert len(parts) > 1
    for part in parts:
        reducers = [n.reducer.name for n in part.nests if isinstance(n, Nest) and n.is_reduction]
        assert reducers == ["max", "sum"] * (len(reducers) // 2)


# --- where a long program repeats itself


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
