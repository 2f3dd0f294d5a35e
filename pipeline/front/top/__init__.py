"""A view of a deployment in a terminal that renews itself: `nightjar top`."""
