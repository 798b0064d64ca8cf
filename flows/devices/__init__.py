"""Devices of this machine, what stages need of them, and folders of stages at work."""
