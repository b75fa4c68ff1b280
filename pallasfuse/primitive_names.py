"""The names of the primitives that programs have from pallasfuse: the rooms below those that make them know them by these."""

FUSED_CALL = "pallasfuse"
"""A fused call inside of another program (`primitive`)."""
KERNEL_OF_LOOP = "pallasfuse_recurrence"
"""A loop that is one kernel (`loop_calls`)."""
