"""ImageReward: its model and its weights."""
