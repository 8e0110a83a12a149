"""The engines that are compared. Each loads its model and returns the call that is timed."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import openvino_model
from floor import StepLog, recorded_steps
from workloads import Task, Tokens

# Tokens in one K and V block of OpenVINO's CPU plugin.
OPENVINO_BLOCK = 32
WARM_UP_PROMPTS = ([504, 808, 2775, 288], [9690, 198, 2683, 359, 253])
WARM_UP_TOKENS = 4
# Prompts that are padded into one batch.
PADDED_ROWS = 64


class Answer(NamedTuple):
    """What a call returned."""

    tokens: list[Tokens]
    """The new ones, in the order of the prompts."""
    log: StepLog | None = None
    """The steps that were run, from chairlift."""


# Prompts, new tokens of each.
Generate = Callable[[Sequence[Tokens], int], Answer]


@dataclass(frozen=True)
class Engine:
    """One of those that can be compared."""

    title: str
    load: Callable[[Task], Generate]
    module: str
    """What must be importable."""
    ours: bool = False
    """Whether its speed is told in times that of the others."""


def load_torch_model(dtype: str) -> Any:
    """The model that chairlift and transformers share, in that dtype."""
    import torch

    from chairlift.cli.demo import load_demo

    model, _ = load_demo(getattr(torch, dtype))
    # `generate` fills what a generation config leaves open from the model's own, so eos goes there.
    model.generation_config.eos_token_id = None
    # The file is mapped: weights are resident, and counted as loaded, once they are read.
    for parameter in model.parameters():
        parameter.sum()
    return model


def ordered_tokens(results: dict[str, Any], count: int) -> list[Tokens]:
    """The tokens of each result in the order of the inputs; RuntimeError if one is missing or failed."""
    tokens = []
    for label in (f"req_{n}" for n in range(count)):
        result = results.get(label)
        if result is None or result.error is not None:
            raise RuntimeError(f"{label}: {'no result' if result is None else result.error}")
        tokens.append(list(result.generated_tokens))
    return tokens


def load_chairlift(task: Task) -> Generate:
    """`chairlift.generate_batch`."""
    return _chairlift(task, sharing=True)


def load_unshared_chairlift(task: Task) -> Generate:
    """The same without the prefix cache."""
    return _chairlift(task, sharing=False)


def _chairlift(task: Task, *, sharing: bool) -> Generate:
    import chairlift

    model = load_torch_model(task.dtype)

    def generate(prompts: Sequence[Tokens], new_tokens: int) -> Answer:
        with recorded_steps() as log:
            results = chairlift.generate_batch(
                model, list(prompts), _greedy(new_tokens), _batching(task, sharing=sharing)
            )
        return Answer(ordered_tokens(results, len(prompts)), log)

    return generate


def load_started_chairlift(task: Task) -> Generate:
    """A manager of chairlift that serves already, its cache sized for the task, when the prompts come."""
    import chairlift

    model, size = load_torch_model(task.dtype), task.size
    lengths = [len(prompt) for prompt in task.prompts()]
    manager = chairlift.init_continuous_batching(
        model,
        _greedy(size.new_tokens),
        _batching(task, sharing=True),
        chairlift.WorkloadHints(
            max_prompt_length=max(lengths),
            max_generated_length=size.new_tokens,
            num_requests=max(len(lengths), len(WARM_UP_PROMPTS)),
        ),
    )
    manager.start()
    atexit.register(manager.destroy)

    def generate(prompts: Sequence[Tokens], new_tokens: int) -> Answer:
        with recorded_steps() as log:
            labels = manager.add_requests(list(prompts), max_new_tokens=new_tokens)
            results = {f"req_{n}": manager.get_result(label) for n, label in enumerate(labels)}
        return Answer(ordered_tokens(results, len(prompts)), log)

    return generate


def _greedy(new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)


def _batching(task: Task, *, sharing: bool) -> Any:
    import chairlift

    return chairlift.ContinuousBatchingConfig(max_batch_tokens=task.max_batch_tokens, allow_block_sharing=sharing)


def load_generate_batch(task: Task) -> Generate:
    """transformers' own `model.generate_batch`."""
    from transformers import ContinuousBatchingConfig

    model = load_torch_model(task.dtype)
    if not type(model).generate_batch.__module__.startswith("transformers."):
        raise RuntimeError("generate_batch is not transformers' own in this process; is chairlift installed into it?")

    def generate(prompts: Sequence[Tokens], new_tokens: int) -> Answer:
        results = model.generate_batch(
            list(prompts),
            generation_config=_greedy(new_tokens),
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=task.max_batch_tokens),
        )
        return Answer(ordered_tokens(results, len(prompts)))

    return generate


def load_padded(task: Task) -> Generate:
    """transformers' `model.generate`, prompts of like length padded on the left into batches of 64."""
    return _padded(task, rows=PADDED_ROWS)


def load_alone(task: Task) -> Generate:
    """transformers' `model.generate`, one prompt after the other."""
    return _padded(task, rows=1)


def _padded(task: Task, *, rows: int) -> Generate:
    import torch

    model = load_torch_model(task.dtype)

    def generate_padded(prompts: Sequence[Tokens], new_tokens: int) -> list[Tokens]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), model.config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.config.pad_token_id,
        )
        new: list[Tokens] = output[:, width:].tolist()
        return new

    def generate(prompts: Sequence[Tokens], new_tokens: int) -> Answer:
        tokens: list[Tokens] = [[] for _ in prompts]
        for batch in like_lengths(prompts, rows):
            for index, new in zip(batch, generate_padded([prompts[n] for n in batch], new_tokens), strict=True):
                tokens[index] = new
        return Answer(tokens)

    return generate


def like_lengths(prompts: Sequence[Tokens], rows: int) -> list[list[int]]:
    """The prompts' indices in batches of at most `rows`, by length."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    return [by_length[start : start + rows] for start in range(0, len(by_length), rows)]


def load_openvino(task: Task) -> Generate:
    """OpenVINO GenAI's continuous batching."""
    import numpy as np
    import openvino
    import openvino_genai

    lengths = [len(prompt) + task.size.new_tokens for prompt in task.prompts()]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = task.max_batch_tokens
    scheduler.max_num_seqs = max(scheduler.max_num_seqs, len(lengths))
    scheduler.num_kv_blocks = sum(-(-length // OPENVINO_BLOCK) for length in lengths) + len(WARM_UP_PROMPTS)
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        openvino_model.model_folder(), scheduler, "CPU", openvino_model.plugin_settings(task.dtype)
    )

    def generate(prompts: Sequence[Tokens], new_tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.do_sample = False
        config.ignore_eos = True
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return Answer([list(result.m_generation_ids[0]) for result in results])

    return generate


ENGINES: dict[str, Engine] = {
    "chairlift": Engine("chairlift", load_chairlift, "chairlift", ours=True),
    "started": Engine("chairlift, started before", load_started_chairlift, "chairlift", ours=True),
    "unshared": Engine("chairlift, no sharing", load_unshared_chairlift, "chairlift"),
    "generate_batch": Engine("transformers generate_batch", load_generate_batch, "transformers"),
    "padded": Engine("transformers generate, padded", load_padded, "transformers"),
    "alone": Engine("transformers generate, alone", load_alone, "transformers"),
    "openvino": Engine("OpenVINO GenAI", load_openvino, "openvino_genai"),
}
