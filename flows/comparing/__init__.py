"""Two runs side by side: where they part, and what differs of settings, data, rewards, weights and pictures."""
