"""The boundary between the Python layer and the engine in Rust.

Python hands in arrays and gets ids and events back; it never sees a sequence. Every method that may wait releases the
GIL. Times are seconds of `time.perf_counter`, which only grows.
"""

from typing import Any, Final, final

__all__ = [
    "NUM_TRASH_BLOCKS",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "Event",
    "JoinedLinears",
    "Live",
    "PackedLinear",
    "PagedAttention",
    "QueueFull",
    "RowProgram",
    "Sampling",
    "Step",
    "__version__",
    "default_match_unit",
    "digests",
    "instruction_sets",
    "largest",
    "split_into_groups",
]

__version__: Final[str]

NUM_TRASH_BLOCKS: Final[int]
"""Blocks that padding uses and nobody owns; they follow the pool's blocks: the first is read, the second written."""

class EngineClosed(RuntimeError):
    """The engine takes no requests or has no more events. The message tells the cause."""

class QueueFull(RuntimeError):
    """The waiting queue is at its bound (`max_queue_size`), or outputs that nobody took are at theirs (`output_space`).
    The request was not taken; try again later."""

def default_match_unit(page_size: int) -> int:
    """Tokens of an entry of the prefix cache unless set: the largest divisor of the page that is at most 32."""

def split_into_groups(kinds: list[tuple[int, int]]) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Splits kinds into groups whose blocks have the same bytes.

    Args:
        kinds: Per kind its number of calls, and the bytes of a page of one call.

    Returns:
        Bytes of a block, bytes of a whole-model block that hold no page, and per group its kind and its first and end
        call, counted among the calls of the kind.

    Raises:
        ValueError: No kind, or one without calls or bytes.
    """

def digests(buffers: list[Any], num_threads: int) -> list[bytes]:
    """XXH3 of each of some buffers of bytes: 16 bytes, the same on every machine.

    Not a cryptographic hash: it tells what changed by itself or by mistake, not what was forged.

    Args:
        buffers: Contiguous buffers of unsigned bytes, of any shape. They are read where they lie, with the GIL
            released: nobody may write them meanwhile. Each is one thread's work.
        num_threads: Threads to read with, the caller's among them; fewer where there are fewer buffers.

    Raises:
        ValueError: A buffer with gaps.
        BufferError: A buffer of another element type.
    """

def instruction_sets() -> list[str]:
    """The instruction sets that the CPU kernels are compiled for and this machine has, the best first: of `amx_bf16`,
    `avx512_bf16`, `avx512`, `avx2`, `neon` and `plain`. Where dot products of bf16 pairs are slower than products in
    fp32, as on some processors of Intel, `avx512` comes before `avx512_bf16`; that is measured, once a process."""

def largest(of: Any, out: Any, num_threads: int, isa: str | None = None) -> None:
    """The column of each row's largest element, on the CPU: the first of equals, and the first NaN before all numbers,
    as of `torch.Tensor.max`. Releases the GIL.

    Tensors come as DLPack capsules, as for `PagedAttention`.

    Args:
        of: [..., columns] float32, bfloat16 or float16, its last dimension contiguous, its rows at equal distances.
        out: [rows] int64, contiguous; written; overlaps nothing.
        num_threads: Threads to compute with, the caller's among them.
        isa: One of `instruction_sets()`; None: the best.

    Raises:
        ValueError: What does not fit together, or instructions that are not to be had.
        TypeError: What is no such tensor.
    """

@final
class PackedLinear:
    """The packed copy of a linear layer's weight, on the CPU. Sums are kept in fp32 and rounded once; a row's result
    does not depend on the other rows.

    Tensors come as DLPack capsules, as for `PagedAttention`.

    Attributes:
        isa: The instruction set in use.
        nbytes: Bytes of the copy.
    """

    def __new__(cls, weight: Any, num_threads: int, isa: str | None = None, team: str | None = None) -> PackedLinear:
        """
        Args:
            weight: [out, in] float32, bfloat16 or float16, its last dimension contiguous. Read, not kept.
            num_threads: Threads to compute with, the caller's among them.
            isa: One of `instruction_sets()`; None: the best.
            team: As of `PagedAttention`.

        Raises:
            ValueError: A weight without elements, or instructions or threads that are not to be had.
            TypeError: What is no such tensor.
        """
    @property
    def isa(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def multiply(self, input: Any, out: Any, bias: Any | None = None) -> None:
        """The layer. Releases the GIL.

        Args:
            input: [..., in] of the weight's dtype, its last dimension contiguous, its rows at equal distances.
            out: [..., out] the same, of as many rows; written; overlaps nothing.
            bias: [out]

        Raises:
            ValueError: What does not fit together.
            TypeError: What is no such tensor, or of another dtype.
        """

@final
class JoinedLinears:
    """Linear layers of one input, and a program that computes one output of their results, on the CPU: in one call,
    with the layers' results kept near."""

    def __new__(cls, layers: list[PackedLinear], program: RowProgram) -> JoinedLinears:
        """
        Args:
            layers: One to four, of the same shape, dtype and instruction set.
            program: With an input for each layer, and one output; it computes each column of the output from that
                column of its inputs, and numbers. Instructions and threads are those of the layers.

        Raises:
            ValueError: What does not fit together.
        """
    def multiply(self, input: Any, out: Any, biases: list[Any | None]) -> None:
        """The layers and the program. Releases the GIL.

        Args:
            input: As of `PackedLinear.multiply`.
            out: As there.
            biases: As there, of each layer.

        Raises:
            ValueError: What does not fit together.
            TypeError: What is no such tensor, or of another dtype.
        """

