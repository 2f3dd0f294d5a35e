"""The Python client: what a user imports as `from nightjar import Client`."""
