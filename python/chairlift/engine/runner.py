"""Runs a step: the model's forward over its tokens, attention from the pages, and the choice of the next tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from chairlift import _native
from chairlift.attention.choice import Backend
from chairlift.engine.cache import CacheTensors
from chairlift.engine.inputs import DeviceTables, Slot, StepInputs
from chairlift.engine.linears import PackedLinears
from chairlift.engine.replay.forward import RecordedForward
from chairlift.probe import Call, mask_stand_in, scale_of
from chairlift.sampling.draw import choose


class PagedForward:
    """Answers the attention calls of one forward from the pages, by their order."""

    def __init__(self, calls: Sequence[Call], cache: CacheTensors, backend: Backend, inputs: StepInputs) -> None:
        self._calls = calls
        self._cache = cache
        self._backend = backend
        self._inputs = inputs
        self._next = 0
        backend.begin(inputs)

    def mask(self, **kwargs: Any) -> torch.Tensor:
        """Stands for any mask; which keys a query sees is known here."""
        return mask_stand_in(1, kwargs.get("device"), kwargs.get("dtype"))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """One call, over its pages."""
        if self._next == len(self._calls):
            raise RuntimeError(f"the model made more than the {self._next} attention calls it was learned with")
        call = self._calls[self._next]
        self._next += 1
        pages = self._cache.pages[call.ordinal]
        query, key, value = (tensor[0].to(call.kind.dtype) for tensor in (query, key, value))
        out = self._backend.attend(
            pages,
            query,
            key,
            value,
            writes=call.reads_from == call.ordinal,
            scale=scale_of(query, kwargs),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        return out.unsqueeze(0), None

    def finish(self) -> None:
        """Checks that every call came."""
        if self._next != len(self._calls):
            raise RuntimeError(f"the model made {self._next} attention calls, but was learned with {len(self._calls)}")


class Runner:
    """Runs the steps of one engine on one model."""

    def __init__(
        self,
        forward: RecordedForward,
        calls: Sequence[Call],
        cache: CacheTensors,
        tables: DeviceTables,
        backend: Backend,
        slots: Sequence[Slot],
        *,
        return_logprobs: bool,
    ) -> None:
        self.forward = forward
        self.calls = calls
        self.cache = cache
        self.tables = tables
        self.backend = backend
        self.slots = slots
        self.return_logprobs = return_logprobs

    @property
    def linears(self) -> PackedLinears | None:
        """What computes the linear layers that it can."""
        return self.forward.linears

    @linears.setter
    def linears(self, linears: PackedLinears | None) -> None:
        self.forward.use_linears(linears)

    def run(self, step: _native.Step) -> None:
        """Computes a step, and puts its tokens (and logprobs) into the slot's buffers."""
        slot = self.slots[step.slot]
        inputs = self.tables.receive(step, slot)
        self.cache.move(inputs.moves)
        logits = self.logits(inputs)
        if not logits.shape[0]:
            return
        tokens, logprobs = choose(
            logits, self.tables.sampling, inputs.sampled_rows, inputs.draws, logprobs=self.return_logprobs
        )
        slot.tokens[: tokens.shape[0]] = tokens
        if logprobs is not None:
            slot.logprobs[: tokens.shape[0]] = logprobs

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """[sampled, vocabulary]: the step's forward. Writes K and V of its tokens."""
        return self.forward(
            lambda: PagedForward(self.calls, self.cache, self.backend, inputs),
            (inputs.input_ids, inputs.position_ids, inputs.logits_rows),
        )
