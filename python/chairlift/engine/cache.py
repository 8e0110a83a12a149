"""The cache tensors: one storage of equal blocks, and each call's view of its pages in it."""

import ctypes
import mmap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from chairlift import _native
from chairlift.attention.plain import Reach
from chairlift.engine.inputs import BlockMoves
from chairlift.probe import Call, Kind


@dataclass(frozen=True, eq=False)
class CallPages:
    """The pages of one call, as views of the storage."""

    group: int
    k: torch.Tensor  # [blocks + trash, page, kv heads, head size]
    v: torch.Tensor  # [blocks + trash, page, kv heads, head size of V]


@dataclass(frozen=True)
class Geometry:
    """How the calls of a model share blocks of one size."""

    page_size: int
    block_bytes: int
    padding_bytes: int  # of a whole-model block
    reaches: tuple[Reach, ...]  # how far back the calls of each group look
    places: dict[int, tuple[int, int]]  # ordinal of a call with pages: its group, and its byte offset in the block

    @property
    def num_groups(self) -> int:
        """Groups of calls."""
        return len(self.reaches)

    def described(self) -> str:
        """The groups with their calls, and what the split costs."""
        calls = Counter(group for group, _ in self.places.values())
        names = [f"{calls[group]} x {reach}" for group, reach in enumerate(self.reaches)]
        unused = self.padding_bytes / self.model_block_bytes
        return f"{len(names)} of {self.block_bytes:,} bytes a block ({', '.join(names)}), {unused:.1%} of it padding"

    @property
    def model_block_bytes(self) -> int:
        """Bytes of `page_size` tokens of the whole model."""
        return self.block_bytes * self.num_groups


def geometry_of(calls: Sequence[Call], page_size: int) -> Geometry:
    """Splits a model's calls into groups."""
    of_kind: dict[Kind, list[int]] = {}
    for call in calls:
        if call.reads_from == call.ordinal:
            of_kind.setdefault(call.kind, []).append(call.ordinal)
    kinds = list(of_kind)
    sizes = [(len(of_kind[kind]), kind.page_bytes(page_size)) for kind in kinds]
    block_bytes, padding_bytes, groups = _native.split_into_groups(sizes)
    places = {}
    for group, (kind_index, start, end) in enumerate(groups):
        kind = kinds[kind_index]
        for place, ordinal in enumerate(of_kind[kind][start:end]):
            places[ordinal] = (group, place * kind.page_bytes(page_size))
    reaches = tuple(kinds[kind_index].reach for kind_index, _, _ in groups)
    return Geometry(page_size, block_bytes, padding_bytes, reaches, places)


class CacheTensors:
    """K and V of the whole pool, trash included."""

    def __init__(self, calls: Sequence[Call], geometry: Geometry, num_blocks: int, swap_blocks: int = 0) -> None:
        """Allocates the storage.

        Args:
            calls: The model's calls.
            geometry: How they share blocks.
            num_blocks: Whole-model blocks.
            swap_blocks: Blocks of host memory for victims.
        """
        self.geometry = geometry
        self.num_blocks = num_blocks
        blocks = num_blocks * geometry.num_groups + _native.NUM_TRASH_BLOCKS
        self.storage = cache_memory(blocks, geometry.block_bytes, calls[0].kind.device)
        self.host = cache_memory(swap_blocks, geometry.block_bytes, torch.device("cpu"))
        self._given_back = 0  # bytes of the device
        if self.storage.is_cuda and swap_blocks:
            self.host = self.host.pin_memory()
        own = {call.ordinal: self._views(call) for call in calls if call.ordinal in geometry.places}
        self.pages = [own[call.reads_from] for call in calls]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.storage.nbytes

    def give_back(self) -> None:
        """Gives the memory to the system or the device. What is in it is lost; every view stays, and must not be used
        before `take_again`."""
        if not self.storage.is_cuda:
            # The pages come back by themselves, as zeros, when they are written.
            for memory in (self.storage, self.host):
                _let_system_have(memory)
        elif not self._given_back:
            self._given_back = self.storage.untyped_storage().nbytes()
            self.storage.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def take_again(self) -> None:
        """Takes the memory again, filled with zeros.

        Raises:
            torch.OutOfMemoryError: The device has no room any more.
        """
        if self._given_back:
            self.storage.untyped_storage().resize_(self._given_back)
            self._given_back = 0
            self.storage.zero_()

    def move(self, moves: BlockMoves) -> None:
        """Copies blocks, in the order in which the engine counts on it: to the host, from the host, then within the
        pool."""
        for source, target, pairs in (
            (self.storage, self.host, moves.swap_outs),
            (self.host, self.storage, moves.swap_ins),
            (self.storage, self.storage, moves.copies),
        ):
            if source.is_cuda or target.is_cuda:
                if pairs.numel():
                    come_from, go_to = pairs.unbind(1)
                    target[go_to.to(target.device)] = source[come_from.to(source.device)].to(target.device)
            else:
                # Block by block: to gather them first would write, and touch, as much memory again.
                for come_from, go_to in pairs.tolist():
                    target[go_to].copy_(source[come_from])

    def _views(self, call: Call) -> CallPages:
        group, offset = self.geometry.places[call.ordinal]
        kind, page_size = call.kind, self.geometry.page_size
        flat = self.storage.view(kind.dtype)
        block, first = flat.stride(0), offset // kind.dtype.itemsize

        def view(first: int, size: int) -> torch.Tensor:
            shape = (flat.shape[0], page_size, kind.num_kv_heads, size)
            return flat.as_strided(shape, (block, kind.num_kv_heads * size, size, 1), first)

        k = view(first, kind.head_size)
        v = view(first + page_size * kind.num_kv_heads * kind.head_size, kind.head_size_v)
        return CallPages(group, k, v)


def _let_system_have(memory: torch.Tensor) -> None:
    """Gives the pages of memory from `cache_memory` back; reading them gives zeros from then on."""
    start, size = memory.data_ptr(), memory.nbytes
    if size and ctypes.CDLL(None, use_errno=True).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED
    ):
        raise OSError(ctypes.get_errno(), f"the system does not take {size:,} bytes of K and V back")


def cache_memory(blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """[blocks, block bytes] of zeros, not of garbage: what a mask hides is still multiplied by zero, and NaN times
    zero is NaN.

    Raises:
        MemoryError: The system has no room.
    """
    if device.type != "cpu":
        return torch.zeros((blocks, block_bytes), dtype=torch.uint8, device=device)
    if not blocks:
        return torch.empty((0, block_bytes), dtype=torch.uint8)
    # Zeroed by the system, page by page as it is written; torch would write it all now.
    try:
        memory = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"the system has no {blocks * block_bytes / 2**20:,.1f} MiB for {blocks} blocks of K and V ({error}): "
            "lower num_blocks, max_memory_percent or cpu_offload_space"
        ) from error
    # In small pages: a large one is zeroed as a whole where a sequence fills a part of it, and first touches cost a
    # virtual machine far more than address translations.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a system without large pages does not know the advice
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, block_bytes)
