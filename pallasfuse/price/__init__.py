"""Prices: how long a kernel takes on a device, as terms with units, and what XLA would take for the same nests."""
