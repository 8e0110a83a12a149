"""What a step brings to the device, and the tables that stay there: by row, changed only where something is new."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from chairlift import _native


class BlockMoves(NamedTuple):
    """Blocks that are copied before the forward, kind after kind; in no order within one. Each [moves, 2]: from, to."""

    swap_outs: torch.Tensor  # to the host
    swap_ins: torch.Tensor  # from the host
    copies: torch.Tensor


@dataclass(frozen=True)
class StepInputs:
    """The arena of one step as tensors, with the block tables of its rows."""

    decodes: int  # leading rows with one token
    rows: torch.Tensor  # [rows]
    cu_seqlens: list[int]  # rows + 1; tokens after the last are padding
    kv_lens: list[int]  # tokens of each row with K and V after the step
    bounds: torch.Tensor  # int32, `cu_seqlens` on the device
    lengths: torch.Tensor  # int32, `kv_lens` on the device
    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    write_slots: torch.Tensor  # [groups, tokens] int32, block * page size + token of the page
    logits_rows: torch.Tensor  # [sampled] tokens of the step
    sampled_rows: torch.Tensor  # [sampled] rows of the tables
    draws: torch.Tensor  # [sampled, 3] key (low, high) and position
    block_tables: list[torch.Tensor]  # per group, [rows, pages] int32
    moves: BlockMoves


@dataclass(frozen=True)
class SamplingTable:
    """Sampling parameters by row; the last row is trash."""

    draws: torch.Tensor  # bool: a draw, not greedy
    temperature: torch.Tensor  # fp32
    top_k: torch.Tensor  # int64; 0: all
    top_p: torch.Tensor  # fp32; 1: all


class Slot:
    """The buffers of one slot: what goes to the device, and what comes back."""

    def __init__(self, arena_capacity: int, max_requests: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.arena = torch.zeros(arena_capacity, dtype=torch.int32, pin_memory=pin)
        self.tokens = torch.zeros(max_requests, dtype=torch.int32, pin_memory=pin)
        self.logprobs = torch.zeros(max_requests, dtype=torch.float32, pin_memory=pin)


class DeviceTables:
    """Block tables and sampling parameters, by row."""

    def __init__(
        self,
        num_groups: int,
        max_requests: int,
        page_size: int,
        device: torch.device,
        *,
        pages: int,
        write_trash: int,
        first_regime: int | None,
    ) -> None:
        """Tables of zeros.

        Args:
            num_groups: Groups of calls.
            max_requests: Rows, without the trash row.
            page_size: Tokens of a page.
            device: Where they are.
            pages: Of a row, at first.
            write_trash: The block that padding writes.
            first_regime: Longest sequence of the RoPE's first regime, where it has two.
        """
        self.write_trash = write_trash
        self.first_regime = first_regime
        self.page_size = page_size
        self.device = device
        self.block_tables = torch.zeros((num_groups, max_requests + 1, pages), dtype=torch.int32, device=device)
        rows = max_requests + 1
        self.sampling = SamplingTable(
            draws=torch.zeros(rows, dtype=torch.bool, device=device),
            temperature=torch.ones(rows, device=device),
            top_k=torch.zeros(rows, dtype=torch.int64, device=device),
            top_p=torch.ones(rows, device=device),
        )

    def receive(self, step: _native.Step, slot: Slot) -> StepInputs:
        """Takes a step in: applies its changes to the tables, and returns the rest."""
        layout = step.layout
        # One copy to the device; on a CPU the arena is used where it is until the step is committed.
        arena = slot.arena[: layout["swap_ins"].stop].to(self.device, non_blocking=True)
        part = {name: arena[where] for name, where in layout.items()}
        if part["table_changes"].numel():
            self._change_tables(part["table_changes"].view(-1, 4).long())
        if part["row_changes"].numel():
            self._change_rows(part["row_changes"].view(-1, 5))
        rows = part["rows"].long()
        # Lengths are needed on the host by backends that loop over sequences.
        bounds: list[int] = slot.arena[layout["cu_seqlens"]].tolist()
        lengths: list[int] = slot.arena[layout["kv_lens"]].tolist()
        num_groups = self.block_tables.shape[0]
        pages = -(-max(lengths) // self.page_size)
        logits_rows = part["logits_rows"].long()
        row_of_token = torch.bucketize(logits_rows, part["cu_seqlens"][1:].long(), right=True)
        inputs = StepInputs(
            decodes=step.decodes,
            rows=rows,
            cu_seqlens=bounds,
            kv_lens=lengths,
            bounds=part["cu_seqlens"],
            lengths=part["kv_lens"],
            input_ids=part["tokens"].long().unsqueeze(0),
            position_ids=part["positions"].long().unsqueeze(0),
            write_slots=part["write_slots"].view(num_groups, -1),
            logits_rows=logits_rows,
            sampled_rows=rows[row_of_token],
            draws=part["draws"].view(-1, 3),
            block_tables=[table[rows, :pages] for table in self.block_tables],
            moves=BlockMoves(*(part[name].view(-1, 2).long() for name in ("swap_outs", "swap_ins", "copies"))),
        )
        if step.second_regime and max(lengths) <= (self.first_regime or 0):
            return self._padded(inputs)
        return inputs

    def _padded(self, inputs: StepInputs) -> StepInputs:
        """With one token more, that belongs to nobody and stands beyond the first regime: a RoPE of two regimes looks
        at the longest position of a forward, and these are the first chunks of sequences that are longer."""

        def longer(tensor: torch.Tensor, value: int) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (0, 1), value=value)

        return dataclasses.replace(
            inputs,
            input_ids=longer(inputs.input_ids, 0),
            position_ids=longer(inputs.position_ids, self.first_regime or 0),
            write_slots=longer(inputs.write_slots, self.write_trash * self.page_size),
        )

    def _change_tables(self, changes: torch.Tensor) -> None:
        group, row, page, block = changes.unbind(1)
        width = self.block_tables.shape[2]
        needed = int(page.max()) + 1
        if needed > width:
            grown = self.block_tables.new_zeros((*self.block_tables.shape[:2], max(needed, 2 * width)))
            grown[:, :, :width] = self.block_tables
            self.block_tables = grown
        self.block_tables[group, row, page] = block.int()

    def _change_rows(self, changes: torch.Tensor) -> None:
        row = changes[:, 0].long()
        self.sampling.draws[row] = changes[:, 1].bool()
        self.sampling.temperature[row] = changes[:, 2].contiguous().view(torch.float32)
        self.sampling.top_k[row] = changes[:, 3].long()
        self.sampling.top_p[row] = changes[:, 4].contiguous().view(torch.float32)
