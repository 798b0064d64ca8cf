"""A reward service with cosmos-rl's protocol: durable requests, one process per scorer, answers that name their scorer."""
