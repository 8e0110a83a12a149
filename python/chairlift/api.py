"""The three entry points, as functions of a model; and `install`, which makes them methods of every model."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from chairlift import _native
from chairlift.config import ContinuousBatchingConfig
from chairlift.kept import keep, take
from chairlift.manager import ContinuousBatchingManager
from chairlift.outputs import GenerationOutput, WorkloadHints
from chairlift.probe import require_model
from chairlift.prompts import Prompt, prompt_array
from chairlift.sampling.options import GenerationOptions

_ENTRY_POINTS = (
    "generate_batch",
    "continuous_batching_context_manager",
    "init_continuous_batching",
    "destroy_cached_continuous_batching_manager",
)


def init_continuous_batching(
    model: PreTrainedModel,
    generation_config: GenerationConfig | GenerationOptions | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """Makes a manager, which the caller starts and stops.

    Where the model keeps one from a session before (`stop(keep_for_next_session=True)`), that one is taken up again,
    generating as is said here. One that was asked for with another batching config, or is too small for these hints, is
    destroyed, and a new one made.

    Args:
        model: A causal language model of transformers.
        generation_config: How requests generate unless they say otherwise. None: the model's.
        continuous_batching_config: Sizes and rules. None: the defaults.
        workload_hints: What is known of the requests to come; defaults follow from it.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: The model cannot be served (and why), or a value is out of bounds or not served yet.
    """
    require_model(model)
    kept = take(model)
    if kept is not None and kept.is_running():
        keep(kept)  # somebody started it: it is theirs
        kept = None
    if kept is None:
        return ContinuousBatchingManager(model, generation_config, continuous_batching_config, workload_hints)
    try:
        config = ContinuousBatchingConfig.chosen(continuous_batching_config, generation_config, model)
        hints = WorkloadHints.of(workload_hints)
        if kept.serves(config, hints):
            kept.take_up(generation_config)
            return kept
    except Exception:
        keep(kept)
        raise
    if config == kept.asked_config:
        hints = hints.joined(kept.hints)
    kept.destroy()  # its memory is for the new one
    return ContinuousBatchingManager(model, generation_config, config, hints)


def destroy_cached_continuous_batching_manager(model: PreTrainedModel) -> None:
    """Destroys the manager that the model keeps for the next session, if it keeps one."""
    kept = take(model)
    if kept is not None:
        kept.destroy()


@contextmanager
def continuous_batching_context_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | GenerationOptions | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,  # noqa: ARG001
    workload_hints: WorkloadHints | None = None,
) -> Iterator[ContinuousBatchingManager]:
    """A started manager, stopped (when everything has ended) and destroyed (or kept) at the end of the block.

    Args:
        model: See `init_continuous_batching`; so the others that are not here.
        generation_config: See there.
        block: Wait for the loop's end.
        timeout: How long, in seconds; what has not ended by then fails. None: for ever.
        continuous_batching_config: See there.
        persistent_manager: The model keeps the manager for the next session; see `init_continuous_batching`.
        warmup: Accepted: there is nothing to warm up on a CPU.
        workload_hints: See there.

    Raises:
        TypeError, ValueError: As `init_continuous_batching`.
    """
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
    try:
        # An interrupt may come as soon as the thread is there.
        manager.start(once=not persistent_manager)
        yield manager
    except BaseException:
        manager.stop(hard_stop=True, keep_for_next_session=persistent_manager)
        raise
    else:
        manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
    finally:
        if block and not persistent_manager:
            manager.destroy()


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Prompt],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generates for a batch of prompts with continuous batching.

    Args:
        model: A causal language model of transformers.
        inputs: The prompts: flat sequences of token ids (lists, numpy arrays or tensors).
        generation_config: How they generate. None: the model's own.
        continuous_batching_config: Sizes and rules. None: the defaults, from these prompts.
        record_timestamps: Keep the time of each token.
        progress_bar: Show one.
        persistent_manager: The model keeps the manager for the next call with the same batching config, which then need
            not make one, and shares the prefix cache with this one (as far as the weights are the same). Its pool is
            sized by the memory, not by these prompts. `destroy_cached_continuous_batching_manager` lets it go.
        warmup: Accepted: there is nothing to warm up on a CPU.
        kwargs: Fields of `GenerationConfig` that override it, such as `max_new_tokens`.

    Returns:
        An output for each prompt, in order, by label (`req_0`, `req_1`, ...). One that failed has its `error` set. With
        `num_return_sequences`, the others of a prompt follow its first: `req_0`, `req_0__child#0`, ...

    Raises:
        TypeError: A prompt that is no flat sequence of integers (named by its index), or an unknown keyword.
        ValueError: A prompt that is empty, has an id outside the vocabulary or cannot fit, named by its index, before
            any of them starts; a model that cannot be served; a value that is out of bounds or not served yet.
        RuntimeError: The loop died; its cause is chained.
    """
    if kwargs.get("cache_implementation") == "paged":
        inputs, kwargs = _from_generate(inputs, kwargs)
    prompts = [prompt_array(prompt, f"inputs[{index}]") for index, prompt in enumerate(inputs)]
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"inputs[{index}]: the prompt is empty: a request needs at least one token")
    cb_config = ContinuousBatchingConfig.chosen(continuous_batching_config, generation_config, model)
    options = GenerationOptions.resolve(
        model, generation_config, drop_unsupported_processors=cb_config.drop_unsupported_processors, **kwargs
    )
    if not prompts:
        return {}
    # Of the calls to come on a manager that is kept nothing is known, and what is cached should find room beside them.
    hints = None if persistent_manager else _hints([len(prompt) for prompt in prompts], options)
    manager_cm = continuous_batching_context_manager(
        model,
        options,
        continuous_batching_config=cb_config,
        persistent_manager=persistent_manager,
        warmup=warmup,
        workload_hints=hints,
    )
    outputs: dict[str, GenerationOutput] = {}
    bar = tqdm(
        total=len(prompts) * options.num_return_sequences, disable=not progress_bar, desc="Generating", unit="request"
    )
    with bar, manager_cm as manager:

        def collect() -> None:
            output = manager.get_result()
            if manager.fatal_error is not None or output is None:
                raise RuntimeError("the loop ended before every request did") from manager.fatal_error
            outputs[output.request_id] = output
            bar.update()

        checked = manager.checked(prompts)
        # At once, as sharing and packing are best when all are known; a bounded queue takes one whenever it has room.
        handed = [[prompt] for prompt in checked] if manager.config.max_queue_size else [checked]
        labels: list[str] = []
        for together in handed:
            while True:
                try:
                    added = manager.add_requests(together, record_timestamps=record_timestamps)
                    break
                except _native.QueueFull:
                    collect()
            labels += [name for label in added for name in manager.family(label)]
        while len(outputs) < len(labels):
            collect()
    return {label: outputs[label] for label in labels}


