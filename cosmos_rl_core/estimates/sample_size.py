"""The effective size of a weighted sample."""

from typing import Any

import numpy as np


def effective_sample_size(log_ratios: Any) -> float:
    """Return ``(sum w)^2 / (n sum w^2)`` of a column, with w the exponential of each log-ratio: 1 if all are equal.

    Source: Kong, A Note on Importance Sampling using Standardized Weights, 1992.
    """
    weights = np.exp(log_ratios - log_ratios.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
