"""Measurements: a real run, peers on the same machine, how cost grows."""
