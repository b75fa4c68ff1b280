"""Whole programs that users run, for `benchmarks/programs.py`: importing this package fills the registry."""

from benchmarks.workloads import (  # noqa: F401  (each registers its programs)
    attention,
    chains,
    decoder,
    equinox_modules,
    fifth_models,
    fifth_programs,
    flax_modules,
    foreign_attention,
    foreign_language,
    foreign_losses,
    foreign_science,
    foreign_statistics,
    foreign_vision,
    fourth_models,
    fourth_programs,
    haiku_modules,
    held_out,
    layers,
    loops,
    losses,
    products,
    rows,
    second_language,
    second_science,
    second_training,
    second_vision,
    third_models,
    third_science,
    third_training,
    transformer_models,
    unseen,
    unseen_models,
)
from benchmarks.workloads.registry import SIZES, Built, NotInstalledError, Program, Size, build, programs

__all__ = ["SIZES", "Built", "NotInstalledError", "Program", "Size", "build", "programs"]
