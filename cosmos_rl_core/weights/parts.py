"""Names of a policy's parts, and of the weights that a loss compares. Imports no torch."""

CURRENT = "current"
"""The weights that are trained."""
OLD = "old"
"""NFT's slow copy of ``current``."""
EMA = "ema"
"""The exponential moving average of ``current``."""
REFERENCE = "reference"
"""The weights that a KL term compares ``current`` with: the base model's, unless the algorithm renews them."""
OPTIMIZER = "optimizer"
"""The optimizer's moments."""
SCHEDULE = "schedule"
"""How many iterations and optimizer steps were done."""
BEHAVIOUR = "behaviour"
"""The weights that generated the rollouts. A policy has no such part; it is another policy's ``current``, ``old``..."""

STATE = (CURRENT, OLD, EMA, REFERENCE, OPTIMIZER, SCHEDULE)
"""The parts that the next version of a policy is made from."""
TRAINING_ONLY = (OLD, REFERENCE, OPTIMIZER)
"""The parts that only training reads; the others are exported or are the clocks."""
