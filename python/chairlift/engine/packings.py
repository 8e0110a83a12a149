"""Packed copies of a linear layer's weight on a CPU, and what computes with them.

Two know how: the kernels in Rust, and oneDNN, which torch carries. MKL's packing, the other one in torch, serves one
number of rows and computes every other from the weight as it is; a step has any number of rows.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from chairlift import _native

# oneDNN packs in tiles; none that it uses is longer.
_ONEDNN_TILE = 64
# Rows that its tiles are chosen for. With one row oneDNN takes others, which are slow with more.
_ONEDNN_ROWS = 512
# Columns of the widest panel of the kernels, and elements that are packed together.
_NATIVE_WIDTH, _NATIVE_DEPTH = 48, 32


class Packing(Protocol):
    """A packed copy."""

    title: ClassVar[str]
    """Who packs, for people."""
    kernel_bytes: ClassVar[int] = 0
    """Bytes that are kept beside the copies for each shape and each number of `padded_rows`, at most."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Packs a weight [out, in].

        Raises:
            RuntimeError: It cannot be packed here.
            AttributeError: This torch does not know how.
        """
        ...

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., in] to [..., out], of the weight's dtype and of two dimensions or more."""
        ...

    @staticmethod
    def copy_bytes(weight: torch.Tensor) -> int:
        """Bytes of a copy, at most."""
        ...


class NativePacking(Packing):
    """Packed for the kernels in Rust."""

    title = "chairlift"

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_size = weight.shape[0]
        self.linear = _native.PackedLinear(_capsule(weight), torch.get_num_threads())

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = input.new_empty((*input.shape[:-1], self.out_size))
        self.linear.multiply(
            to_dlpack(input if input.is_contiguous() else input.contiguous()),
            to_dlpack(out),
            None if bias is None else _capsule(bias),
        )
        return out

    @staticmethod
    def copy_bytes(weight: torch.Tensor) -> int:
        out_size, in_size = weight.shape
        return (out_size + _NATIVE_WIDTH) * (in_size + _NATIVE_DEPTH) * weight.element_size()


class NativeJoin:
    """Layers of one input and a program over their results, computed in one by the kernels."""

    def __init__(self, joined: _native.JoinedLinears, out_size: int) -> None:
        """Takes the kernels'."""
        self._joined = joined
        self._out_size = out_size

    @classmethod
    def of(cls, packings: Sequence[NativePacking], program: _native.RowProgram) -> "NativeJoin | None":
        """That of layers and a program; None where they cannot be joined."""
        try:
            joined = _native.JoinedLinears([packing.linear for packing in packings], program)
        except ValueError:
            return None
        return cls(joined, packings[0].out_size)

    def __call__(self, input: torch.Tensor, biases: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """[..., in] to [..., out]; arguments as a packing's."""
        out = input.new_empty((*input.shape[:-1], self._out_size))
        self._joined.multiply(
            to_dlpack(input if input.is_contiguous() else input.contiguous()),
            to_dlpack(out),
            [None if bias is None else _capsule(bias) for bias in biases],
        )
        return out


class OneDnnPacking(Packing):
    """Packed by oneDNN."""

    title = "oneDNN"
    # What oneDNN, and torch's cache in front of it, keep (0.2 to 0.75 MiB measured).
    kernel_bytes = 3 << 18

    def __init__(self, weight: torch.Tensor) -> None:
        if not (torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()):
            raise RuntimeError("oneDNN is not part of this torch, or was switched off")
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ONEDNN_ROWS)

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = input.numel() // input.shape[-1]
        padding = padded_rows(rows) - rows
        if not padding:
            return self._call(input, bias)
        flat = torch.constant_pad_nd(input.reshape(rows, input.shape[-1]), (0, 0, 0, padding))
        out = self._call(flat, bias)[:rows]
        return out.view(*input.shape[:-1], out.shape[-1])

    def _call(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(input, self._packed, bias, "none", [], "")
        return out

    @staticmethod
    def copy_bytes(weight: torch.Tensor) -> int:
        out_size, in_size = (-(-size // _ONEDNN_TILE) * _ONEDNN_TILE for size in weight.shape)
        return out_size * in_size * weight.element_size()


# By name, in the order of preference among those that are equally fast.
PACKINGS: Mapping[str, type[Packing]] = MappingProxyType(
    {packing.title: packing for packing in (NativePacking, OneDnnPacking)}
)


def padded_rows(rows: int) -> int:
    """Rows that oneDNN's packed call computes for so many: at most an eighth more.

    oneDNN makes and keeps a kernel for each number of rows it meets (some ms, and some hundred KiB), and a step may
    have any. Rounded up to three binary digits after the first there are eight numbers for each doubling.
    """
    granule = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // granule) * granule


def _capsule(tensor: torch.Tensor) -> object:
    """A tensor for the kernels, its last dimension contiguous."""
    tensor = tensor.detach()
    capsule: object = to_dlpack(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
    return capsule
