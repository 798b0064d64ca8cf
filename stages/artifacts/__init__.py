"""Slots, artifacts and attempts: what a stage is asked, what it leaves, and when that is current."""
