"""The host's half of a step in transformers' continuous batching, driven with a forward that computes nothing.

All that is timed is transformers' own code, by its own objects: the manager makes the cache, the scheduler, the input
tensors and the batch processor, and a step is the processor's `prepare_next_batch` (it reads the queues, calls
`schedule_batch`, gives out blocks and prepares the input tensors) and its `update_batch`. The forward and the sampling
between the two are left out: tokens are put where the sampling would have left them.

Where there is a choice it is the one that is cheaper for transformers: its attention wants no mask, the loop is the
synchronous one, which carries no tokens over, and torch runs on one thread, on which its many small fills are faster.

It reaches past the public interface of transformers 5.24 in two places: the call that makes the batch processor
without the loop's thread, and the setting of the block table path (below).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

NO_END = -1
TOKEN = 7


class StepPath(Enum):
    """The two ways in which its decode-only steps tell the attention where K and V are."""

    BLOCK_TABLE = "block table"
    """The decode fast path: a row of block numbers for each sequence."""
    VARLEN = "varlen"
    """An index for each token of each context."""


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    """One layer, random weights. It is never run: it gives the manager a config, a dtype and a device.

    The config names flash attention, the one for which no mask of the whole batch is built. The name is all that is
    needed, as nothing calls it.
    """
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.config._attn_implementation = "flash_attention_2"
    return model


class TransformersEngine:
    """Its batch processor with every prompt computed, ready to decode."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        prompts: Sequence[npt.NDArray[np.int64]],
        path: StepPath,
        *,
        page_size: int,
        steps: int,
        prefix_sharing: bool,
    ) -> None:
        torch.set_num_threads(1)
        self.running, self.path = len(prompts), path
        lengths = [len(prompt) + steps + 1 for prompt in prompts]
        blocks_each = -(-max(lengths) // page_size)
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_END, max_new_tokens=10**9),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_size,
                num_blocks=self.running * blocks_each,
                max_batch_tokens=sum(map(len, prompts)),  # one step takes every prompt in
                max_requests_per_batch=self.running,
                max_blocks_per_request=0,
                safety_margin=0.0,
                allow_block_sharing=prefix_sharing,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
        )
        # On a CPU the manager never takes the block table path, as the kernel that reads the table is CUDA's. Its host
        # code runs anywhere, so the width of the table is set once the manager has settled its config.
        if path is StepPath.BLOCK_TABLE:
            manager.continuous_batching_config.max_blocks_per_request = blocks_each
        self.processor: Any = manager._create_batch_processor()
        for prompt in prompts:
            manager.add_request(prompt.tolist())
        with torch.inference_mode():
            self.processor.prepare_next_batch()
            self.forward()
            self.processor.update_batch()

    def forward(self) -> None:
        """In place of the model: each row's token is there at once."""
        io = self.processor.inputs_and_outputs
        if io.num_request_in_batch != self.running:
            raise RuntimeError(f"{io.num_request_in_batch} rows in the step, not {self.running}")
        io.output_ids[0, : self.running] = TOKEN

    def step_us(self) -> float:
        """Microseconds of the host in one step: the next inputs, and what becomes of the results."""
        with torch.inference_mode():
            start = time.perf_counter_ns()
            self.processor.prepare_next_batch()
            prepared = time.perf_counter_ns()
            self.forward()
            io = self.processor.inputs_and_outputs
            if io.use_block_table != (self.path is StepPath.BLOCK_TABLE) or io.total_seqlen_q != self.running:
                raise RuntimeError(f"not a step of decodes on the {self.path.value} path")
            computed = time.perf_counter_ns()
            self.processor.update_batch()
            end = time.perf_counter_ns()
        return ((prepared - start) + (end - computed)) / 1000

    def check_generated(self, count: int) -> None:
        """RuntimeError unless each sequence has that many new tokens."""
        states = self.processor.scheduler.active_requests.values()
        if [state.generated_tokens for state in states] != [[TOKEN] * count] * self.running:
            raise RuntimeError("transformers did not take the tokens of each step in")


def quiet() -> None:
    """Leaves out its advice on settings that are meant."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
