"""The optimizer step, its schedules and the noise of training samples."""
