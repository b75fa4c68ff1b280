"""Single kernels of XLA beside their prices: the programs that are timed, and the table."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import xla_alone
from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import price_xla
from pallasfuse.targets import XLA_CPU


def test_products_in_every_order_are_the_same_product():
    sizes = {"m": 5, "n": 7, "k": 3}
    a, b = np.arange(15.0).reshape(5, 3), np.arange(21.0).reshape(3, 7)
    for left, right in (("mk", "kn"), ("km", "kn"), ("mk", "nk"), ("km", "nk")):
        case = xla_alone.product(left, right, "float32", sizes)
        x, y = (jnp.asarray(v if o == p else v.T, jnp.float32) for v, o, p in ((a, left, "mk"), (b, right, "kn")))
        assert [s.shape for s in case.structs] == [x.shape, y.shape]
        np.testing.assert_allclose(case.function(x, y), a @ b)


def test_reductions_have_one_number_of_points():
    for kind in xla_alone.REDUCTIONS:
        cases = list(xla_alone.reductions(kind, 1 << 20))
        assert len(cases) > 20
        for case in cases:
            kept, reduced, columns = (int(n) for n in case.label.split()[1:-1])
            assert kept > 0
            assert kept * reduced * columns <= 1 << 20 < (kept + 1) * reduced * columns


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_programs_have_names_of_their_own_and_prices(platform):
    on = device.find("NVIDIA H100 80GB HBM3", "gpu") if platform == "gpu" else XLA_CPU.device
    for kind, cases in xla_alone.OTHERS.items():
        found = {c.label: c for c in cases(platform)}
        assert len(found) == len(list(cases(platform))) > 6
        for case in list(found.values())[:: 3 if platform == "gpu" else 7]:
            assert case.label.startswith(kind)
            assert price_xla(convert(flatten(jax.make_jaxpr(case.function)(*case.structs))).program, on).us > 0


def test_the_table_has_a_line_and_a_row_for_each_program(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(xla_alone.ELEMENTS, "cpu", 1 << 12)
    monkeypatch.setattr(xla_alone, "REDUCED", (4,))
    monkeypatch.setattr(xla_alone, "COLUMNS", (16,))
    xla_alone.main(["outer", "--out", str(tmp_path / "alone.json")])
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "alone.json").read_text())["rows"]
    assert [line.split()[0] for line in lines[1:-1]] == ["outer"] * len(rows) == ["outer"] * 3
    assert all(us > 0 and price_us > 0 for _, us, price_us in rows)
