"""Everything known before a run starts: its plan, sizes, memory, time and Requests."""
