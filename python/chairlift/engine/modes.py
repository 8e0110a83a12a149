"""The thread-local modes of torch, carried from one thread into another."""

import contextlib
from collections.abc import Iterator

import torch


class CallersModes:
    """The thread-local modes of the thread that made it, to be entered in another."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._default_device = torch.get_default_device()
        device_types = {"cpu", torch.get_default_device().type}
        self._autocast = [
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in sorted(device_types)
            if torch.is_autocast_enabled(device_type)
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The modes, for the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.no_grad())
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            for device_type, dtype in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            yield
