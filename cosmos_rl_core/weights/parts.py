"""Names of the parts of a policy and of the weights that a loss compares. Imports no torch."""

CURRENT = "current"
"""The trained weights."""
OLD = "old"
"""NFT's slow copy of ``current``."""
EMA = "ema"
"""The exponential moving average of ``current``."""
REFERENCE = "reference"
"""The weights that a KL term compares with ``current``: the base model's, unless the algorithm refreshes them."""
INIT = "init"
"""The adapter that lies frozen below ``current``; version 0 alone has this part."""
OPTIMIZER = "optimizer"
"""The moments and step counts of the optimizer."""
SCHEDULE = "schedule"
"""The numbers of finished iterations and optimizer steps."""
BEHAVIOUR = "behaviour"
"""The weights that generated the rollouts. Not stored as a part: it is ``current``, ``old`` or ``ema`` of a policy."""

STATE = (CURRENT, OLD, EMA, REFERENCE, OPTIMIZER, SCHEDULE)
"""The parts that training reads and writes."""
TRAINING_ONLY = (OLD, REFERENCE, OPTIMIZER)
"""The parts that only training reads; ``current`` and ``ema`` can be exported, ``schedule`` has the clocks."""
