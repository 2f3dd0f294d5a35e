"""The whole system on one machine: a private broker, planner and GPU worker, under one command."""