@final
class RowProgram:
    """Runs of element-wise operators on the CPU, computed row by row in one pass.

    A row is a token's part of each tensor: groups of elements. Values stand in registers, first those of the inputs,
    then the result of each instruction; each is rounded to its dtype.

    Tensors come as DLPack capsules, as for `PagedAttention`.
    """

    def __new__(
        cls,
        inputs: list[tuple[int, int, int | None]],
        instructions: list[tuple[str, list[tuple[int, int, int] | float], int, int, str, int]],
        outputs: list[tuple[int, int, int, int]],
        num_threads: int,
        isa: str | None = None,
        team: str | None = None,
    ) -> RowProgram:
        """
        Args:
            inputs: (groups, length, dimension of the rows) of each; None: it is the same for all rows.
            instructions: (operation, operands, groups, length, dtype, start). An operand is a number or (register,
                groups, length): one group, or one element of each, stands for all. Operations: `add`, `sub`, `mul`,
                `div`; `copy`, `neg`, `square`, `sqrt`, `rsqrt`, `exp`, `tanh`, `sigmoid`, `silu`, `relu`, `gelu_tanh`;
                `mean` of each group; `slice` of each group from `start` on; `cat` of the groups of all operands.
                dtype: `float32`, `bfloat16` or `float16`.
            outputs: (register, groups, length, dimension of the rows) of each.
            num_threads: Threads to compute with, the caller's among them.
            isa: One of `instruction_sets()`; None: the best.
            team: As of `PagedAttention`.

        Raises:
            ValueError: What does not fit together, or instructions or threads that are not to be had.
        """
    def run(self, inputs: list[Any], outputs: list[Any]) -> None:
        """Computes all rows. Releases the GIL.

        Args:
            inputs: float32, bfloat16 or float16, in any strides but for the last dimension, which is contiguous. All
                have as many rows. Dimensions beside rows, groups and elements have size 1.
            outputs: The same; written; they overlap nothing.

        Raises:
            ValueError: What does not fit together.
            TypeError: What is no such tensor.
        """

