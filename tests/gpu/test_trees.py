"""On a GPU: kernels of schedule trees by Triton, those written down and random ones, against float64."""

import jax
import pytest

from pallasfuse.errors import Refusal
from pallasfuse.fusion.candidate import unsupported
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.tree import show
from pallasfuse.pallas_backend import kernel_resources
from pallasfuse.targets import TARGETS
from pallasfuse.tiling.trees import lower_tree
from pallasfuse.triton_gpu import kernel, rules
from tests.tiling.test_random_trees import NAMES, walked
from tests.tiling.test_tree_kernels import KERNELS, SUBJECTS
from tests.tiling.tree_programs import TILES, on_machine

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@pytest.fixture(autouse=True, scope="module")
def _float32_products():
    with jax.default_matmul_precision("highest"):
        yield


def on_triton(subject, tree):
    for nest in subject.region.nests:
        if unsupported(nest, TARGETS["triton"]):
            pytest.skip(unsupported(nest, TARGETS["triton"]))
    programs = lower_tree(subject.region, tree, FoldsOnDemand(subject.region), TILES["dots"])
    assert not isinstance(programs, Refusal), programs
    for program in programs:
        problem = rules.problem(program) or kernel_resources.beyond_shared_memory(program, TARGETS["triton"])
        if problem is not None:
            pytest.skip(problem)
    on_machine(subject, programs, kernel.run)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_are_written_down(name):
    on_triton(SUBJECTS[name[0]], SUBJECTS[name[0]].tree(KERNELS[name]))


@pytest.mark.parametrize("seed", range(8 * len(NAMES)))
def test_random_trees(seed):
    subject, tree, _ = walked(seed)
    try:
        on_triton(subject, tree)
    except Exception as error:
        error.add_note(f"{show(tree)}\nof\n{subject.region}")
        raise
