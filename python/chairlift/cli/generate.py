"""`chairlift generate`: many prompts through one model, a record written as each finishes.

This module owns the run: options, loading, serving, the end. It never reads a prompt line (prompts) and never
touches the output file itself (journal).
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple, Protocol

import typer

from chairlift.cli.journal import Existing, Journal, Record
from chairlift.cli.prompts import Prompts, Request, demo_prompts, prompts_from_options, read_prompts
from chairlift.cli.report import CliError, LiveProgress, Summary, print_error, print_note, stderr_console

# How often the progress line moves and an interrupt is looked for while no request finishes.
_TICK_S = 0.1


class Dtype(StrEnum):
    """Of the weights; `auto` is the one the model was saved in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line, with its names and defaults. None: chairlift chooses."""

    model: Path | None = None
    demo: bool = False
    prompts: str | None = None
    prompt: tuple[str, ...] = ()
    chat: bool = False
    output: Path | None = None
    existing: Existing = Existing.REFUSE
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    dtype: Dtype = Dtype.AUTO
    page_size: int | None = None
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_requests_per_batch: int | None = None
    quiet: bool = False

    def check(self) -> None:
        """Raises CliError for options that do not go together."""
        if (self.model is not None) == self.demo:
            raise CliError("give exactly one of --model DIR and --demo")
        if self.model is not None:
            _check_model_dir(self.model)
        if self.prompts is not None and self.prompt:
            raise CliError("give the prompts as a file or with --prompt, not both")
        if self.prompts is None and not self.prompt and not self.demo:
            raise CliError("there are no prompts: give a file, - for stdin, or --prompt TEXT")
        if self.existing is Existing.RESUME and self.output is None:
            raise CliError("--resume needs the --output FILE of the run to go on with")
        if self.prompts is not None and self.output is not None and _same_file(Path(self.prompts), self.output):
            raise CliError(f"--output {self.output} is the file of the prompts")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise CliError("--top-k and --top-p are for sampling: give a --temperature above 0 too")


def _same_file(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.samefile(other)


def _check_model_dir(folder: Path) -> None:
    if not folder.is_dir():
        raise CliError(f"the model folder {folder} does not exist" + (" (it is a file)" if folder.exists() else ""))
    if not (folder / "config.json").is_file():
        raise CliError(f"the model folder {folder} has no config.json")


class Tokenized(NamedTuple):
    """A request as the manager takes it."""

    id: str
    input_ids: list[int]
    max_new_tokens: int


class Manager(Protocol):
    """The part of `chairlift.ContinuousBatchingManager` that a run needs."""

    def start(self) -> None: ...
    def add_request(
        self, input_ids: list[int], request_id: str, *, max_new_tokens: int, record_timestamps: bool
    ) -> str: ...
    def get_result(self, *, timeout: float) -> Any: ...
    def stats(self) -> Any: ...
    def stop(self, *, hard_stop: bool) -> None: ...
    def destroy(self) -> None: ...


class ModelLoader(Protocol):
    """Brings the model and its tokenizer."""

    def __call__(self, options: Options) -> tuple[Any, Any]: ...


class ManagerFactory(Protocol):
    """Makes the manager for a model and the requests to come. Raises ValueError if it cannot serve them."""

    def __call__(self, model: Any, options: Options, requests: Sequence[Tokenized]) -> Manager: ...


def load_model(options: Options) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    if options.quiet or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    dtype = None if options.dtype is Dtype.AUTO else getattr(torch, options.dtype.value)
    source = options.model or "the demo model"
    try:
        if options.model is None:
            from chairlift.cli.demo import load_demo

            model, tokenizer = load_demo(dtype)
        else:
            # trust_remote_code is said, for left open it becomes a question on the terminal.
            local = {"local_files_only": True, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype or "auto", **local)
            tokenizer = AutoTokenizer.from_pretrained(options.model, **local)
    except CliError:
        raise
    except Exception as error:  # a broken file fails in as many ways as there are readers
        raise CliError(f"cannot load {source}: {_one_line(error)}") from error
    return model.eval(), tokenizer


def create_manager(model: Any, options: Options, requests: Sequence[Tokenized]) -> Manager:
    import chairlift

    chosen: dict[str, Any] = {
        "page_size": options.page_size,
        "num_blocks": options.num_blocks,
        "max_batch_tokens": options.max_batch_tokens,
        "max_requests_per_batch": options.max_requests_per_batch,
        "seed": options.seed,
    }
    manager: Manager = chairlift.init_continuous_batching(
        model,
        generation_config=generation_config(model, options),
        continuous_batching_config=chairlift.ContinuousBatchingConfig(
            **{name: value for name, value in chosen.items() if value is not None}
        ),
        workload_hints=chairlift.WorkloadHints(
            max_prompt_length=max(len(request.input_ids) for request in requests),
            max_generated_length=max(request.max_new_tokens for request in requests),
            num_requests=len(requests),
            num_tokens=sum(len(request.input_ids) + request.max_new_tokens for request in requests),
        ),
    )
    return manager


def generation_config(model: Any, options: Options) -> Any:
    """The model's own, with what the command line says on top. Greedy unless a temperature is given."""
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = options.max_new_tokens
    config.do_sample = options.temperature > 0
    if config.do_sample:
        config.temperature = options.temperature
        config.top_k = config.top_k if options.top_k is None else options.top_k
        config.top_p = config.top_p if options.top_p is None else options.top_p
    else:
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            setattr(config, name, None)
    return config


