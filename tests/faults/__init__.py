"""Faults in real commands: processes killed at seeded moments, disks that are full, stores and servers that fail."""
