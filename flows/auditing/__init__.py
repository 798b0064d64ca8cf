"""Proof that nothing of a run was edited: every byte has its digest, and every digest is the one that records name."""