def run(options: Options, load: ModelLoader = load_model, create: ManagerFactory = create_manager) -> int:
    """Serves the prompts and returns the exit code: 0, 1 if any request failed, 128 + n after signal n."""
    options.check()
    prompts = _prompts(options)
    for bad in prompts.bad_lines:
        print_error(f"{prompts.source} line {bad.line}: {bad.reason}")
    exit_code = 1 if prompts.bad_lines else 0
    with Journal.open(options.output, options.existing) as journal:
        requests = [request for request in prompts.requests if request.id not in journal.done]
        if journal.done and not options.quiet:
            total = len(prompts.requests)
            print_note(f"{total - len(requests)} of {total} requests are served already")
        if not requests:
            journal.begin()
            return exit_code
        model, tokenizer = load(options)
        run_of = _Run(options, journal, tokenizer)
        try:
            journal.begin()
            code = run_of.serve(run_of.tokenize(requests), model, create)
        except BrokenPipeError:
            # Whoever read the records has left (`| head`). Python's flush at exit must not complain, either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    if not options.quiet:
        stderr_console().print(run_of.summary.table())
    return code or exit_code


def _prompts(options: Options) -> Prompts:
    if options.prompt:
        prompts = prompts_from_options(options.prompt)
    elif options.prompts is not None:
        prompts = read_prompts(options.prompts)
    else:
        prompts = demo_prompts()
    if not prompts.requests and not prompts.bad_lines:
        raise CliError(f"there are no prompts in {prompts.source}")
    return prompts


class _Run:
    """One run over one journal: `summary` tells what it has served."""

    def __init__(self, options: Options, journal: Journal, tokenizer: Any) -> None:
        self.summary = Summary()
        self._options = options
        self._journal = journal
        self._tokenizer = tokenizer

    def tokenize(self, requests: Sequence[Request]) -> list[Tokenized]:
        """Leaves out, and records as failed, what the chat template refuses."""
        chats = [request for request in requests if self._options.chat or not isinstance(request.prompt, str)]
        if chats and not getattr(self._tokenizer, "chat_template", None):
            raise CliError(f"the model's tokenizer has no chat template, which {chats[0].id!r} needs")
        tokenized = []
        for request in requests:
            try:
                input_ids = self._input_ids(request)
            except Exception as error:  # templates raise what they like: roles out of turn, no system prompt
                self._fail(request.id, _one_line(error))
            else:
                limit = request.max_new_tokens or self._options.max_new_tokens
                tokenized.append(Tokenized(request.id, input_ids, limit))
        return tokenized

    def _input_ids(self, request: Request) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, str):
            if not self._options.chat:
                return list(self._tokenizer(prompt)["input_ids"])
            prompt = [{"role": "user", "content": prompt}]
        encoded = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def serve(self, requests: Sequence[Tokenized], model: Any, create: ManagerFactory) -> int:
        if not requests:
            return 1
        try:
            manager = create(model, self._options, requests)
        except ValueError as error:
            raise CliError(f"the model cannot be served: {_one_line(error)}") from error
        started = time.perf_counter()
        finished = False
        with _interrupts() as interrupt:
            try:
                manager.start()
                self._drain(manager, self._submit(manager, requests, interrupt), interrupt, started)
                finished = interrupt.signum is None
            except (CliError, BrokenPipeError):
                raise
            except Exception as error:
                traceback.print_exception(error)
                print_error(f"the engine died: {_one_line(error)} (what has finished is written)")
                return 1
            finally:
                self.summary.wall_s = time.perf_counter() - started
                manager.stop(hard_stop=not finished)
                manager.destroy()
        if interrupt.signum is not None:
            print_error("interrupted; what has finished is written")
            return 128 + interrupt.signum
        return 1 if self.summary.failed else 0

    def _submit(self, manager: Manager, requests: Sequence[Tokenized], interrupt: _Interrupt) -> dict[str, int]:
        """Returns the prompt length of each request that was taken."""
        pending: dict[str, int] = {}
        for request in requests:
            if interrupt.signum is not None:
                break
            try:
                manager.add_request(
                    request.input_ids,
                    request.id,
                    max_new_tokens=request.max_new_tokens,
                    record_timestamps=True,
                )
            except ValueError as error:
                self._fail(request.id, _one_line(error))
            else:
                pending[request.id] = len(request.input_ids)
        return pending

    def _drain(self, manager: Manager, pending: dict[str, int], interrupt: _Interrupt, started: float) -> None:
        options = self._options
        # Records on the same terminal are progress enough, and the two would write over each other.
        enabled = not options.quiet and sys.stderr.isatty() and (options.output is not None or not sys.stdout.isatty())
        total, next_tick = len(pending), 0.0
        with LiveProgress(total, enabled=enabled) as progress:
            while pending and interrupt.signum is None:
                output = manager.get_result(timeout=_TICK_S)
                if output is not None:
                    self._finish(output, pending.pop(output.request_id))
                if (now := time.perf_counter()) >= next_tick:
                    next_tick = now + _TICK_S
                    stats = manager.stats()
                    progress.update(
                        done=total - len(pending),
                        generated_tokens=stats.generated_tokens,
                        elapsed_s=now - started,
                        cache_use=stats.owned_blocks / max(1, stats.capacity),
                    )
        stats = manager.stats()
        self.summary.peak_cache_use = stats.peak_owned_blocks / max(1, stats.capacity)

    def _finish(self, output: Any, prompt_tokens: int) -> None:
        if output.finish_reason not in ("stop", "length"):
            self._fail(output.request_id, output.error or f"it ended as {output.finish_reason!r}")
            return
        summary, tokens = self.summary, output.generated_tokens
        summary.requests += 1
        summary.prompt_tokens += prompt_tokens
        summary.cached_tokens += output.cached_tokens
        summary.generated_tokens += len(tokens)
        if output.timestamps:
            summary.times_to_first_token_s.append(output.timestamps[0] - output.created_time)
        record: Record = {
            "id": output.request_id,
            "text": self._tokenizer.decode(tokens, skip_special_tokens=True),
            "finish_reason": output.finish_reason,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": output.cached_tokens,
            "generated_tokens": len(tokens),
        }
        self._journal.write(record)

    def _fail(self, request_id: str, reason: str) -> None:
        self.summary.requests += 1
        self.summary.failed += 1
        print_error(f"{request_id}: {reason}")
        self._journal.write({"id": request_id, "error": reason})


