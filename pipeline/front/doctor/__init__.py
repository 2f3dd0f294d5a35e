"""Looks for what keeps a deployment from working, or will: `nightjar doctor`."""
