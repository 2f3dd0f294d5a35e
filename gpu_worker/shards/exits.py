"""Exit statuses by which a rank says why it ended."""

EXIT_GROUP_LOST = 70
"""A rank that leaves because another was lost; it is not to blame."""

EXIT_FAILED = 71
"""A rank that had an error of its own, which is in its log."""
