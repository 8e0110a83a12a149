"""The proof that a learned model can be served: packed sequences, in steps, must give the logits of each alone."""

import contextlib
import inspect
import time

import torch
from transformers import PreTrainedModel

from chairlift.attention.choice import Backend
from chairlift.attention.interface import forward_context
from chairlift.engine.cache import Geometry
from chairlift.engine.replay.forward import Recordings
from chairlift.engine.session import Session
from chairlift.evaluation import evaluating
from chairlift.probe import ModelFacts, Recorder, forward, forward_arguments, probe_tokens, refusal

# Largest difference of logits, relative to the largest logit: rounding stays well below, a mixed-up sequence or a lost
# state far above.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# The first prompt is longer than a step, so that there is a step without a sampled row; the second is cut beside the
# first one's decodes.
_PROMPT_LENGTHS = (11, 12)
_STEP_TOKENS = 9
_NEW_TOKENS = 3


def check_packed(
    model: PreTrainedModel, facts: ModelFacts, geometry: Geometry, backend: Backend, *, replay: bool | None = False
) -> Recordings:
    """Runs two short sequences as the engine would: the second one's prompt is cut across steps, the first decodes
    beside it. Every row of logits must be the one of an ordinary forward over that sequence alone.

    Args:
        model: The model.
        facts: What was learned of it.
        geometry: How its calls share blocks.
        backend: Of attention.
        replay: Whether steps are recorded and replayed, as of `RecordedForward`.

    Returns:
        What was recorded of its steps.

    Raises:
        ValueError: They differ, and by how much.
    """
    page_size = geometry.page_size
    tokens_each = max(_PROMPT_LENGTHS) + _NEW_TOKENS
    session = Session(
        model,
        facts,
        geometry,
        backend,
        num_blocks=2 * -(-tokens_each // page_size),
        max_batch_tokens=_STEP_TOKENS,
        max_requests_per_batch=2,
        max_blocks_per_request=0,
        safety_margin=0.0,
        scheduler_type="fifo",
        replay_forward=replay,
    )
    engine, runner = session.engine, session.runner
    # Under autocast the arithmetic is coarser than the weights.
    dtypes = {model.dtype, *(call.kind.dtype for call in facts.calls)}
    tolerance = max(_TOLERANCE.get(dtype, 1e-1) for dtype in dtypes)
    texts: dict[int, list[int]] = {}
    with evaluating(model), torch.no_grad():
        for seed, length in enumerate(_PROMPT_LENGTHS):
            prompt = probe_tokens(facts.vocab_size, length, torch.device("cpu"), seed=seed)
            engine.submit(prompt.numpy(), max_new_tokens=_NEW_TOKENS)
            texts[seed] = prompt.tolist()  # rows are given in this order
        step = engine.advance(None, 0, time.perf_counter())
        while step is not None:
            inputs = session.tables.receive(step, session.slots[0])
            session.cache.move(inputs.moves)
            try:
                logits = runner.logits(inputs)
            except Exception as error:
                reason = f"its forward failed on packed sequences: {type(error).__name__}: {error}"
                raise refusal(model, reason) from error
            for row, row_logits in zip(inputs.sampled_rows.tolist(), logits, strict=True):
                alone = _alone(model, texts[row])
                _compare(model, row_logits, alone, tolerance)
                texts[row].append(int(row_logits.argmax()))
            session.slots[0].tokens[: logits.shape[0]] = logits.argmax(dim=-1)
            step = engine.advance(0, 0, time.perf_counter())
    return session.forward.recordings


def _alone(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """Logits after a text, by the model's own attention, asked as `generate` asks."""
    input_ids = torch.tensor([text], device=model.device)
    positions = torch.arange(len(text), device=model.device).unsqueeze(0)
    last = torch.tensor([len(text) - 1], device=model.device)
    accepts = forward_arguments(model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        accepts -= {"position_ids"}
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if (model.config._attn_implementation or "").startswith("paged|"):
        # Outside a batching engine these attend without a mask: attention is written out for them.
        context = forward_context(Recorder(model, len(text)))
    with context:
        return forward(model, accepts, input_ids, positions, last)[0]


def _compare(model: PreTrainedModel, packed: torch.Tensor, alone: torch.Tensor, tolerance: float) -> None:
    packed, alone = packed.double(), alone.double()
    scale = float(alone.abs().max().clamp(min=1e-9))
    difference = float((packed - alone).abs().max())
    if not difference <= tolerance * scale:
        raise refusal(
            model,
            "packed with another sequence, its logits are not those of the sequence alone: they differ by up to "
            f"{difference:.3g} of {scale:.3g} (allowed: {tolerance:g} of that). Something beside K and V of its "
            "attention calls depends on the other tokens of a batch or on earlier steps",
        )
