"""Which operations are decomposed, and where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import _compat
from pallasfuse.decompositions import Decomposer
from pallasfuse.decompositions.writing import as_usual
from pallasfuse.device import assumed, find
from pallasfuse.jaxpr_frontend import bodies, flatten
from tests.decompositions.test_short_axes import OTHERS, POINTS, distances
from tests.decompositions.test_windows import drawn

H200 = find("NVIDIA H200", "gpu")
IMAGES, WEIGHTS = drawn((2, 64, 256)), drawn((15, 1, 256))


def smoothed(x, w=WEIGHTS):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=x.shape[-1])


def operations(jaxpr):
    """The names of the operations of a jaxpr, those in bodies too."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for body in bodies(eqn):
            yield from operations(body)


def decomposed(function, *args, device="cpu", exclude=(), gain=1.25, clock=None):
    """A function's program decomposed, which must compute the same; and whether it is another one."""
    jaxpr = jax.make_jaxpr(function)(*args)
    made = Decomposer(assumed(device), exclude, gain, clock).of(jaxpr)
    found = _compat.eval_jaxpr(made, made.consts, *args)
    for have, want in zip(found, jax.tree.leaves(function(*args)), strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    return made, made is not jaxpr


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_channels_one_by_one_are_shifted(device):
    made, changed = decomposed(smoothed, IMAGES, device=device)
    assert changed == ("conv_general_dilated" not in operations(flatten(made)))
    assert changed or device == "gpu"


def test_points_are_apart_on_a_cpu_only():
    assert decomposed(lambda x, y: jnp.exp(-distances(x, y)).sum(1), POINTS, OTHERS, gain=1.0)[1]
    assert not decomposed(distances, POINTS, OTHERS, device="gpu", gain=1.0)[1]


def scanned(x):
    return lax.scan(lambda c, _: (jnp.tanh(smoothed(c)), c[0, 0]), x, length=3)


def until(x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, smoothed(c[1])), (0, x))[1]


def branch(x):
    return lax.cond(x[0, 0, 0] > 0, smoothed, lambda a: a + 1, x)


def called(x):
    return jax.jit(smoothed)(jax.checkpoint(smoothed)(x))


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("function", [scanned, until, branch, called])
def test_operations_in_bodies_and_calls(function):
    made, changed = decomposed(function, IMAGES)
    assert changed and "conv_general_dilated" not in operations(flatten(made))


@pf.leave
def left(x):
    return smoothed(x)


@pytest.mark.parametrize(
    "function, exclude",
    [
        (left, ()),
        (jax.named_scope("kept")(smoothed), ("kept",)),
        (lambda x: smoothed(x[:, :2, :8], WEIGHTS[..., :8]), ()),
        (lambda x: lax.conv_general_dilated(x, x, (1,), "SAME", dimension_numbers=("NWC", "OWI", "NWC")), ()),
    ],
    ids=["left", "excluded", "too little to see", "many channels"],
)
def test_what_stays(function, exclude):
    assert not decomposed(function, IMAGES, exclude=exclude)[1]


def counts(x, at):
    """Predicted to take 15 us as it is, and 7 with copies of the places."""
    return x + jnp.zeros(512).at[at].add(1.0)


def in_trips(length, body=counts):
    return lambda x, at: lax.scan(lambda x, _: (body(x, at), None), x, length=length)[0]


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (counts, False),
        (in_trips(1), False),
        (in_trips(4), True),
        (in_trips(4, in_trips(1)), True),
        (lambda x, at: lax.while_loop(lambda x: x[0] < 9.0, lambda x: counts(x, at), x), True),
        (lambda x, at: in_trips(9)(x, at[:256]), False),  # the shortest kernels take as long
    ],
    ids=["alone", "one trip", "four trips", "four times one", "some trips", "little"],
)
def test_operations_in_loops_count_by_their_trips(function, changes):
    jaxpr = jax.make_jaxpr(function)(jnp.zeros(512), jnp.zeros(65536, jnp.int32))
    assert (Decomposer(H200, (), H200.price_error).of(jaxpr) is not jaxpr) == changes


