"""What was learned of models in this process, kept for as long as they stay what they were.

To learn a model takes forwards: its attention calls, the proof that packed sequences give the logits of each alone, the
recordings of its steps. None of that depends on the values of weights. A second manager of the same model takes it over
where everything that it can depend on is the same: the tree of modules with their attributes, hooks and functions, the
parameters as objects, the config, and torch's settings. What cannot be compared is learned anew.
"""

import enum
import gc
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as modules
from transformers import PretrainedConfig, PreTrainedModel

from chairlift.engine.replay.agreement import Agreement
from chairlift.engine.replay.forward import Recordings
from chairlift.probe import ModelFacts

_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis), enum.Enum)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
# How deep containers are looked into; a config holds those of its parts.
_DEPTH = 8


class _Incomparable(Exception):
    """Something that nothing can be said about later."""


class _Same:
    """An object, by identity, without keeping it alive; equal only while both are there."""

    __slots__ = ("_id", "_ref")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._ref: Any = weakref.ref(value)
        except TypeError as error:
            raise _Incomparable from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._id != other._id:
            return False
        mine = self._ref()
        return mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]


class Knowledge:
    """What is known of a model.

    Attributes:
        facts: What it is; None: not learned yet.
        proven: With what its packed sequences gave the logits of each alone.
        linear_weights: Names of the weights of its linear calls.
    """

    def __init__(self) -> None:
        self.facts: ModelFacts | None = None
        self.proven: set[tuple[Any, ...]] = set()
        self.linear_weights: frozenset[str] = frozenset()
        self._recordings: dict[bool, Agreement] = {}
        self._lock = threading.Lock()

    def take_recordings(self) -> Recordings:
        """The recordings of its forwards, for one that goes on recording alone."""
        with self._lock:
            recordings, self._recordings = self._recordings, {}
        return recordings

    def give_recordings(self, recordings: Recordings) -> None:
        """Gives recordings back: of each kind those are kept that cover more."""
        with self._lock:
            for key, agreement in recordings.items():
                kept = self._recordings.get(key)
                if kept is None or kept.count < agreement.count:
                    self._recordings[key] = agreement


_lock = threading.Lock()
_known: "WeakKeyDictionary[PreTrainedModel, tuple[list[Any], Knowledge]]" = WeakKeyDictionary()


def knowledge_of(model: PreTrainedModel) -> Knowledge:
    """What is known of a model as it is now; what was known of it as it was before is forgotten."""
    try:
        signature = _signed(model)
    except _Incomparable:
        forget_knowledge(model)
        return Knowledge()
    with _lock:
        known = _known.get(model)
        if known is None or known[0] != signature:
            known = _known[model] = (signature, Knowledge())
    return known[1]


def keep_knowledge(model: PreTrainedModel, knowledge: Knowledge) -> None:
    """Keeps what is known of a model as it is now."""
    try:
        signature = _signed(model)
    except _Incomparable:
        return
    with _lock:
        _known[model] = (signature, knowledge)


def forget_knowledge(model: PreTrainedModel) -> None:
    """Forgets a model, where somebody knows that it is another."""
    with _lock:
        _known.pop(model, None)


def _signed(model: PreTrainedModel) -> list[Any]:
    """The signature of a model.

    Raises:
        _Incomparable: As `_signature`.
    """
    # Ten thousands of small objects, most of them gone at once: nothing that the collector should look through all of
    # torch for, which takes longer than all the rest.
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(_signature(model))
    finally:
        if collects:
            gc.enable()


def _signature(model: PreTrainedModel) -> Iterator[Any]:
    """All that a forward can depend on, but for the values of tensors.

    Raises:
        _Incomparable: There is something whose change would not be seen.
    """
    yield from _settings()
    configs: dict[int, Any] = {}
    code: set[str] = set()
    for module in model.modules():
        kind = type(module)
        yield _Same(module)
        yield _Same(kind)
        yield _token(kind.forward, _DEPTH)
        for name, value in vars(module).items():
            # Sessions set it, and set it back.
            if name == "training":
                continue
            yield name
            if isinstance(value, PretrainedConfig):
                # Every layer holds it.
                if id(value) not in configs:
                    configs[id(value)] = _token(value, _DEPTH)
                yield configs[id(value)]
            else:
                yield _token(value, _DEPTH)
        code.update(base.__module__ for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins")))
    # What its classes call by name: whole functions are exchanged there.
    for name in sorted(code):
        yield name
        for key, value in list(vars(sys.modules.get(name, types)).items()):
            if isinstance(value, types.FunctionType | type):
                yield key
                yield _Same(value)
                if isinstance(value, type):
                    yield [
                        (at, _Same(method))
                        for at, method in vars(value).items()
                        if isinstance(method, types.FunctionType)
                    ]


def _settings() -> Iterator[Any]:
    """torch's own, as they stand for this thread."""
    yield torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_inference_mode_enabled()
    yield torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield torch.get_float32_matmul_precision(), torch._C._get_mkldnn_enabled()
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        yield _token(getattr(modules, name, {}), _DEPTH)


def _token(value: Any, depth: int) -> Any:
    """What stands for a value: equal to that of the same value, and unequal once it has changed."""
    if depth == 0:
        raise _Incomparable
    kind = type(value)
    if isinstance(value, _PLAIN + _TORCH_PLAIN):
        return kind, value
    if isinstance(value, torch.Tensor):
        return _Same(value), value.shape, value.dtype, value.device, value.layout
    if isinstance(value, torch.nn.Module):
        return _Same(value)
    if isinstance(value, types.MethodType):
        return _token(value.__func__, depth - 1), _token(value.__self__, depth - 1)
    if isinstance(value, PretrainedConfig):
        return kind, _token(vars(value), depth - 1)
    if isinstance(value, dict | types.MappingProxyType):
        return kind, [(_token(key, depth - 1), _token(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return kind, [_token(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        if not all(isinstance(item, _PLAIN) for item in value):
            raise _Incomparable
        return kind, frozenset(value)
    if isinstance(value, types.BuiltinFunctionType):
        return kind, value.__module__, value.__qualname__
    if isinstance(value, types.FunctionType | types.ModuleType | type):
        return _Same(value)
    if not hasattr(value, "__dict__"):
        # What is in it cannot be seen.
        raise _Incomparable
    return _Same(value), _token(vars(value), depth - 1)
