"""Measurements of `scripts/calibrate.py`: what a price asks of a device, one function for each few numbers."""
