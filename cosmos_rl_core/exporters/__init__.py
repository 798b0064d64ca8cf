"""Files of weights for other programs."""
