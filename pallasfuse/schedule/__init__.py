"""Schedule trees of a region: the space of them, pruned by named rules, priced by a model, searched (MCFuser, sections 3 and 4)."""