@final
class PagedAttention:
    """Attention over the pages of a step, on the CPU.

    K and V are read where they lie, through the block tables, and written there. Decodes whose tables begin with the
    same blocks read those once. Everything is computed in fp32, whatever the tensors are of.

    Tensors come as DLPack capsules (`torch.utils.dlpack.to_dlpack`) and are used where they are, in any strides but
    for the last dimension, whose stride is 1. Nobody may write them during a call, nor touch the written ones.

    Attributes:
        isa: The instruction set in use.
        team: The threads in use: `OpenMP` (those of torch), `rayon` or `serial`.
    """

    def __new__(
        cls,
        page_size: int,
        groups: list[tuple[str, int]],
        num_threads: int,
        isa: str | None = None,
        team: str | None = None,
    ) -> PagedAttention:
        """
        Args:
            page_size: Tokens of a page.
            groups: How far back the calls of each group look: (`full`, 0), (`window`, tokens) or (`chunk`, tokens).
            num_threads: Threads to compute with, the caller's among them.
            isa: One of `instruction_sets()`; None: the best.
            team: `OpenMP`, `rayon` or `serial`; None: OpenMP where torch has brought it, else rayon.

        Raises:
            ValueError: A size of 0, an unknown reach, or instructions or threads that are not to be had.
        """
    @property
    def isa(self) -> str: ...
    @property
    def team(self) -> str: ...
    def begin(
        self, cu_seqlens: Any, kv_lens: Any, decodes: int, block_tables: list[Any], write_slots: list[Any]
    ) -> None:
        """Takes a step in. Its tensors are int32 and contiguous, and copied.

        Args:
            cu_seqlens: [rows + 1] first token of each row, and the number of tokens after the last.
            kv_lens: [rows] tokens of each sequence after the step.
            decodes: Leading rows with one token.
            block_tables: Per group, [rows, pages].
            write_slots: Per group, [tokens] where each token's K and V go: block * page size + token of the page;
                each token somewhere else. Tokens beyond the last row's are padding.

        Raises:
            ValueError: What does not fit together.
            TypeError: What is no such tensor.
        """
    def attend(
        self,
        group: int,
        k_pages: Any,
        v_pages: Any,
        query: Any,
        out: Any,
        *,
        scale: float,
        key: Any | None = None,
        value: Any | None = None,
        softcap: float | None = None,
        sinks: Any | None = None,
    ) -> None:
        """One call over the step's tokens. Releases the GIL.

        Args:
            group: The call's group.
            k_pages: [blocks, page size, kv heads, head size]; float32, bfloat16 or float16, as all but `sinks`.
            v_pages: [blocks, page size, kv heads, head size of V]
            query: [heads, tokens, head size]
            out: [heads, tokens, head size of V], written; overlaps nothing. Zeros for padding.
            scale: Factor of the scores.
            key: [kv heads, tokens, head size] K of the step's tokens; None where the pages are another call's.
            value: [kv heads, tokens, head size of V]
            softcap: Scores are squeezed into (-softcap, softcap) by tanh.
            sinks: [heads] float32 logits that take part in the softmax and contribute no value.

        Raises:
            ValueError: What does not fit together, or a block that the pages do not have. Nothing was read or written.
            TypeError: What is no such tensor.
        """

@final
class EngineConfig:
    """Sizes and bounds of an engine; see `ContinuousBatchingConfig` for what they mean to a user.

    `match_unit` None is the largest divisor of the page that is at most 32, 0 is no prefix cache. `hash_bits` is for
    tests of what happens when keys collide. `tenant_weights` None: no fairness between tenants; those that are not
    named weigh 1. `first_regime`: the longest sequence that the model computes with the short factors of its RoPE.

    `groups` tells how far back the calls of each group look: `("full", 0)`, `("window", tokens)` or
    `("chunk", tokens)`.

    Raises:
        ValueError: A value out of its bounds, by name.
    """

    def __new__(
        cls,
        *,
        page_size: int,
        num_blocks: int,
        groups: list[tuple[str, int]],
        max_requests_per_batch: int,
        max_batch_tokens: int,
        vocab_size: int,
        max_cache_reads: int | None = None,
        safety_margin: float = 0.15,
        scheduler_type: str = "fifo",
        max_positions: int | None = None,
        max_queue_size: int = 0,
        max_output_bytes: int | None = None,
        seed: int = 0,
        match_unit: int | None = None,
        cache_eviction: str = "lru",
        swap_blocks: int = 0,
        tenant_weights: list[tuple[str, float]] | None = None,
        first_regime: int | None = None,
        hash_bits: int = 128,
    ) -> EngineConfig: ...
    @property
    def match_unit(self) -> int:
        """Tokens of an entry of the prefix cache; 0: there is none."""