def _from_generate(inputs: Sequence[Prompt], arguments: dict[str, Any]) -> tuple[Sequence[Prompt], dict[str, Any]]:
    """What `model.generate(..., cache_implementation="paged")` hands on: a padded batch, and all its keywords."""
    fields = {name: value for name, value in arguments.items() if name != "cache_implementation"}
    fields.pop("input_ids", None)  # the inputs once more
    mask = fields.pop("attention_mask", None)
    if mask is not None:
        rows = torch.as_tensor(mask).bool()
        padded = [torch.as_tensor(prompt) for prompt in inputs]
        if rows.dim() != 2 or len(padded) != rows.shape[0] or any(len(row) != rows.shape[1] for row in padded):
            raise ValueError(f"attention_mask has shape {list(rows.shape)}, but must be that of the inputs")
        inputs = [prompt[row] for prompt, row in zip(padded, rows.cpu(), strict=True)]
    return inputs, fields


def _hints(lengths: list[int], options: GenerationOptions) -> WorkloadHints:
    if options.max_new_tokens is None and options.max_length is None:
        return WorkloadHints(max_prompt_length=max(lengths), num_requests=len(lengths))
    generated = [options.new_tokens_for(length, length + 1) for length in lengths]
    return WorkloadHints(
        max_prompt_length=max(lengths),
        max_generated_length=max(generated),
        num_requests=len(lengths),
        num_tokens=sum(lengths) + sum(generated),
    )


class ContinuousMixin:
    """The entry points as methods, for a model class that is to have chairlift's without `install`:
    `class Model(ContinuousMixin, LlamaForCausalLM)`."""


_installed: dict[str, Any] = {}


def install() -> None:
    """Makes `generate_batch`, `continuous_batching_context_manager` and `init_continuous_batching` of every
    transformers model chairlift's. May be called again."""
    if _installed:
        return
    for name in _ENTRY_POINTS:
        # The class's own attribute, not an inherited one: that is what `uninstall` must put back.
        _installed[name] = vars(GenerationMixin).get(name)
        setattr(GenerationMixin, name, _as_method(globals()[name]))


def uninstall() -> None:
    """Gives the models back what `install` replaced."""
    for name, own in _installed.items():
        if own is None:
            delattr(GenerationMixin, name)
        else:
            setattr(GenerationMixin, name, own)
    _installed.clear()


def _as_method(function: Any) -> Any:
    @functools.wraps(function)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


for _name in _ENTRY_POINTS:
    setattr(ContinuousMixin, _name, _as_method(globals()[_name]))

__all__ = [*_ENTRY_POINTS, "ContinuousMixin", "install", "uninstall"]
