"""Decisions on limits that tripped: a run goes on, waits until a person approves, or fails."""
