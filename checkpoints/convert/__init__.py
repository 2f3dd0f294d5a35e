"""Converts checkpoints of training frameworks into directories that are served.  Needs no torch."""

from nightjar.checkpoints.convert.converting import DTYPES, Conversion, Converted, convert

__all__ = ["DTYPES", "Conversion", "Converted", "convert"]
