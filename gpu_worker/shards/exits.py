"""How a rank's process says why it ended."""

EXIT_GROUP_LOST = 70
"""Exit status of a rank that leaves because of another: it is not to blame."""
