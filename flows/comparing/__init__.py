"""Two runs side by side: where they part, and how settings, data, rewards, weights and pictures differ."""
