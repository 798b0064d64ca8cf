"""The ledger of a run: the cost of every attempt, limits, prices, and estimates from earlier runs."""
