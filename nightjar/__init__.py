"""Nightjar: batch inference for GPT decoders through a message queue.

The folders of the repository's root are linked into this package, so that all are
imported under one name: docs/explanations/structure.md.
"""

__version__ = "0.1.0"
