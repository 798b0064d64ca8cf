"""The report of a run at any time: what its page says beyond what artifacts hold, and where it is written."""
