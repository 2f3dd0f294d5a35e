"""Schedule files: read, checked and applied."""
