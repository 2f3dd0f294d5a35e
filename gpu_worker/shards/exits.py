"""How a rank's process says why it ended."""

EXIT_GROUP_LOST = 70
"""Exit status of a rank that leaves because of another: it is not to blame."""

EXIT_FAILED = 71
"""Exit status of a rank that met an error of its own, which it has written to its log."""
