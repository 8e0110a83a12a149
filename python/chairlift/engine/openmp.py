"""OpenMP's threads, of which every thread that computes has a team of its own.

GNU OpenMP counts the threads of all teams. With more of them than cores it lets workers sleep at once between
parallel regions instead of waiting awake, and waking them costs more than a small operator computes: on two cores the
attention of a decode step took 2.3 times as long while the team of the thread that had loaded the model lay idle.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

# omp_pause_resource_t of OpenMP 5.0: give up what can be given up and made again.
_PAUSE_SOFT = 1


def release_team() -> bool:
    """Ends the idle OpenMP workers of the calling thread; its next parallel region makes new ones.

    To be called by a thread that leaves computing to another. Tells whether there was a runtime to ask (GNU OpenMP on
    Linux; others do not count as described).
    """
    pause = _pause_function()
    return pause is not None and pause(_PAUSE_SOFT) == 0


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split()[-1] for line in mapped if "libgomp" in line.rpartition("/")[2])
        function = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, StopIteration, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    pause: Callable[[int], int] = function
    return pause
