"""The backends, whether they can be had here, and the choice between them."""

import importlib.util
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from chairlift import _native
from chairlift.attention.native import DTYPES, NativeAttention
from chairlift.attention.sdpa import SdpaAttention

if TYPE_CHECKING:
    from chairlift.engine.cache import CallPages, Geometry
    from chairlift.engine.inputs import StepInputs

# What a model may be loaded with, or asked for by its "paged|" name.
_SERVED_NAMES = ("sdpa", "eager")
_FLASH_NAMES = ("flash_attention_2", "flash_attention_3")


class BackendInfo(NamedTuple):
    """A backend, and whether it can be had here."""

    name: str
    available: bool
    reason: str


class Backend(Protocol):
    """Attention over the pages of one call, for all rows of a step."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def described(self) -> str:
        """What it computes with."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether a step's contexts are copied together before they are read."""
        ...

    def scratch_bytes(self, bytes_per_token: int, num_heads: int, max_context: int) -> int:
        """Bytes it takes beside its inputs and its output, at most."""
        ...

    def begin(self, inputs: "StepInputs") -> None:
        """Prepares a step."""
        ...

    def attend(
        self,
        pages: "CallPages",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        writes: bool,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One call of the step's forward."""
        ...


def available_backends() -> list[BackendInfo]:
    """Every backend that the design knows, and why it can or cannot be had here."""
    no_cuda = "no CUDA device" if not torch.cuda.is_available() else "not served yet on CUDA devices"
    flash = importlib.util.find_spec("flash_attn")
    return [
        BackendInfo(
            "native", True, f"reads pages in place; instructions here: {', '.join(_native.instruction_sets())}"
        ),
        BackendInfo("sdpa", True, "torch's own SDPA over gathered pages"),
        BackendInfo("eager", True, "attention by its formula over gathered pages"),
        BackendInfo("flash_attention_2", False, no_cuda if flash else f"{no_cuda}; flash-attn is not installed"),
        BackendInfo("flash_attention_3", False, no_cuda),
        BackendInfo("torch varlen", False, no_cuda),
    ]


def choose_backend(
    attn_implementation: str | None,
    device: torch.device,
    geometry: "Geometry",
    dtypes: Collection[torch.dtype],
    *,
    auto_switch: bool = True,
) -> Backend:
    """The backend for a model.

    Args:
        attn_implementation: What the model was loaded with, a "paged|" before it or not.
        device: Where the model is.
        geometry: The model's pages and groups.
        dtypes: What its K and V are of.
        auto_switch: Take the best there is in place of `sdpa` and `eager`; else exactly these.

    Raises:
        ValueError: That implementation cannot be had there.
    """
    name = (attn_implementation or "eager").removeprefix("paged|")
    if name in _FLASH_NAMES:
        raise ValueError(
            f"the model asks for {name}, which is not served yet: load it with attn_implementation='sdpa' or 'eager'"
        )
    if name not in _SERVED_NAMES:
        raise ValueError(
            f"attention implementation {name!r} is not served: load the model with "
            f"attn_implementation='sdpa' or 'eager'"
        )
    if device.type == "cuda":
        raise ValueError("models on CUDA devices are not served yet: move the model to the CPU")
    if auto_switch and device.type == "cpu" and DTYPES.issuperset(dtypes):
        return NativeAttention(geometry.page_size, geometry.reaches)
    return SdpaAttention(geometry.page_size, geometry.reaches, written_out=name == "eager" and not auto_switch)
