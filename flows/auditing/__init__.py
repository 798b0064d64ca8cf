"""Proof that nothing of a run was edited: every byte against its digest, and every digest against what names it."""
