"""Writes down the torch calls of one forward, and finds out what speaks against running them without the model."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from chairlift.attention.interface import AttentionStep
from chairlift.engine.linear_calls import TORCHS_LINEAR, linear_context
from chairlift.engine.linears import PackedLinears
from chairlift.engine.replay.calls import Call, NotRecordable, attend, mask, name_of, take_apart

_MASK_MAKING = "transformers.masking_utils"
_MODULE_CALL = torch.nn.Module._call_impl.__code__
# Arguments of an attention call that steps look at.
_ATTENTION_OPTIONS = ("scaling", "softcap", "s_aux")

# What these tell depends on sizes and types alone, so what a model does with it shows in its calls.
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_quantized", "is_xpu", "is_mps", "is_nested", "requires_grad", "is_leaf", "grad_fn"),
)
_QUESTIONS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "__len__", "__hash__"),
)
_METADATA: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name) for name in _QUESTIONS),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
# Gradients are off in a step, and stay off.
_WITHOUT_EFFECT: set[Any] = {torch._C._set_grad_enabled}
_TAGS = {
    torch.Tag.data_dependent_output: "what it does depends on computed values ({})",
    torch.Tag.dynamic_output_shape: "the shape of a result depends on computed values ({})",
    torch.Tag.nondeterministic_seeded: "it draws random numbers ({})",
}


@dataclass
class Recording:
    """One forward, written down.

    Attributes:
        tokens: Tokens of the step.
        sampled: Rows of logits.
        calls: Its torch calls, in order.
        numbers: For each call the numbers of its arguments and the sizes of its results.
        constants: Tensors that no call made and that are no inputs, by value.
        unchanged: Results that were the very object of an argument: the value of either.
        output: The value of the logits.
    """

    tokens: int
    sampled: int
    calls: list[Call] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    unchanged: dict[int, int] = field(default_factory=dict)
    output: int = -1


# Inputs are the first values.
NUM_INPUTS = 3
LOGITS_ROWS = 2


class Recorder(TorchFunctionMode):
    """Records one forward while it stands around it.

    Raises nothing: a forward that cannot be recorded runs to its end, and `refusal` says why.
    """

    def __init__(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], weights: Iterable[torch.Tensor]
    ) -> None:
        """Records a forward of (input_ids, position_ids, logits_rows) by a model with those parameters and buffers."""
        super().__init__()
        self.recording = Recording(inputs[0].shape[1], inputs[2].shape[0])
        self.refusal: str | None = None
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._num_values = 0
        self._weights = {_memory(weight) for weight in weights if weight.layout == torch.strided} - {0}
        self._watch = _Watch(self)
        self._paused = False
        # Not kept apart, they would be told by their identity from one recording alone.
        for tensor in inputs:
            self._add(tensor)
            self._weights.add(_memory(tensor))

    # ------------------------------------------------------------------ around the forward

    def __enter__(self) -> "Recorder":
        """Records from here on."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Records no longer."""
        self._watch.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def finish(self, logits: torch.Tensor) -> None:
        """Takes the forward's result."""
        found = self._find(logits)
        if found is None:
            self.refuse("its logits come from no recorded call")
        else:
            self.recording.output = found

    def refuse(self, reason: str) -> None:
        """Says why not; the first reason stands."""
        self.refusal = self.refusal or reason

    def around(self, step: AttentionStep) -> AttentionStep:
        """A step whose answers are recorded, but not how they come about."""
        return _RecordedStep(self, step)

    def around_linears(self, linears: PackedLinears | None) -> AbstractContextManager[None]:
        """The context in which linear layers are computed by packed weights, and written down as torch's calls."""
        if linears is None:
            return contextlib.nullcontext()

        def linear(*args: Any, **kwargs: Any) -> torch.Tensor:
            if len(args) > 1 and not kwargs and self.watches and not torch.is_autocast_enabled("cpu"):
                with self.paused():
                    packed = linears.find(args[1])
                    if packed is not None:
                        result = packed(args[0], *args[2:])
                        self.answered(TORCHS_LINEAR, (args, kwargs), result)
                        return result
            return TORCHS_LINEAR(*args, **kwargs)

        return linear_context(linear)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside the block is not the model's."""
        outer, self._paused = self._paused, True
        try:
            # Even a mode that only looks on costs every operator as much as many of them take.
            with _disable_current_modes():
                yield
        finally:
            self._paused = outer

    @property
    def watches(self) -> bool:
        """Whether operators that run now are the model's."""
        return not self._paused and self.refusal is None

    # ------------------------------------------------------------------ calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs a call, and writes it down."""
        kwargs = kwargs or {}
        if not self.watches:
            return func(*args, **kwargs)
        if func in _METADATA or func in _WITHOUT_EFFECT:
            return func(*args, **kwargs)
        if _makes_a_mask():
            # Whatever it finds out decides on the mask alone, and masks are the step's.
            with self.paused():
                return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._run(torch.Tensor.unbind, args, kwargs))
        return self._run(func, args, kwargs)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name == "data" or getattr(func, "__name__", "") == "__set__":
            self.refuse(f"it reaches past autograd or sets a tensor's attribute ({name})")
        if torch.is_autocast_enabled("cpu"):
            self.refuse("it computes under autocast")
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        try:
            pattern = take_apart((args, kwargs), tensors, numbers)
        except NotRecordable as reason:
            self.refuse(f"{reason} ({name})")
            return func(*args, **kwargs)
        values = tuple(map(self._value_of, tensors))
        self._watch.begin(tensors)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.refuse(f"a call failed ({name}: {type(error).__name__})")
            raise
        finally:
            writes = self._watch.end()
        self._write_down(func, pattern, tensors, values, numbers, result, writes)
        return result

    def answered(self, func: Callable[..., Any], arguments: Any, answer: torch.Tensor) -> None:
        """Adds a call that was answered in another way."""
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        try:
            pattern = take_apart(arguments, tensors, numbers)
        except NotRecordable as reason:
            self.refuse(f"{reason} ({name_of(func)})")
            return
        self._write_down(func, pattern, tensors, tuple(map(self._value_of, tensors)), numbers, answer, False)

    def _write_down(
        self,
        func: Callable[..., Any],
        pattern: Any,
        tensors: list[torch.Tensor],
        values: tuple[int, ...],
        numbers: list[int],
        result: Any,
        writes: bool,
    ) -> None:
        several = isinstance(result, tuple | list)
        items = list(result) if several else [result]
        if result is None and writes:
            items = []
        elif any(not isinstance(item, torch.Tensor | None) for item in items) or all(item is None for item in items):
            self.refuse(f"what it does depends on computed values ({name_of(func)})")
            return
        recording = self.recording
        recording.numbers += numbers
        results: list[int | None] = []
        made = [item for item in items if item is not None]
        for item in items:
            if item is None:
                results.append(None)
                continue
            value = self._add(item)
            results.append(value)
            recording.numbers += item.shape
            for other, tensor in zip(values, tensors, strict=True):
                if item is tensor:
                    recording.unchanged.setdefault(value, other)
        recording.calls.append(
            Call(
                func,
                pattern,
                values,
                tuple(results),
                several,
                tuple(item.dtype for item in made),
                tuple(item.dim() for item in made),
                writes,
            )
        )

    # ------------------------------------------------------------------ values

    def _add(self, tensor: torch.Tensor) -> int:
        # A result that is an argument's very object is a value of its own: which of them it is may depend on sizes.
        value, self._num_values = self._num_values, self._num_values + 1
        self._values[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def _find(self, tensor: torch.Tensor) -> int | None:
        # Tensors are not kept, or all of a forward would be there at once: an id may be of one that is gone.
        known = self._values.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _value_of(self, tensor: torch.Tensor) -> int:
        value = self._find(tensor)
        if value is None:
            # A weight; or something whose origin shows when recordings are compared.
            value = self._add(tensor)
            self.recording.constants[value] = tensor
            if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                self.refuse(f"it computes with a {type(tensor).__name__} of layout {tensor.layout}")
            else:
                self._weights.add(_memory(tensor))
        return value

    def is_fixed(self, memory: int) -> bool:
        """Whether it holds weights, inputs or other constants."""
        return memory in self._weights


class _RecordedStep:
    """Records the answers of a step as calls of their own."""

    def __init__(self, recorder: Recorder, step: AttentionStep) -> None:
        self._recorder = recorder
        self._step = step

    def mask(self, **kwargs: Any) -> torch.Tensor | None:
        """The step's mask."""
        recorder, watched = self._recorder, self._recorder.watches
        with recorder.paused():
            answer = self._step.mask(**kwargs)
            if watched and answer is not None:
                recorder.answered(mask, ((), {name: kwargs.get(name) for name in ("device", "dtype")}), answer)
        return answer

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The step's attention."""
        recorder, watched = self._recorder, self._recorder.watches
        with recorder.paused():
            answer = self._step.attend(module, query, key, value, attention_mask, **kwargs)
            if watched:
                options = {name: kwargs[name] for name in _ATTENTION_OPTIONS if kwargs.get(name) is not None}
                recorder.answered(attend, ((query, key, value), options), answer[0])
        return answer


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks from below at the operators that recorded calls run: whatever is random, reads values or writes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        # Memory of the call's arguments, 0 for those that are empty; None outside of a call.
        self._given: set[int] | None = None
        self._writes = False

    def begin(self, tensors: list[torch.Tensor]) -> None:
        """A recorded call begins."""
        self._given = set(map(_memory, tensors))
        self._writes = False

    def end(self) -> bool:
        """It ended; whether it changed something that was there before."""
        self._given = None
        return self._writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at one operator, and runs it."""
        kwargs = kwargs or {}
        if self._recorder.watches:
            self._look(func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse, name = self._recorder.refuse, func.overloadpacket.__name__
        for tag, reason in _TAGS.items():
            if tag in func.tags and not (func is torch.ops.aten.index.Tensor and _indexes_by_number(args)):
                refuse(reason.format(name))
        if self._given is None:
            refuse(f"it reaches an operator by no function of torch ({name})")
        if not func._schema.is_mutable:
            return
        for argument, given in zip(func._schema.arguments, args, strict=False):
            self._look_at_write(argument, given, name)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._look_at_write(argument, kwargs[argument.name], name)

    def _look_at_write(self, argument: Any, given: Any, name: str) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in tree_leaves(given):
            if not isinstance(tensor, torch.Tensor):
                continue
            # The rows of a step that samples nothing are empty, and written to all the same.
            memory = _memory(tensor)
            if memory and self._recorder.is_fixed(memory):
                self._recorder.refuse(f"it changes its weights, its buffers or its inputs ({name})")
            self._writes |= memory in (self._given or ())


def _indexes_by_number(args: tuple[Any, ...]) -> bool:
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _makes_a_mask() -> bool:
    """Whether the running call was made on the way to a mask."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _MODULE_CALL:
        if frame.f_globals.get("__name__") == _MASK_MAKING:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _memory(tensor: torch.Tensor) -> int:
    """What a tensor and its views have in common; 0 for those without elements."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
