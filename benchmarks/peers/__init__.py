"""The systems of the comparison: one runner file each, all behind one protocol."""
