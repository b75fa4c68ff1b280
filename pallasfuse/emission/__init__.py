"""Interpreter of tile programs over JAX values; backends give it memory, loops and matrix products."""
