"""Evaluation mode for as long as somebody needs it."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


class _Evaluations:
    """Who has a model in evaluation mode, and which of its modules were not."""

    def __init__(self, training: list[torch.nn.Module]) -> None:
        self.count = 0
        self.training = training


_evaluations: "weakref.WeakKeyDictionary[PreTrainedModel, _Evaluations]" = weakref.WeakKeyDictionary()
_evaluations_lock = threading.Lock()


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for the block; when the last of several such blocks ends, every module is as it was before."""
    with _evaluations_lock:
        entry = _evaluations.get(model)
        if entry is None:
            entry = _evaluations[model] = _Evaluations([module for module in model.modules() if module.training])
            for module in entry.training:
                module.training = False
        entry.count += 1
    try:
        yield
    finally:
        with _evaluations_lock:
            entry.count -= 1
            if not entry.count:
                del _evaluations[model]
                for module in entry.training:
                    module.training = True
