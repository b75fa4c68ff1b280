"""The names of the primitives that programs have from pallasfuse, by which the rooms below those that make them know them; and of
JAX's own that several rooms ask for."""

FUSED_CALL = "pallasfuse"
"""A fused call inside of another program (`primitive`)."""
KERNEL_OF_LOOP = "pallasfuse_recurrence"
"""A loop that is one kernel (`loop_calls`)."""
WITH_BODIES = frozenset({"scan", "while", "cond"})
"""JAX's operations that have bodies or branches of their own, which run when they do."""
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""The platforms that fused calls are lowered for."""
UPDATES = frozenset(
    {"dynamic_update_slice", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
)
"""The operations that change a part of their first operand."""
