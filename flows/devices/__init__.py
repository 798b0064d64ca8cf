"""Devices of this machine, the devices that stages need, and folders of stages at work."""
