"""Time-outs as users give them."""

import math
import time


class Deadline:
    """The end of a time-out that starts now."""

    def __init__(self, timeout: float | None) -> None:
        """
        Args:
            timeout: In seconds. None: there is no end.

        Raises:
            TypeError: Not a number.
            ValueError: Below 0, or not a number of seconds at all (nan).
        """
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, int | float):
                raise TypeError(f"timeout is {timeout!r}, but must be a number of seconds, or None to wait for ever")
            if math.isnan(timeout) or timeout < 0:
                raise ValueError(f"timeout is {timeout}, but must be at least 0 seconds, or None to wait for ever")
        self._end = None if timeout is None else time.perf_counter() + timeout

    @property
    def left(self) -> float | None:
        """Seconds that are left, from 0; None: there is no end."""
        return None if self._end is None else max(0.0, self._end - time.perf_counter())

    def left_up_to(self, most: float) -> float:
        """Seconds that are left, if they are fewer."""
        left = self.left
        return most if left is None else min(left, most)
