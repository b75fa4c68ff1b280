"""Which targets have a kernel for a group at all, whatever its tiles."""

from pallasfuse.ir.axes import volume
from pallasfuse.ir.fold import Group
from pallasfuse.targets import Target, find
from pallasfuse.tiling import clusters


def unsuited(group: Group, target: Target, *, by_name: bool = False) -> str | None:
    """Why a target has no kernel for a group. by_name: it was asked for, even if another one is as fast."""
    if target.cluster:
        return clusters.impossible(group) or (None if by_name else clusters.slower(group, target))
    long = next((n for n in group.inner if volume(n.reduced) > target.max_inner), None)
    if long is None:
        return "it only has kernels for products whose sum no tile holds" if target.only_long_products else None
    if target.platform == "cpu" or target.only_long_products:
        return None
    return f"{long.name} sums {volume(long.reduced)} elements, too many to keep inside a tile"


def stands_in(group: Group, target: Target) -> bool:
    """Is there a target that may have a kernel where this one has none?"""
    while target.otherwise:
        target = find(target.otherwise)
        if unsuited(group, target) is None:
            return True
    return False
