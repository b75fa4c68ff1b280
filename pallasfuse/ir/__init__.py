"""Axes, scalar expressions, reducers and the three program representations. Pure Python: no JAX, no SymPy."""
