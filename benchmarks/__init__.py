"""Measurements: the whole system, the engine beside its peers, and the bounds of both."""
