"""The benchmark of scalar functions measures what it names, and the price knows each of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import scalar_functions
from pallasfuse.price.operations import SPECIAL


def test_a_line_for_each_function(capsys):
    scalar_functions.main(["sign", "lgamma", "--elements", "4096"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["sign", "lgamma"]
    assert all("us, predicted" in line for line in lines[1:])


def test_each_application_counts():
    x = jnp.linspace(0.1, 0.9, 7)
    found = scalar_functions.repeated(jnp.exp, 3)(x)
    np.testing.assert_allclose(found, sum(jnp.exp(x + n / 128) for n in range(3)), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(scalar_functions.FUNCTIONS))
def test_functions_are_defined_where_they_are_measured(name):
    x = jnp.linspace(0.1, 0.9, 5)
    assert bool(jnp.isfinite(scalar_functions.FUNCTIONS[name](x)).all())


def test_special_functions_are_among_them():
    assert SPECIAL.keys() - scalar_functions.FUNCTIONS.keys() == {"bessel_i1e"}
