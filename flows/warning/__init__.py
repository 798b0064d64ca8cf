"""Decisions on limits that tripped: a run goes on, waits until somebody approves, or has failed."""
