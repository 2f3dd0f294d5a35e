"""Traces of calls, from HTTP to the landed rows; an extra."""
