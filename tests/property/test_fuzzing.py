"""The machinery of `make fuzz`: workers that crash or hang, the shrinker, and files of the corpus."""

import os
import time

import numpy as np
import pytest

from tests.property.corpus import load, save
from tests.property.fuzzing import Pool
from tests.property.growing import grow
from tests.property.programs import Recorded, Seeded
from tests.property.shrinking import shrink


@pytest.mark.deep
def test_a_crashed_or_slow_worker_is_replaced():
    pool = Pool(jobs=2, task_seconds=12.0)  # starting a worker takes a while on a busy machine
    tasks = [(os._exit, 7), (dict, [("seed", 1)]), (time.sleep, 60), (dict, [("seed", 2)])]
    came = {str(task[1]): (record, why) for task, record, why in pool.run(iter(tasks))}
    pool.close()
    assert came["7"] == (None, "the worker crashed (exit code 7)")
    assert came["60"] == (None, "took longer than 12 s")
    assert sorted(record["seed"] for record, _ in came.values() if record) == [1, 2]


def test_choices_replay():
    for seed in range(20):
        recorded = Recorded(rest=Seeded(seed))
        assert grow(Recorded(grow(recorded) and recorded.choices)) == grow(Seeded(seed))


@pytest.mark.deep
def test_the_shrinker_keeps_what_fails_only(tmp_path):
    seed = next(s for s in range(200) if "jnp.var" in grow(Seeded(s)).source and len(grow(Seeded(s)).body) > 6)
    small = shrink(seed, lambda program: "jnp.var" in program.source, seconds=600)
    assert len(small.body) <= 2, small
    assert len(small.results) == 1
    case, what, _ = load(save(small, "the variance", tmp_path, "variance"))
    assert what == "the variance"
    for a, b in zip(case.args, small.arguments(), strict=True):
        np.testing.assert_array_equal(a, b)
