"""Calls that are not checked: by options, by the environment, or because no device is at hand."""

import jax
import pytest

import pallasfuse as pf
from pallasfuse.options import FuseOptions
from tests.check.clock import X, same
from tests.programs_by_name import softmax


@pytest.mark.parametrize(
    "options",
    [
        FuseOptions(check=False),
        FuseOptions(target="xla"),
        FuseOptions(tiles=(("i", 8),)),
        FuseOptions(parts=1),
        FuseOptions(strict=True),
    ],
)
def test_who_asks_for_something_gets_it(clock, options):
    compared = clock(0.5)
    same(pf.fuse(softmax, options=options)(X), softmax(X))
    assert compared.compared == []


def test_check_is_true_for_a_named_target(clock):
    compared = clock(0.5)
    pf.fuse(softmax, options=FuseOptions(target="xla", check=True))(X)
    assert len(compared.compared) == 1


def test_strict_and_checked_says_what_was_lost(clock):
    clock(0.5)
    with pytest.raises(pf.FusionError, match="not faster than XLA's on this device"):
        pf.fuse(softmax, options=FuseOptions(strict=True, check=True))(X)


def test_the_environment_switches_it_off(clock, monkeypatch):
    compared = clock(0.5)
    monkeypatch.setenv("PALLASFUSE_CHECK", "0")
    pf.fuse(softmax)(X)
    pf.fuse(softmax, options=FuseOptions(check=True))(X)
    assert compared.compared == []


def test_export_is_not_checked(clock):
    compared = clock(0.5)
    exported = jax.export.export(jax.jit(pf.fuse(softmax)))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    same(exported.call(X), softmax(X))
    assert compared.compared == []


def test_another_platform_is_not_checked(clock):
    compared = clock(0.5)
    jax.jit(pf.fuse(softmax)).trace(X).lower(lowering_platforms=("tpu",))
    assert compared.compared == []


def test_stages_lower_what_they_show(clock):
    compared = clock(0.5)
    tiled = pf.fuse(softmax).trace(X).fuse().tile()
    assert tiled.plan.kernels
    same(tiled.lower().compile()(X), softmax(X))
    assert compared.compared == []


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"FuseOptions\.check"):
        FuseOptions(check="yes")
