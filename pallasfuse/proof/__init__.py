"""Proof of a plan: every stage of its derivation against the stage before (see `verification`).

- inlining, removal of duplicates: the same term for every result, with every operation uninterpreted;
- conversion: each nest against its equation, on random operands in the finite fields;
- each group: its folds, its masks and its tile programs against the nests that it replaces, on random inputs of the group. The
  group is shrunk to short axes and lowered again with small tiles, so that loops have several trips, tails and masked tiles;
- the bounds of the loops of the plan's own tile programs, at their actual extents.

A plan that is wrong has a part that is wrong, which passes with a probability of at most `delta`. What cannot be covered is
listed, and the plan does not count as proven.
"""

from pallasfuse.proof.proving import disproved_form, prove, short_kernels
from pallasfuse.proof.result import Counterexample, PlannedKernel, Proof

__all__ = ["Counterexample", "PlannedKernel", "Proof", "disproved_form", "prove", "short_kernels"]
