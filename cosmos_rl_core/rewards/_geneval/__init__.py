"""GenEval: its rule and its detector."""
