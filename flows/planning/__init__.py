"""All that is known before anything runs: the plan, its steps, costs and memory."""
