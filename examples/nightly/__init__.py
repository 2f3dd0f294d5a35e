"""A recommendation pipeline that runs every night: docs/guides/recommendations.md."""
