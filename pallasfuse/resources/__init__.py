"""Shared memory and registers of a kernel, known before it is compiled."""
