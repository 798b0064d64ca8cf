"""Numbers for people."""

import math


def number(value: float | None) -> str:
    """Format a float with four significant digits and an int with all; None, NaN and infinity become a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    return (str(value) if isinstance(value, int) else f"{value:.4g}").replace("-", "−")


def signed(value: float) -> str:
    """Format like :func:`number`, with a plus sign unless negative."""
    return number(value) if value < 0 or not math.isfinite(value) else f"+{number(value)}"
