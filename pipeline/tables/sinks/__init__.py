"""Sinks: where the results of a task file go, beside the keys of its rows."""
