"""Wrong types, side effects, Python-dependent functions and unusual element types: as `jax.jit`, or an error that says more."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback, sparse

import pallasfuse as pf
from pallasfuse.errors import PallasfuseError, TargetError, TraceError
from pallasfuse.options import FuseOptions
from tests.programs_by_name import softmax

X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")
Pair = collections.namedtuple("Pair", ["left", "right"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    x: object
    name: str = dataclasses.field(metadata={"static": True}, default="")


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        values = [np.asarray(jax.random.key_data(x) if is_key else x, "complex128") for x in (a, b)]
        np.testing.assert_allclose(*values, rtol=2e-5, atol=1e-6)


def as_jit(function, *args, **options):
    """The fused function gives what `jax.jit` gives: the same values, or the same error with the same message."""
    try:
        want = jax.jit(function, **options)(*args)
    except Exception as error:
        with pytest.raises(type(error)) as raised:
            pf.fuse(function, **options)(*args)
        first, second = (str(e).split(" for jit.")[0].split(" at 0x")[0].splitlines() for e in (error, raised.value))
        assert first == second
        return raised.value
    same(pf.fuse(function, **options)(*args), want)
    return None


# --- arguments and results that are, or are not, arrays

STRUCTURED = np.zeros(3, dtype=[("a", "f4")])
NO_ARRAYS = ["text", object(), np.array(["a"]), np.array([object()]), np.array(["2020-01-01"], "datetime64[D]"), STRUCTURED,
             np.ma.masked_array(X), 2**70, lambda: 0, {1, 2}]  # fmt: skip


@pytest.mark.parametrize("argument", NO_ARRAYS, ids=lambda x: type(x).__name__)
def test_what_is_no_array_is_named(argument):
    error = as_jit(softmax, argument)
    if isinstance(error, TypeError):
        assert "path x" in str(error)  # the parameter's own name
        with pytest.raises(TraceError, match=r"softmax could not be traced: .*(.|\n)*static_argnums"):
            pf.fuse(softmax).explain(argument)


@pytest.mark.parametrize("result", ["text", object(), {1}, [X, "text"]], ids=lambda x: type(x).__name__)
def test_results_that_are_no_arrays(result):
    assert isinstance(as_jit(lambda x: result, X), TypeError)


SCALARS = (3, True, 2.5, 1j, np.float32(2), np.int8(3), np.bool_(True), None, np.arange(3))


def test_results_that_are_scalars_or_nothing():
    as_jit(lambda x: (softmax(x), *SCALARS), X)
    as_jit(lambda x: None, X)
    as_jit(lambda: softmax(jnp.arange(5.0)))


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("argument", [3, True, 2.5, np.float64(2), [1.0, 2.0], (X, 2), None, [], {}], ids=str)
def test_arguments_that_are_scalars_lists_or_nothing(argument):
    as_jit(lambda a: softmax(jnp.ones((3, 4)) * sum(jnp.sum(x) for x in jax.tree.leaves(a))), argument)


def test_containers():
    inputs = {"pair": Pair(X, Record(X + 1, "name")), "more": [X, (None, 2.0)]}
    as_jit(
        lambda t: Pair(softmax(t["pair"].left), {t["pair"].right.name: Record(softmax(t["pair"].right.x), "new")}),
        inputs,
    )


def test_unregistered_dataclass():
    @dataclasses.dataclass
    class Unregistered:
        x: object

    assert isinstance(as_jit(lambda r: softmax(r.x), Unregistered(X)), TypeError)


def test_wrong_number_and_names_of_arguments():
    as_jit(softmax, X, X, X, X, X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        pf.fuse(softmax)(X, y=1)


@pytest.mark.parametrize(
    "options", [{"static_argnums": 5}, {"static_argnames": "other"}, {"static_argnums": -4}], ids=str
)
def test_static_arguments_that_do_not_exist(options):
    with pytest.raises(ValueError, match="static_arg"):
        pf.fuse(softmax, **options)


@pytest.mark.parametrize(
    "options", [{"static_argnums": "x"}, {"static_argnums": (1.5,)}, {"static_argnames": (3,)}], ids=str
)
def test_static_arguments_of_a_wrong_type(options):
    with pytest.raises(TypeError, match="static_argnums are integers and static_argnames are strings"):
        pf.fuse(softmax, **options)


def test_unhashable_static_argument():
    as_jit(lambda x, o: softmax(x), X, [1], static_argnums=1)


# --- functions that depend on Python, or act on it


def test_python_shapes_and_values():
    as_jit(lambda x: softmax(x) if x.shape[0] > 3 else x, X)
    for function in (
        lambda x: softmax(x) if x.sum() > 0 else x,
        lambda x: softmax(x) * float(x[0, 0]),
        lambda x: softmax(x)[: int(x[0, 0])],
        lambda x: softmax(np.exp(x)),
        lambda x: softmax(x.reshape(x[0].astype(int))),
    ):
        assert isinstance(as_jit(function, X), jax.errors.JAXTypeError | TypeError)
        with pytest.raises(TraceError) as raised:
            pf.fuse(function).explain(X)
        assert raised.value.__cause__ is not None


def test_the_user_s_exceptions_pass_unchanged():
    class Mine(Exception):
        pass

    def raises(error):
        def function(x):
            softmax(x)
            raise error

        return function

    for error in (
        Mine("here", 3),
        KeyError("k"),
        ValueError("v"),
        AssertionError(),
        StopIteration(1),
        NotImplementedError(),
    ):
        for call in (pf.fuse(raises(error)), pf.fuse(raises(error)).explain, jax.jit(pf.fuse(raises(error)))):
            with pytest.raises(type(error)) as raised:
                call(X)
            assert raised.value is error


def test_side_effects_happen_once_in_order(capfd):
    written = []

    def function(x):
        jax.debug.print("first {}", x[0, 0] * 0)
        y = io_callback(
            lambda v: written.append("io") or np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True
        )
        y = softmax(y)
        jax.debug.callback(lambda v: written.append("debug"), y[0, 0], ordered=True)
        return y

    fused = pf.fuse(function)
    same(fused(X), softmax(jnp.asarray(X)))
    jax.effects_barrier()
    assert written == ["io", "debug"]
    assert capfd.readouterr().out.split() == ["first", "0.0"]
    assert "side effects" in str(fused.explain(X).fallbacks)


def test_a_pure_callback_stays_with_xla_and_the_rest_fuses():
    def function(x):
        return softmax(jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

    as_jit(function, X)
    assert pf.fuse(function).explain(X).kernels


def test_leaked_tracers():
    kept = []
    pf.fuse(lambda x: (kept.append(x), softmax(x))[1])(X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        kept[0] + 1


def test_callables_of_every_kind():
    class Scaled:
        def __call__(self, x):
            return softmax(x * 2)

    x = jnp.asarray(X)
    same(pf.fuse(Scaled())(x), softmax(x * 2))
    same(pf.fuse(functools.partial(jax.nn.softmax, axis=0))(x), jax.nn.softmax(x, axis=0))
    same(pf.fuse(jax.jit(softmax))(x), softmax(x))
    same(pf.fuse(pf.fuse(softmax))(x), softmax(x))
    same(pf.fuse(jnp.linalg.norm)(x), jnp.linalg.norm(x))
    for wrong in (None, 3, "softmax", X):
        if wrong is not None:  # fuse(None) is a decorator, as fuse()
            with pytest.raises(TypeError, match="takes a function, got"):
                pf.fuse(wrong)


# --- element types


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "uint32", "bool", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz",
     "float4_e2m1fn", "float16", "bfloat16", "complex64"],
)  # fmt: skip
def test_every_element_type_in_and_out(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, size=(4, 24)), dtype)
    as_jit(lambda x: (x, softmax(x.real.astype(jnp.float32)).astype(dtype)), x)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "complex64", "float8_e5m2", "int4"])
def test_reductions_of_types_that_are_not_fused(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, size=(4, 24)), dtype)
    as_jit(lambda x: (x - x.sum(-1, keepdims=True)).sum(-1), x)


def test_random_keys():
    as_jit(lambda k, x: (jax.random.split(k), softmax(x + jax.random.normal(k, x.shape))), jax.random.key(3), X)


def test_sparse_arguments():
    as_jit(lambda m, x: softmax(m @ x), sparse.BCOO.fromdense(jnp.eye(6)), X)


# --- buffers and devices


def test_deleted_and_donated_buffers():
    x = jnp.asarray(X)
    x.delete()
    as_jit(softmax, x)
    y = jnp.asarray(X)
    got = jax.jit(pf.fuse(softmax), donate_argnums=0)(y)
    same(got, softmax(jnp.asarray(X)))


def test_sharded_input_on_one_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    as_jit(softmax, x)
    same(jax.jit(pf.fuse(softmax), in_shardings=x.sharding)(x), softmax(x))


def test_compiled_stage_with_other_arguments():
    compiled = pf.fuse(softmax).trace(X).fuse().tile().lower().compile()
    for wrong in ((X[:2],), (X, X), (X.astype(int),), ()):
        with pytest.raises(TypeError):
            compiled(*wrong)


# --- options


@pytest.mark.parametrize(
    "options",
    [{"tiles": 3}, {"tiles": {"i": 4}}, {"tiles": ((3, 4),)}, {"tiles": ("ij",)}, {"tiles": (("i", 0),)},
     {"tiles": (("i", 2.0),)}, {"tiles": [("i", 4)]}, {"warps": -1}, {"warps": "4"}, {"stages": 0}],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_name_the_field_and_the_value(options):
    ((field, _),) = options.items()
    with pytest.raises(ValueError, match=rf"FuseOptions\.{field}.* got "):
        FuseOptions(**options)


@pytest.mark.parametrize("target", [3, ["xla"], "XLA", "", b"xla"], ids=str)
def test_unknown_targets(target):
    if target == "":
        return  # as None: the best one
    with pytest.raises(TargetError, match=r"no target .*: choose one of"):
        pf.fuse(softmax, target=target)


def test_options_of_a_wrong_type():
    with pytest.raises(TypeError, match="options is a FuseOptions, got dict"):
        pf.fuse(softmax, options={"target": "xla"})


def test_axes_that_do_not_exist():
    with pytest.raises(PallasfuseError, match=r"FuseOptions\.tiles names the axes zz, but the kernels tile i, j"):
        pf.fuse(softmax, options=FuseOptions(tiles=(("zz", 4),)))(X)
