"""The fingerprint of a model's weights: whether a forward still computes with what it computed with before.

Owns what counts as a weight and how its bytes are reached; never writes a tensor. The bytes themselves are read: the
version counters of tensors are not enough, for fused optimisers and `.data` do not move them.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chairlift import _native

# Large enough that the work on a piece in Python (some 10 us) is small beside its hash (0.5 ms), small enough that
# threads end together and a copy needs little memory.
PIECE_BYTES = 4 << 20

# A few cores take all that memory gives.
MAX_THREADS = 8

# What PEFT's modules, those of `transformers`' own integration among them, and `PeftModel` keep about adapters.
# `scaling` is what an adapter's share is multiplied with.
ADAPTER_STATE = (
    "active_adapter",
    "active_adapters",
    "disable_adapters",
    "merged_adapters",
    "scaling",
    "_adapters_disabled",
)

# Numpy has no bfloat16 or float8; an element of the same size shows the same bytes, whatever the strides.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal to another one where nothing changed that a forward computes with, in any process."""

    digest: str
    """128 bits, in hexadecimal digits."""


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Reads all parameters and buffers of a model, and which adapters act.

    Names, shapes, dtypes, devices, bytes and the order of dimensions in memory count; gradients, `requires_grad`,
    training mode and the address of a tensor do not. Nobody may write a weight meanwhile.

    Tensors in host memory are read where they lie, several threads sharing the work; those with gaps between their
    elements are copied piece by piece. Tensors of another device are copied to the host piece by piece, in the order of
    the calling thread's current stream (no such device is among those this is tested on). A tensor subclass made of
    other tensors, as quantisation libraries have them, counts with those.

    Raises:
        TypeError: The bytes of a parameter or buffer cannot be read: it is on the meta device, not materialised, sparse
            or of a subclass that does not tell its parts, for example. The message names it.
    """
    summary = hashlib.blake2b(digest_size=16)
    # The bytes are wanted as they are, not as a subclass presents them.
    with torch._C.DisableTorchFunctionSubclass():
        weights = sorted(_weights(model), key=lambda weight: weight.name)
        digests = _digests(weights)
    for weight in weights:
        summary.update(repr((weight.name, weight.description)).encode())
        if weight.tensor is not None:
            summary.update(digests[_memory(weight.tensor)])
    for line in sorted(_adapter_lines(model)):
        summary.update(line.encode())
    return Fingerprint(summary.hexdigest())


class _Weight(NamedTuple):
    """A parameter, a buffer or a part of one; the whole of parts has no tensor of its own."""

    name: str
    description: str
    tensor: torch.Tensor | None


def _weights(model: torch.nn.Module) -> Iterator[_Weight]:
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in itertools.chain(parameters, model.named_buffers(remove_duplicate=False)):
        yield from _parts(name, tensor)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[_Weight]:
    if torch.nn.parameter.is_lazy(tensor):
        raise _unreadable(name, "it is not materialised yet")
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        yield _Weight(name, f"{type(tensor).__qualname__} {tuple(tensor.shape)} {_plain(context)}", None)
        for part in names:
            yield from _parts(f"{name}.{part}", getattr(tensor, part))
        return
    if tensor.is_meta:
        raise _unreadable(name, "it is on the meta device")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise _unreadable(name, f"it is sparse, nested or quantised ({tensor.layout}, {tensor.dtype})")
    try:
        plain = tensor.detach().as_subclass(torch.Tensor)
    except (NotImplementedError, TypeError) as error:
        raise _unreadable(name, f"{type(tensor).__qualname__} does not tell its parts") from error
    order = list(range(plain.ndim))
    if not plain.is_contiguous():
        # A transposed matrix has no gaps: its elements are read as they lie, 30 times faster than copied in order.
        order.sort(key=plain.stride, reverse=True)
        plain = plain.permute(order)
    yield _Weight(name, f"{tensor.dtype} {tuple(tensor.shape)} {order} {tensor.device}", plain)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies. Two that are the same here have the same bytes, such as tied weights."""
    return tensor.device, tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride()


def _digests(weights: list[_Weight]) -> dict[tuple[Any, ...], bytes]:
    """The digests of the pieces of each tensor, by where it lies."""
    digests: dict[tuple[Any, ...], bytes] = {}
    in_place: list[npt.NDArray[np.uint8]] = []
    owners: list[tuple[Any, ...]] = []
    for name, _, tensor in weights:
        if tensor is None or (memory := _memory(tensor)) in digests:
            continue
        digests[memory] = b""
        readable = tensor.device.type == "cpu" and tensor.is_contiguous()
        for piece in _pieces(tensor):
            if readable:
                in_place.append(_bytes(name, piece))
                owners.append(memory)
            else:  # hashed at once, so that one copy is there at a time
                digests[memory] += _native.digests([_bytes(name, piece.cpu())], 1)[0]
    num_bytes = sum(piece.nbytes for piece in in_place)
    num_threads = min(torch.get_num_threads(), MAX_THREADS, 1 + num_bytes // PIECE_BYTES)
    for memory, digest in zip(owners, _native.digests(in_place, num_threads), strict=True):
        digests[memory] += digest
    return digests


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of at most `PIECE_BYTES` that make up the tensor, in the order of its elements."""
    if tensor.nbytes <= PIECE_BYTES:
        yield tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    num_rows = PIECE_BYTES // tensor[0].nbytes
    if num_rows:
        yield from torch.split(tensor, num_rows)
    else:
        for row in tensor.unbind():
            yield from _pieces(row)


def _bytes(name: str, piece: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in host memory, in the order of its elements; a copy only where there are gaps."""
    try:
        elements = piece.view(_SAME_SIZE[piece.element_size()]).numpy()
    except RuntimeError as error:
        raise _unreadable(name, str(error)) from error
    flat: npt.NDArray[np.uint8] = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    return flat


def _adapter_lines(model: torch.nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name in ADAPTER_STATE:
            # Asked of the class first: a module's own lookup of what is not there is slow, and wrappers pass it on.
            if name in vars(module) or hasattr(type(module), name):
                value = getattr(module, name, None)
                if value is not None and not callable(value):  # some models have methods of these names
                    yield repr((path, name, _plain([value] if isinstance(value, str) else value)))


def _plain(value: object) -> str:
    """A text that is the same for equal values in every process."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.tolist()}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_plain(key)}: {_plain(item)}' for key, item in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__} {_plain(fields)}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _unreadable(name: str, reason: str) -> TypeError:
    return TypeError(f"the bytes of {name!r}, a parameter or buffer of the model, cannot be read: {reason}")