@pytest.mark.parametrize("spared", [(), ("dot_general",)])
def test_operations_are_spared_in_bodies_only(spared):
    def function(a, b):
        first = jnp.einsum("nij,njk->nik", a, b)
        return lax.scan(lambda c, _: (jnp.einsum("nij,njk->nik", c, b), None), first, length=9)[0]

    jaxpr = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((8192, 4, 4), jnp.float32)] * 2)
    made = Decomposer(assumed("cpu"), (), 1.2, spared=frozenset(spared)).of(jaxpr)
    assert list(operations(flatten(made))).count("dot_general") == len(spared)


@pytest.mark.parametrize("faster", [True, False])
def test_a_clock_overrules_the_price(faster):
    asked = []

    def clock(written, other):
        asked.append((written, other))
        return faster

    _, changed = decomposed(smoothed, IMAGES, clock=clock)
    assert changed == faster
    ((written, other),) = asked
    assert list(operations(written)) == ["conv_general_dilated"] and "conv_general_dilated" not in operations(other)


@pytest.mark.parametrize("function", [lax.atan, lax.tan, lambda x: lax.atan2(x, x[::-1])], ids=["atan", "tan", "atan2"])
def test_operands_that_are_rare_are_not_in_the_price(function):
    """A way that leaves them to the library is priced as if there were none."""
    x = jnp.linspace(-1.5, 1.5, 1 << 16)
    made, is_another = decomposed(function, x)
    assert is_another
    assert "cond" in operations(made)
    usual, choices = as_usual(made)
    assert "cond" not in operations(usual)
    assert choices == 1
    np.testing.assert_allclose(_compat.eval_jaxpr(usual, usual.consts, x)[0], function(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("function", [lax.atan, lax.tan])
@pytest.mark.parametrize(("length", "changes"), [(2000, False), (5000, False), (50_000, True)])
def test_a_choice_takes_longer_than_few_numbers(function, length, changes):
    assert decomposed(function, jnp.linspace(-1.5, 1.5, length))[1] == changes


def test_no_clock_is_asked_for_what_is_left():
    decomposed(left, IMAGES, clock=lambda written, other: pytest.fail("asked"))


def test_the_source_of_an_operation_is_that_of_what_it_stands_for():
    made, _ = decomposed(smoothed, IMAGES)
    assert {_compat.source_summary(e).split(":")[0].rsplit("/")[-1] for e in made.eqns} == {"test_decomposer.py"}


def test_equal_operations_are_asked_once():
    asked = []
    made, changed = decomposed(
        lambda x: smoothed(smoothed(x)), IMAGES, clock=lambda written, other: not asked.append(written)
    )
    assert changed and len(asked) == 1 and "conv_general_dilated" not in operations(flatten(made))


READERS = {
    "a map": (jax.nn.relu, False),
    "maps, the last of several": (lambda y: jnp.tanh(y * 2 + 1), False),
    "a part": (lambda y: y[:, ::2], False),
    "one channel of a map": (lambda y: jnp.exp(y)[..., 0], False),
    "nothing else": (lambda y: y, False),
    "a sum": (lambda y: jax.nn.relu(y).sum(1), True),
    "a product": (lambda y: jnp.pad(y * 2, ((0, 0), (1, 1), (0, 0))) @ jnp.ones((y.shape[-1], 3)), True),
    "a window": (lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"), True),
    "two maps": (lambda y: (jnp.sin(y), jnp.cos(y)), True),
}


@pytest.mark.parametrize("name", READERS)
def test_on_a_cpu_a_sum_of_shifted_arrays_is_stored_where_xla_would_compute_it_again(name):
    read, stored = READERS[name]
    made, changed = decomposed(lambda x: read(smoothed(x)), IMAGES, gain=1.0)
    assert changed
    assert ("optimization_barrier" in operations(flatten(made))) == stored


def test_on_a_gpu_it_is_not():
    made, _ = decomposed(lambda x: smoothed(x).sum(1), IMAGES, device="gpu", gain=1.0)
    assert "optimization_barrier" not in operations(flatten(made))