@dataclass
class _Interrupt:
    """The signal that asked for the end, if one has."""

    signum: int | None = None


@contextmanager
def _interrupts() -> Iterator[_Interrupt]:
    """Turns the first SIGINT or SIGTERM into a wish, so that no record is cut; a second one acts as ever."""
    interrupt = _Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def remember(signum: int, _: FrameType | None) -> None:
        interrupt.signum = signum
        restore()

    for signum in before:
        signal.signal(signum, remember)
    try:
        yield interrupt
    finally:
        restore()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_ENGINE = "Engine"
_SAMPLING = "Sampling"


def command(
    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPTS",
            show_default=False,
            help="A JSONL file (an object a line: 'prompt' or 'messages', if need be 'id', "
            "'max_new_tokens'), a text file (one prompt a line), or - for stdin.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; may be given many times.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of a transformers model.", show_default=False),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="SmolLM2-135M-Instruct, fetched once and kept.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap plain prompts as one user message of a chat.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Records as JSON lines, in finishing order. Default: stdout.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with --output: serve what it lacks, try its failures again."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin --output anew.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Per request that does not say it itself.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Above 0: sample.", rich_help_panel=_SAMPLING)] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Default: the model's.", rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Default: the model's.", rich_help_panel=_SAMPLING)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="The same seed gives the same tokens.", rich_help_panel=_SAMPLING),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the weights; auto: as they were saved.", rich_help_panel=_ENGINE)
    ] = Dtype.AUTO,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens per page.", rich_help_panel=_ENGINE)] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the KV cache.", rich_help_panel=_ENGINE)
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per step at most.", rich_help_panel=_ENGINE)
    ] = None,
    max_requests_per_batch: Annotated[
        int | None, typer.Option(min=1, help="Requests per step at most.", rich_help_panel=_ENGINE)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only: no progress, no table.")] = False,
) -> None:
    """Serve many prompts with one model; a record is written as each request finishes.

    Exit code: 0 all served; 1 some failed, each named on stderr; 2 nothing could be done; 130 interrupted.
    """
    if resume and overwrite:
        raise CliError("give one of --resume and --overwrite, not both")
    existing = Existing.RESUME if resume else Existing.OVERWRITE if overwrite else Existing.REFUSE
    options = Options(
        model=model,
        demo=demo,
        prompts=prompts,
        prompt=tuple(prompt or ()),
        chat=chat,
        output=output,
        existing=existing,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=dtype,
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests_per_batch,
        quiet=quiet,
    )
    raise typer.Exit(run(options))
