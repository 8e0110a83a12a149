"""What the command line tells a person: error lines, the live progress line, the table at the end.

Everything here goes to stderr; stdout belongs to the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


class CliError(Exception):
    """Something the user can put right: one line on stderr and exit code 2, no traceback."""


def stderr_console() -> Console:
    """A console on the stderr of this moment (a redirected one, too)."""
    return Console(stderr=True)


def print_error(message: str) -> None:
    # Text and soft_wrap: a message quotes the user's input, which is no markup, and stays one line for grep.
    stderr_console().print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


def print_note(message: str) -> None:
    stderr_console().print(Text(message), soft_wrap=True)


def print_record(text: str) -> None:
    Console(highlight=False, markup=False, soft_wrap=True).print(text)


@dataclass
class Summary:
    """What a run has served so far. Times are in seconds of the same clock as `time.perf_counter`."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    times_to_first_token_s: list[float] = field(default_factory=list)
    peak_cache_use: float = 0.0
    wall_s: float = 0.0

    def table(self) -> Table:
        table = Table(show_header=False, box=None, padding=(0, 2))
        table.add_row("requests", f"{self.requests:,}" + (f" ({self.failed:,} failed)" if self.failed else ""))
        for name, tokens in (("prompt", self.prompt_tokens), ("generated", self.generated_tokens)):
            table.add_row(f"{name} tokens", f"{tokens:,} ({_per_second(tokens, self.wall_s)} tokens/s)")
        if self.cached_tokens:
            part = self.cached_tokens / max(1, self.prompt_tokens)
            table.add_row("shared prompt tokens", f"{self.cached_tokens:,} ({part:.0%})")
        if self.times_to_first_token_s:
            p50, p99 = (percentile(self.times_to_first_token_s, q) for q in (50, 99))
            table.add_row("time to first token", f"p50 {p50:.3f} s, p99 {p99:.3f} s")
        table.add_row("peak cache use", f"{self.peak_cache_use:.1%}")
        table.add_row("wall time", f"{self.wall_s:.2f} s")
        return table


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile: always a value that was measured."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)]


def _per_second(count: int, seconds: float) -> str:
    return f"{count / seconds:,.1f}" if seconds > 0 else "-"


class LiveProgress:
    """The line that moves while requests are served."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} requests"),
            BarColumn(),
            TextColumn("{task.fields[rate]} tokens/s, cache {task.fields[cache]:.0%}"),
            TimeElapsedColumn(),
            console=stderr_console(),
            disable=not enabled,
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, rate="-", cache=0.0)

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, *, done: int, generated_tokens: int, elapsed_s: float, cache_use: float) -> None:
        rate = _per_second(generated_tokens, elapsed_s)
        self._progress.update(self._task, completed=done, rate=rate, cache=cache_use)
