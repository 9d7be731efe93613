"""Requests that wait: intake, validation, fairness, order, deadlines."""
