"""A reward service with cosmos-rl's protocol: durable requests, a process a scorer, answers that name their scorer."""
