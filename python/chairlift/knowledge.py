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
from chairlift.kept import ATTRIBUTE
from chairlift.probe import ModelFacts

_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis), enum.Enum)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
# How deep objects are looked into; a config holds those of its parts.
_DEPTH = 8
# What sessions set.
_SESSIONS = frozenset({"training", ATTRIBUTE})


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
        signature = _signature(model)
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
        signature = _signature(model)
    except _Incomparable:
        return
    with _lock:
        _known[model] = (signature, knowledge)


def forget_knowledge(model: PreTrainedModel) -> None:
    """Forgets a model, where somebody knows that it is another."""
    with _lock:
        _known.pop(model, None)


def _signature(model: PreTrainedModel) -> list[Any]:
    """All that a forward can depend on, but for the values of tensors.

    Raises:
        _Incomparable: There is something whose change would not be seen.
    """
    # Ten thousands of small objects, most of them gone at once: nothing that the collector should look through all of
    # torch for, which takes longer than all the rest.
    collects = gc.isenabled()
    gc.disable()
    try:
        return [*_settings(), *_Signer(model).tokens()]
    finally:
        if collects:
            gc.enable()


def _settings() -> list[Any]:
    """torch's own, as they stand for this thread."""
    hooks = [getattr(modules, name, {}) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")]
    return [
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_inference_mode_enabled()),
        (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        (torch.get_float32_matmul_precision(), torch._C._get_mkldnn_enabled()),
        [_Same(hook) for of_all in hooks for hook in of_all.values()],
    ]


class _Signer:
    """Makes tokens of what a model is made of: equal to those of the same thing, and unequal once it has changed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._met: dict[int, torch.nn.Module] = {}
        self._found: list[torch.nn.Module] = []  # and not looked at yet
        self._configs: dict[int, Any] = {}  # every layer holds the model's
        self._meet(model)

    def _meet(self, module: torch.nn.Module) -> None:
        """Has a module looked at with all its parts, in the tree or beside it."""
        for part in module.modules():
            if id(part) not in self._met:
                self._met[id(part)] = part
                self._found.append(part)

    def tokens(self) -> Iterator[Any]:
        """Of its modules, and of the code that they are written in."""
        read: set[str] = set()
        while self._found:
            found, self._found = self._found, []
            code: set[str] = set()
            for module in found:
                kind = type(module)
                yield _Same(module), _Same(kind), self._token(kind.forward, _DEPTH)
                yield [
                    (name, self._token(value, _DEPTH))
                    for name, value in list(vars(module).items())
                    if name not in _SESSIONS
                ]
                code.update(base.__module__ for base in kind.__mro__ if base.__module__.partition(".")[0] != "torch")
            # What its classes call by name: whole functions are exchanged there, and switches turned.
            for name in sorted((code - read) & sys.modules.keys()):
                yield name, list(self._code(vars(sys.modules[name])))
            read |= code

    def _code(self, names: dict[str, Any]) -> Iterator[Any]:
        for name, value in list(names.items()):
            if isinstance(value, _PLAIN):
                yield name, type(value), value
            elif isinstance(value, types.FunctionType):
                yield name, _Same(value)
            elif isinstance(value, type):
                methods = [
                    (at, _Same(item)) for at, item in vars(value).items() if isinstance(item, types.FunctionType)
                ]
                yield name, _Same(value), methods
            elif isinstance(value, torch.nn.Module):
                # Calls that can be redirected to kernels are modules of no model.
                self._meet(value)
                yield name, _Same(value)

    def _token(self, value: Any, depth: int) -> Any:
        if depth == 0:
            raise _Incomparable
        kind = type(value)
        match value:
            case _ if isinstance(value, _PLAIN + _TORCH_PLAIN):
                return kind, value
            case torch.Tensor():
                return _Same(value), value.shape, value.dtype, value.device, value.layout
            case torch.nn.Module():
                self._meet(value)
                return _Same(value)
            case PretrainedConfig():
                if id(value) not in self._configs:
                    self._configs[id(value)] = kind, self._token(vars(value), depth - 1)
                return self._configs[id(value)]
            case types.MethodType():
                return self._token(value.__func__, depth - 1), self._token(value.__self__, depth - 1)
            case types.BuiltinFunctionType():
                return kind, value.__module__, value.__qualname__
            case types.FunctionType() | types.ModuleType() | type():
                return _Same(value)
            case dict() | types.MappingProxyType():
                items = [(self._token(key, depth - 1), self._token(item, depth - 1)) for key, item in value.items()]
                return kind, items, self._attributes(value, depth)
            case list() | tuple():
                return kind, [self._token(item, depth - 1) for item in value], self._attributes(value, depth)
            case set() | frozenset() if all(isinstance(item, _PLAIN) for item in value):
                return kind, frozenset(value)
            case _ if hasattr(value, "__dict__"):
                return _Same(value), self._attributes(value, depth)
        # What is in it cannot be seen.
        raise _Incomparable

    def _attributes(self, value: Any, depth: int) -> Any:
        attributes = getattr(value, "__dict__", None)
        return self._token(attributes, depth - 1) if attributes else None
