"""Hypothesis without deadlines: a machine that runs several tests at once makes examples slow."""

from hypothesis import settings

settings.register_profile("nightjar", deadline=None)
settings.load_profile("nightjar")
