"""Nightjar: batch inference for GPT decoders through a message queue.

The rooms of the house stand at the root of the repository and are linked into
this package, which gives them one name to be imported by: docs/explanations/structure.md.
"""

__version__ = "0.1.0"
