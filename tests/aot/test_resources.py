"""Shared memory and registers are known before a kernel is compiled: a sample of `scripts/resources_report.py`."""

from itertools import islice

import jax
import pytest

from benchmarks import h100, kernels
from pallasfuse.pallas_backend.kernel_resources import resources
from pallasfuse.pallas_backend.mosaic_space import RESERVED_BYTES
from scripts.resources_report import OVERFLOW

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not h100.can_compile(), reason="needs requirements/aot-0.11.txt: make test-aot"),
]

SAMPLE = {
    "variants": 12,
    "cases": 8,
    "head_dimensions": 6,
    "harder": 6,
    "products": 8,
    "rows": 14,
    "tilings": 9,
    "loops": 3,
}
"""One subject of so many, for every family but whole programs, which take long to plan: the script compiles them."""


def sampled():
    for family in kernels.FAMILIES:
        every = SAMPLE.get(family.__name__)
        for subject in () if every is None else islice(family(), 1, None, every):
            yield pytest.param(subject, id=f"{family.__name__}-{subject.name}-{subject.target}".replace(" ", "-"))


SUBJECTS = list(sampled()) if h100.can_compile() else []  # planning them takes a while


def test_the_sample_is_large():
    assert len(SUBJECTS) >= 50
    assert {f.__name__ for f in kernels.FAMILIES} - SAMPLE.keys() == {"whole_programs"}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_estimate_is_below_what_the_compiler_reports(record_property, subject):
    for unit in kernels.units(subject):
        foretold = resources(unit.programs, unit.target)
        assert foretold is not None and not isinstance(foretold, str), foretold
        if foretold.shared_bytes > unit.target.shared_memory_bytes:  # tiles that were asked for, and do not fit
            with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit exceeded") as caught:
                unit.compile()
            assert int(OVERFLOW.search(str(caught.value))[1]) <= foretold.shared_bytes
            continue
        launch = unit.reported(unit.compile())
        record_property("kernel", f"{launch}, foretold {foretold.shared_bytes}, {foretold.registers}")
        assert launch.shared_bytes <= foretold.shared_bytes
        assert (launch.registers or 0) <= foretold.registers
        if unit.target.warpgroup_rows or unit.target.cluster:  # by construction
            assert foretold.shared_bytes - launch.shared_bytes in (0, RESERVED_BYTES)
