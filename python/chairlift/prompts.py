"""Prompts as users give them, to arrays; or a clear error."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Prompt = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor


def prompt_array(prompt: Any, name: str = "input_ids") -> npt.NDArray[np.int64]:
    """One prompt as a one-dimensional int64 array of its own.

    Raises:
        TypeError: Not a flat sequence of integers. Whether the ids are in the vocabulary is the engine's to say.
    """
    if isinstance(prompt, torch.Tensor):
        array = prompt.detach().cpu().numpy() if prompt.dtype != torch.bfloat16 else np.zeros(1, np.float32)
    elif isinstance(prompt, str | bytes | Mapping):
        hint = (
            ": tokenise it first"
            if isinstance(prompt, str)
            else ": pass its 'input_ids'"
            if isinstance(prompt, Mapping)
            else ""
        )
        raise TypeError(f"{name} is a {type(prompt).__name__}, but must be a flat sequence of token ids{hint}")
    else:
        try:
            array = np.asarray(prompt)
        except ValueError:
            raise TypeError(f"{name} is nested, but must be a flat sequence of token ids") from None
    if array.ndim != 1:
        raise TypeError(f"{name} has {array.ndim} dimensions, but must be a flat sequence of token ids")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} holds {_named(prompt, array)}, but token ids are integers")
    if array.dtype == np.uint64 and int(array.max()) >= 2**63:
        raise TypeError(f"{name} holds {int(array.max())}, but token ids are below 2^63")
    return np.array(array, np.int64)


Prompts = Sequence[npt.NDArray[np.int64]] | npt.NDArray[np.int64]


def packed_prompts(inputs: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Prompts]:
    """Several prompts one after the other in one array, their lengths, and the prompts themselves.

    Args:
        inputs: Prompts; or an array with one in each row. What is returned may be this array itself.

    Raises:
        TypeError: A prompt that is no flat sequence of integers, by its place.
    """
    if isinstance(inputs, np.ndarray) and inputs.ndim == 2 and inputs.dtype.kind in "iu" and inputs.dtype != np.uint64:
        rows = np.ascontiguousarray(inputs, np.int64)
        return rows.reshape(-1), np.full(rows.shape[0], rows.shape[1], np.int64), rows
    prompts = [prompt_array(prompt, f"inputs[{index}]") for index, prompt in enumerate(inputs)]
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    return np.concatenate(prompts) if prompts else np.zeros(0, np.int64), lengths, prompts


def _named(prompt: Any, array: npt.NDArray[Any]) -> str:
    """The first value that is no integer, or what the array is made of."""
    if isinstance(prompt, torch.Tensor | np.ndarray):
        return f"values of type {prompt.dtype}"
    for value in prompt:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            return repr(value)
    return f"numbers beyond 64 bits ({array.dtype})"
