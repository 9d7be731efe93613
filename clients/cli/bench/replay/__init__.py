"""Workloads against the planner, with simulated workers, in virtual time."""
