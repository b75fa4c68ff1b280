"""All mutants, by room."""

from tests.mutation import (
    constant_mutants,
    emission_mutants,
    frontend_mutants,
    fusion_mutants,
    loop_mutants,
    range_mutants,
    repair_mutants,
    split_mutants,
    tiling_mutants,
)

MUTANTS = (
    *constant_mutants.MUTANTS,
    *frontend_mutants.MUTANTS,
    *fusion_mutants.MUTANTS,
    *repair_mutants.MUTANTS,
    *tiling_mutants.MUTANTS,
    *split_mutants.MUTANTS,
    *range_mutants.MUTANTS,
    *emission_mutants.MUTANTS,
    *loop_mutants.MUTANTS,
)
