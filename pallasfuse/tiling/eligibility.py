"""Which targets have a kernel for a group at all, whatever its tiles."""

from pallasfuse.ir.axes import volume
from pallasfuse.ir.fold import Group
from pallasfuse.targets import Target
from pallasfuse.tiling import clusters


def unsuited(group: Group, target: Target, *, by_name: bool = False) -> str | None:
    """Why a target has no kernel for a group. by_name: it was asked for, even if another one is as fast."""
    if target.cluster:
        return clusters.impossible(group) or (None if by_name else clusters.slower(group, target))
    long = next((n for n in group.inner if volume(n.reduced) > target.max_inner), None)
    if long is None:
        return "it only has kernels for products whose sum no tile holds" if target.only_long_products else None
    if target.platform == "cpu" or target.only_long_products or target.slices_sums:
        return None
    return f"{long.name} sums {volume(long.reduced)} elements, too many to keep inside a tile"
