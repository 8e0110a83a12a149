"""The manager that a model keeps from one session to the next.

It stands on the model itself, so that the collector can free both together. A copy of the model, in memory or on disk,
is another model: it keeps none.
"""

import threading
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from chairlift.manager import ContinuousBatchingManager

ATTRIBUTE = "_cached_continuous_batching_manager"


class _Kept:
    """Holds a manager; copied and pickled it is None, which is read without this package, too."""

    def __init__(self, manager: "ContinuousBatchingManager") -> None:
        self.manager = manager

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_lock = threading.Lock()


def kept_manager(model: PreTrainedModel) -> "ContinuousBatchingManager | None":
    """The manager that a model keeps, if it keeps one."""
    kept = vars(model).get(ATTRIBUTE)
    # A shallow copy of the model has it, too.
    return kept.manager if isinstance(kept, _Kept) and kept.manager.model is model else None


def take(model: PreTrainedModel) -> "ContinuousBatchingManager | None":
    """Takes the manager that a model keeps, so that nobody else does."""
    with _lock:
        manager = kept_manager(model)
        vars(model).pop(ATTRIBUTE, None)
    return manager


def keep(manager: "ContinuousBatchingManager") -> None:
    """Gives a manager to its model to keep; another one that it kept is destroyed."""
    with _lock:
        before = kept_manager(manager.model)
        vars(manager.model)[ATTRIBUTE] = _Kept(manager)
    if before is not None and before is not manager:
        before.destroy()


def let_go(manager: "ContinuousBatchingManager") -> None:
    """The model keeps that manager no more, if it did."""
    with _lock:
        if kept_manager(manager.model) is manager:
            del vars(manager.model)[ATTRIBUTE]
