"""What stands in for a frame that cannot be used."""

import math

import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.expr import read
from pallasfuse.ir.fold import Frame
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.tiling.passes import guarded, usable

VALUES = np.array([math.nan, -math.inf, -2.0, 0.0, 2.0**-70, 2.0**-62, 3.0, 2.0**62, 2.0**70, math.inf])
ROWS = Axis("i", len(VALUES))
X = read("x", (ROWS,), "float32")


def evaluated(root):
    nest = Nest("y", (ROWS,), root, root.dtype)
    return evaluate(LoopProgram((Tensor("x", (ROWS,), "float32"),), (nest,), ("y",)), {"x": VALUES})["y"]


def frame(positive, low=0.0, high=math.inf):
    return Frame("frame", (ROWS,), X, (), (), positive, low, high)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (frame(False), [0.0, 0.0, -2.0, 0.0, 2.0**-70, 2.0**-62, 3.0, 2.0**62, 2.0**70, 0.0]),
        (frame(True), [1.0, 1.0, 1.0, 1.0, 2.0**-70, 2.0**-62, 3.0, 2.0**62, 2.0**70, 1.0]),
        (frame(True, low=2.0**-62), [1.0, *[2.0**-62] * 5, 3.0, 2.0**62, 2.0**70, 1.0]),
        (frame(True, high=2.0**62), [1.0, 1.0, 1.0, 1.0, 2.0**-70, 2.0**-62, 3.0, *[2.0**62] * 3]),
        (frame(True, 2.0**-62, 2.0**62), [1.0, *[2.0**-62] * 5, 3.0, *[2.0**62] * 3]),
    ],
    ids=["any", "positive", "bounded-below", "bounded-above", "bounded"],
)
def test_guard(of, expected):
    np.testing.assert_array_equal(evaluated(guarded(X, of)), expected)
    kept = evaluated(usable(X, of))
    np.testing.assert_array_equal(VALUES[kept], np.array(expected)[kept])