@final
class Sampling:
    """How a request's tokens are chosen."""

    @staticmethod
    def greedy() -> Sampling:
        """The largest logit."""
    @staticmethod
    def draw(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
        """A draw after temperature, top-k (0: all) and top-p (1: all), in that order.

        Raises:
            ValueError: `temperature` not above 0, or `top_p` not between 0 (the most probable token only) and 1.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Step:
    """A planned step."""

    @property
    def slot(self) -> int:
        """The slot whose arena describes it: 0 or 1."""
    @property
    def second_regime(self) -> bool:
        """Whether its rows are longer than `first_regime`, or will be when their prompt is computed."""
    @property
    def rows(self) -> int:
        """Rows in the step."""
    @property
    def decodes(self) -> int:
        """Leading rows that bring one token."""
    @property
    def tokens(self) -> int:
        """Tokens in the step."""
    @property
    def sampled(self) -> int:
        """Rows that a token is sampled for."""
    @property
    def layout(self) -> dict[str, slice]:
        """The sections of the arena, in order: `rows`, `cu_seqlens`, `kv_lens`, `tokens`, `positions`, `write_slots`,
        `logits_rows`, `draws`, `table_changes`, `row_changes`, `carry_overs`, `copies`, `swap_outs`, `swap_ins`."""

@final
class Event:
    """News of one request: one more token (`finish_reason` is None), or its end with all that it produced."""

    @property
    def request(self) -> int:
        """The id that `submit` gave."""
    @property
    def finish_reason(self) -> str | None:
        """None for a token; `stop`, `length`, `cancelled` or `error` for the end."""
    @property
    def error(self) -> str | None:
        """What went wrong, when `finish_reason` is `error`."""
    @property
    def prompt(self) -> list[int]:
        """At the end: the prompt, unless the request was refused."""
    @property
    def tokens(self) -> list[int]:
        """The one new token, or at the end all generated ones."""
    @property
    def logprobs(self) -> list[float]:
        """The logarithm of each token's probability, where asked for."""
    @property
    def timestamps(self) -> list[float]:
        """When each token was committed, where asked for."""
    @property
    def epochs(self) -> list[tuple[int, int]]:
        """The versions of the weights that chose the tokens, each with the place of the first of them."""
    @property
    def cached_tokens(self) -> int:
        """At the end: tokens of the prompt that were found in the prefix cache."""
    @property
    def started(self) -> float | None:
        """At the end: when it was first planned."""
    @property
    def ended(self) -> float | None:
        """At the end: when."""

@final
class Live:
    """A sequence as it stands between two calls of the engine."""

    @property
    def request(self) -> int:
        """The id that `submit` gave."""
    @property
    def parent(self) -> int:
        """The id of the first sequence of its request."""
    @property
    def phase(self) -> str:
        """`pending`, `prefilling` or `decoding`."""
    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
    @property
    def generated(self) -> int:
        """Tokens generated in committed steps."""
    @property
    def computed(self) -> int:
        """Leading tokens whose K and V are there, in blocks or on the host."""
    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
    @property
    def on_host(self) -> bool:
        """Whether its K and V wait on the host."""
    @property
    def priority(self) -> int: ...
    @property
    def started(self) -> float | None:
        """When it was first planned."""

@final
class Engine:
    """Scheduler, block manager and step planner.

    `advance`, `abandon`, `fail_all`, `cancel_all`, `recompute_all`, `let_in`, `admitted`, `new_epoch`, `live`,
    `live_one`, `tokens_of` and `refuse` wait for one another; the other methods never wait for a step.
    """

    def __new__(cls, config: EngineConfig) -> Engine: ...
    @property
    def token_capacity(self) -> int:
        """Tokens of one sequence that an empty pool bears."""
    @property
    def arena_capacity(self) -> int:
        """Elements that the arena of a slot needs."""
    @property
    def advance_ns(self) -> int:
        """Nanoseconds that the last `advance` took itself; waiting for the GIL afterwards is not among them."""
    @property
    def is_idle(self) -> bool:
        """Whether nothing is active, nothing waits and no message is unread."""
    @property
    def undelivered(self) -> int:
        """Events that no reader took yet."""
    def bind_slot(self, slot_index: int, arena: Any, tokens: Any, logprobs: Any) -> None:
        """Gives a slot its buffers: one-dimensional, contiguous, writable; int32, int32 and float32.

        They are held as long as the engine is. The arena has at least `arena_capacity` elements, the two others one
        for each sampled row of a step.

        Raises:
            ValueError: The slot is not 0 or 1, a buffer is of another shape, or buffers overlap.
            RuntimeError: A step is in flight.
            BufferError: A buffer of another element type.
        """
    def advance(self, done: int | None, next: int | None, now: float) -> Step | None:
        """Commits the step of slot `done`, whose results stand in its token and logprob buffers, and plans the next
        step into the arena of slot `next`. None when there is nothing to run.

        Raises:
            RuntimeError: A slot without buffers or without a step to commit, or a buffer too short.
        """
    def abandon(self, slot_index: int, now: float, cause: str | None = None, *, out_of_memory: bool = False) -> None:
        """Undoes the step in a slot, and the one planned on top of it: their rows are planned again.

        With a cause the step raised: its rows are tried in halves, and the one that raises alone ends failed with it.
        If it was `out_of_memory`, steps have at most half its tokens for a while instead, and a row fails that needs
        too much with one token.

        Raises:
            ValueError: `out_of_memory` without a cause.
            RuntimeError: A slot without a step.
        """
    def fail_all(self, cause: str, now: float) -> None:
        """Ends every request with that cause."""
    def cancel_all(self, now: float) -> None:
        """Ends every request as cancelled."""
    def let_in(self, fresh: bool) -> None:
        """Whether sequences that were never admitted are let in from here on. The others go on."""
    @property
    def admitted(self) -> int:
        """Sequences that were admitted and have not ended."""
    def recompute_all(self) -> None:
        """Gives up all K and V, cached ones too: sequences wait again, to be computed anew.

        Raises:
            RuntimeError: A step is in flight.
        """
    def new_epoch(self) -> None:
        """Forgets everything that is cached. What is being computed goes on, and nothing of it is shared any more."""
    def check_integrity(self) -> None:
        """Proves the books.

        Raises:
            RuntimeError: The first contradiction found.
        """
    def check(self, prompt: Any, max_new_tokens: int) -> None:
        """Whether `submit` would take a request, but for the queue's bound. Same errors."""
    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int,
        n: int = 1,
        eos: list[int] = ...,
        sampling: Sampling | None = None,
        priority: int = 0,
        seed: int | None = None,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str = "",
        streaming: bool = False,
        record_timestamps: bool = False,
        record_logprobs: bool = False,
    ) -> int:
        """Hands a request over; `prompt` is an int64 buffer. Returns its id, in order of submission: with `n`
        sequences, the id of the first; those of the others follow, and to cancel the first cancels all.

        Raises:
            ValueError: What is wrong with the request, with the value and the bound.
            QueueFull: The waiting queue is at its bound, or more than `max_output_bytes` of outputs wait to be taken.
            EngineClosed: The engine takes no requests; the message tells why.
        """
    def submit_many(
        self,
        tokens: Any,
        lengths: Any,
        max_new_tokens: Any,
        *,
        n: int = 1,
        eos: list[int] = ...,
        sampling: Sampling | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        streaming: bool = False,
        record_timestamps: bool = False,
        record_logprobs: bool = False,
        sorts: bool = False,
    ) -> int:
        """Hands several requests over, or none: int64 buffers of all prompts one after the other, of their lengths, and
        of a bound for each. Returns the id of the first sequence of the first; those of the others follow, in the
        order given. With `sorts` they join the queue in the order of their tokens, so that those that begin alike are
        neighbours.

        Raises:
            ValueError: As `submit`, naming the prompt by its place.
            QueueFull: The waiting queue is at its bound, or more than `max_output_bytes` of outputs wait to be taken.
            EngineClosed: The engine takes no requests; the message tells why.
        """
    def refuse(self, cause: str, now: float) -> int:
        """Gives a request that cannot be taken an id and its terminal event, failed with that cause."""
    def cancel(self, request: int) -> None:
        """Asks for the end of a request. One that ended already is left alone."""
    def close_inbox(self, cause: str) -> None:
        """Takes no more requests; the first cause stays."""
    def close_outbox(self, cause: str) -> None:
        """Says that no event will come any more; readers still get those that are there."""
    def reopen(self) -> None:
        """Undoes both."""
    def wait_for_work(self, timeout_s: float) -> bool:
        """Waits for a message in the inbox or a `wake`; tells whether there was one."""
    def wake(self) -> None:
        """Ends a `wait_for_work`, now or the next one."""
    def claim(self, request: int) -> None:
        """Reserves the events of a request for `take_for`, until `unclaim` or its terminal event is taken."""
    def unclaim(self, request: int) -> None:
        """Ends one `claim`."""
    def wait_for(self, request: int, timeout_s: float | None = None) -> bool:
        """Waits for an event of a claimed request. True: there is one, or another reader took the last; False: none
        came in time.

        Raises:
            EngineClosed: None is there and none will come.
        """
    def wait_next(self, timeout_s: float | None = None) -> bool:
        """Waits for an event that nobody claims; as `wait_for`."""
    def take_for(self, request: int) -> Event | None:
        """Takes the oldest event of that request, if there is one."""
    def take_next(self) -> Event | None:
        """Takes the oldest event that nobody claims, if there is one."""
    def live(self) -> list[Live]:
        """All sequences that were read from the inbox and have not ended: those with a row in the order of their
        admission, then those that wait, victims first."""
    def live_one(self, request: int) -> Live | None:
        """One of them."""
    def tokens_of(self, request: int) -> list[int] | None:
        """Its prompt and what it generated."""
    def listen(self, request: int, listener: int) -> None:
        """Gives the events of a request, those that are there too, to a listener alone, until `unlisten` or its
        terminal event. Listeners are numbered by the caller; a later one takes the place of the first."""
    def unlisten(self, request: int) -> None:
        """Ends `listen`: events that were not taken are for the others again."""
    def take_heard(self, listener: int) -> Event | None:
        """Takes the oldest event for a listener. After None it is told again of what comes."""
    def wait_heard(self, timeout_s: float) -> list[int]:
        """Waits until there is something for a listener that it was not told of, and names those listeners; none, when
        time is up.

        Raises:
            EngineClosed: None is there and none will come.
        """
    @property
    def queued(self) -> int:
        """Requests submitted and not yet admitted for the first time."""
    def blocks_by_group(self) -> list[tuple[int, int, int]]:
        """Owned, cached and retiring blocks of each group, read without stopping the engine."""
    def stats(self) -> dict[str, int]:
        """Counters and gauges, read without stopping the engine."""
