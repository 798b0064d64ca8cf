"""Generation of samples: which there will be, how they are divided into units, and how ranks make and write them."""
