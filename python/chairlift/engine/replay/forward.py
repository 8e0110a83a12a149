"""The forward of steps: by the model, recorded by and by, and from then on by what was recorded."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from chairlift.attention.interface import AttentionStep, forward_context
from chairlift.engine.failure import is_out_of_memory
from chairlift.engine.linears import PackedLinears, packed_calls
from chairlift.engine.replay.agreement import Agreement, Disagreement
from chairlift.engine.replay.obstacles import obstacle
from chairlift.engine.replay.program import Program, write_program
from chairlift.engine.replay.recorder import Recorder
from chairlift.probe import ModelFacts, forward, forward_arguments

logger = logging.get_logger(__name__)

# Of steps of one token (True), and of all others.
Recordings = Mapping[bool, Agreement]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # input_ids, position_ids, logits_rows

# Largest difference of logits, relative to the largest logit: rounding stays below, another function far above.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class Step(AttentionStep, Protocol):
    """Answers the attention calls of one forward."""

    def finish(self) -> None:
        """Checks that every call came."""
        ...


class RecordedForward:
    """Calls one model, by its Python or by a program.

    Steps of one token are a world of their own: models branch on them.
    """

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, *, replay: bool | None = None) -> None:
        """A forward that knows nothing yet.

        Args:
            model: The model.
            facts: What was learned of it.
            replay: Whether steps are recorded and replayed. None: where that can be. True: and a warning says why,
                where it cannot.
        """
        self._model = model
        self._facts = facts
        self._accepts = forward_arguments(model)
        self._replay = replay
        self._linears: PackedLinears | None = None
        self._worlds: dict[bool, _World] = {}
        self._reason: str | None = None
        self._looked = False
        if replay is False:
            self._reason = "replay_forward is False"

    @property
    def recordings(self) -> Recordings:
        """What was recorded so far."""
        agreements = {alone: world.agreement for alone, world in self._worlds.items()}
        return {alone: agreement for alone, agreement in agreements.items() if agreement is not None}

    def forget(self, known: Recordings | None = None) -> None:
        """Records anew: weights, hooks or adapters may be others.

        Args:
            known: Recordings of the model as it is now, to go on with.
        """
        self._worlds = {alone: _World(agreement) for alone, agreement in (known or {}).items()}
        self._looked = False
        self._reason = "replay_forward is False" if self._replay is False else None

    @property
    def linears(self) -> PackedLinears | None:
        """What computes the linear layers that it can."""
        return self._linears

    def use_linears(self, linears: PackedLinears | None) -> None:
        """Computes linear layers by other packed weights. Programs, which hold the former ones, are written anew."""
        self._linears = linears
        # The loop may meet a new world meanwhile.
        for world in list(self._worlds.values()):
            world.program = None

    def describe(self) -> str:
        """How steps call the model."""
        if self._reason is not None:
            return f"eager: {self._reason}"
        programs = [world.program for world in self._worlds.values() if world.program is not None]
        if not programs:
            return "eager, to be recorded by the first steps"
        return f"recorded, {max(program.num_calls for program in programs)} instructions"

    def __call__(self, make_step: Callable[[], Step], inputs: Inputs) -> torch.Tensor:
        """[sampled, vocabulary]: the logits of a step.

        Args:
            make_step: Makes what answers the attention calls of one forward. May be called again for the same step:
                its K and V are written twice then.
            inputs: `input_ids` and `position_ids`, [1, tokens], and `logits_rows`, [sampled].
        """
        self._look()
        if self._reason is not None:
            return self._by_model(make_step(), inputs)
        point = (inputs[0].shape[1], inputs[2].shape[0])
        world = self._worlds.setdefault(point[0] == 1, _World())
        try:
            program = world.program_for(point, self._linears)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._give_up(f"no program could be written: {type(error).__name__}: {error}", loud=True)
            return self._by_model(make_step(), inputs)
        if program is None:
            return self._recorded(world, make_step(), inputs)
        if world.is_proven(program):
            return self._replayed(program, make_step, inputs)
        # Once, the model has the word.
        replayed = self._replayed(program, make_step, inputs)
        logits = self._by_model(make_step(), inputs)
        if self._reason is None and self._agree(replayed, logits) and logits.numel():
            world.prove(program)
        return logits

    # ------------------------------------------------------------------ the ways

    def _by_model(self, step: Step, inputs: Inputs) -> torch.Tensor:
        with forward_context(step), packed_calls(self._linears):
            logits = forward(self._model, self._accepts, *inputs)
        step.finish()
        return logits

    def _recorded(self, world: "_World", step: Step, inputs: Inputs) -> torch.Tensor:
        weights = (*self._model.parameters(), *self._model.buffers())
        recorder = Recorder(inputs, weights)
        with forward_context(recorder.around(step)), recorder.around_linears(self._linears), recorder:
            logits = forward(self._model, self._accepts, *inputs)
        step.finish()
        recorder.finish(logits)
        if recorder.refusal is not None:
            self._give_up(recorder.refusal)
            return logits
        try:
            world.add(recorder)
        except Disagreement as reason:
            self._give_up(str(reason))
        return logits

    def _replayed(self, program: Program, make_step: Callable[[], Step], inputs: Inputs) -> torch.Tensor:
        answers = _Answers(make_step())
        try:
            logits = program.run(answers.attend, answers.step.mask, *inputs)
        except Exception as error:
            if answers.failed or is_out_of_memory(error):
                raise
            # Where the model fails as well, it is the step's fault.
            logits = self._by_model(make_step(), inputs)
            self._give_up(f"a replayed step failed: {type(error).__name__}: {error}", loud=True)
            return logits
        answers.step.finish()
        return logits

    # ------------------------------------------------------------------ reasons

    def _look(self) -> None:
        if self._looked:
            return
        self._looked = True
        found = None if self._reason is not None else obstacle(self._model, self._facts)
        if found is not None:
            self._give_up(found)

    def _agree(self, replayed: torch.Tensor, logits: torch.Tensor) -> bool:
        finite = logits[logits.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 1.0
        tolerance = _TOLERANCE.get(self._model.dtype, 5e-2) * scale
        if torch.allclose(replayed, logits, rtol=0.0, atol=tolerance, equal_nan=True):
            return True
        difference = float((replayed - logits).abs().max())
        self._give_up(f"replayed logits differ from the model's by up to {difference:.3g} of {scale:.3g}", loud=True)
        return False

    def _give_up(self, reason: str, *, loud: bool = False) -> None:
        self._reason = reason
        self._worlds = {}
        if loud or self._replay:
            logger.warning(f"The forward of {type(self._model).__name__} is not replayed: {reason}")


class _Answers:
    """A step's answers to a program, and whether one failed: that is the step's fault, not the program's."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.failed = False

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """One attention call."""
        try:
            return self.step.attend(_NO_MODULE, query, key, value, None, **options)[0]
        except Exception:
            self.failed = True
            raise


# Steps ask the module of a call for nothing.
_NO_MODULE = torch.nn.Module()


class _World:
    """Steps whose forwards are the same calls."""

    def __init__(self, agreement: Agreement | None = None) -> None:
        self.agreement = agreement
        self.program: Program | None = None

    def add(self, recorder: Recorder) -> None:
        if self.agreement is None:
            self.agreement = Agreement(recorder.recording)
            return
        self.agreement.add(recorder.recording)

    def is_proven(self, program: Program) -> bool:
        """Whether its recordings gave the model's logits once."""
        return self.agreement is not None and self.agreement.proven_version == program.version

    def prove(self, program: Program) -> None:
        """It gave the model's logits."""
        if self.agreement is not None:
            self.agreement.proven_version = program.version

    def program_for(self, point: tuple[int, int], linears: PackedLinears | None) -> Program | None:
        """The program, where it is known to be right for steps of that size."""
        agreement = self.agreement
        if agreement is None or not agreement.covers(point):
            return None
        if self.program is None or self.program.version != agreement.version:
            self.program = write_program(agreement, linears)
        return self.program
