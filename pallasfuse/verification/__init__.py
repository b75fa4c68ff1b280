"""Probabilistic equivalence over finite fields, and the float64 reference (Mirage, section 5)."""
