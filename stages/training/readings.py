"""Numbers of an optimizer step that stay on the device until all of them are read together."""

from collections.abc import Callable

import torch
from torch import Tensor

Take = Callable[[list[float]], object]


class Readings:
    """Tensors whose numbers are wanted, each with the function to call. Only :meth:`read` waits for the device."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Tensor, Take]] = []

    def want(self, tensor: Tensor, take: Take) -> None:
        """Have ``take`` called with the numbers of a tensor of any shape, flat, at the next :meth:`read`."""
        self._wanted.append((tensor.detach().reshape(-1), take))

    def read(self) -> None:
        """Copy all numbers to the host at once, in float64, and hand them out in the order of :meth:`want`."""
        wanted, self._wanted = self._wanted, []
        if not wanted:
            return
        # Norms of rows that are in CPU memory need no copy.
        device = next((tensor.device for tensor, _ in wanted if tensor.device.type != "cpu"), torch.device("cpu"))
        numbers = torch.cat([tensor.to(device).double() for tensor, _ in wanted]).cpu().tolist()
        first = 0
        for tensor, take in wanted:
            take(numbers[first : first + len(tensor)])
            first += len(tensor)
