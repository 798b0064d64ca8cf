"""Generation of samples: the list of them, their division into units, and how ranks make and write them."""
