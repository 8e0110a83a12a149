"""Reading prompts: JSON lines or plain text into requests, every bad line by its number and a reason.

Nothing here knows a tokenizer or a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chairlift.cli.report import CliError

Form = Literal["jsonl", "text", "sniff"]
Message = dict[str, str]

_REQUEST_KEYS = ("prompt", "messages", "id", "max_new_tokens")
_MESSAGE_KEYS = ("role", "content")

DEMO_QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about a chairlift.",
    "Explain in two sentences why the sky is blue.",
    "Name three uses of a paper clip.",
)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to serve: `prompt` is a text as it stands, or the messages of a chat."""

    id: str
    prompt: str | list[Message]
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that could not be read: its 1-based number and why."""

    line: int
    reason: str


@dataclass(slots=True)
class Prompts:
    """All that was read, in the order of the input."""

    source: str
    requests: list[Request] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)


class _MalformedError(ValueError):
    """Why a line is no request."""


def read_prompts(source: str) -> Prompts:
    """Reads a file, or stdin for `-`. `.jsonl`, `.ndjson` and `.txt` tell the form, else line 1 does."""
    if source == "-":
        return parse_lines(sys.stdin.buffer.read(), "sniff", "stdin")
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CliError(f"cannot read the prompts in {source}: {error.strerror}") from error
    forms: dict[str, Form] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}
    return parse_lines(data, forms.get(path.suffix.lower(), "sniff"), source)


def demo_prompts() -> Prompts:
    questions = enumerate(DEMO_QUESTIONS, start=1)
    requests = [Request(f"demo-{n}", [{"role": "user", "content": question}]) for n, question in questions]
    return Prompts("the demo prompts", requests)


def prompts_from_options(texts: Iterable[str]) -> Prompts:
    prompts = Prompts("--prompt")
    for number, text in enumerate(texts, start=1):
        if text:
            prompts.requests.append(Request(f"prompt-{number}", text))
        else:
            prompts.bad_lines.append(BadLine(number, "the prompt is empty"))
    return prompts


def parse_lines(data: bytes, form: Form, source: str) -> Prompts:
    """Splits at line feeds only: U+2028 and its like may stand inside a JSON string."""
    prompts = Prompts(source)
    line_of_id: dict[str, int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        raw = raw.removesuffix(b"\r")
        if not raw.strip():
            continue
        if form == "sniff":
            form = "jsonl" if raw.lstrip().startswith(b"{") else "text"
        try:
            line = _decode(raw)
            request = parse_request(line, number) if form == "jsonl" else Request(f"line-{number}", line)
            if request.id in line_of_id:
                raise _MalformedError(f"id {request.id!r} was given on line {line_of_id[request.id]} already")
        except _MalformedError as malformed:
            prompts.bad_lines.append(BadLine(number, str(malformed)))
        else:
            line_of_id[request.id] = number
            prompts.requests.append(request)
    return prompts


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _MalformedError(f"not UTF-8 (byte {error.start + 1} of the line)") from error


def parse_request(line: str, number: int) -> Request:
    """One JSON line. `number` names a request that has no id of its own."""
    try:
        record = json.loads(line, object_pairs_hook=_object_without_repeats)
    except _MalformedError:
        raise
    except json.JSONDecodeError as error:
        raise _MalformedError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise _MalformedError(f"not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise _MalformedError(f"a line must be a JSON object, not {_kind(record)}")
    _refuse_unknown_keys(record, _REQUEST_KEYS, "")
    if ("prompt" in record) == ("messages" in record):
        both = "both" if "prompt" in record else "neither"
        raise _MalformedError(f"give either 'prompt' or 'messages' (this line has {both})")
    return Request(
        id=_request_id(record["id"]) if "id" in record else f"line-{number}",
        prompt=_prompt(record["prompt"]) if "prompt" in record else _messages(record["messages"]),
        max_new_tokens=_max_new_tokens(record["max_new_tokens"]) if "max_new_tokens" in record else None,
    )


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _MalformedError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return record


def _refuse_unknown_keys(record: dict[str, Any], known: tuple[str, ...], place: str) -> None:
    if unknown := [repr(key) for key in record if key not in known]:
        raise _MalformedError(f"{place}unknown key {', '.join(unknown)} (known: {', '.join(known)})")


def _request_id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _MalformedError(f"'id' must be a string or an integer, not {_kind(value)}")
    return _text(str(value), "'id'")


def _prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise _MalformedError(f"'prompt' must be a string, not {_kind(value)}")
    return _text(value, "the prompt")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise _MalformedError(f"'messages' must be an array, not {_kind(value)}")
    if not value:
        raise _MalformedError("the prompt is empty: 'messages' has no message")
    return [_message(message, number) for number, message in enumerate(value, start=1)]


def _message(value: Any, number: int) -> Message:
    place = f"message {number}: "
    if not isinstance(value, dict):
        raise _MalformedError(f"{place}must be a JSON object, not {_kind(value)}")
    _refuse_unknown_keys(value, _MESSAGE_KEYS, place)
    for key in _MESSAGE_KEYS:
        if not isinstance(value.get(key), str):
            met = f", not {_kind(value[key])}" if key in value else ": it is missing"
            raise _MalformedError(f"{place}'{key}' must be a string{met}")
        # An empty content is a chat's own business (a blank system prompt); an empty role is a slip.
        _text(value[key], f"{place}'{key}'", may_be_empty=key == "content")
    return value


def _max_new_tokens(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _MalformedError(f"'max_new_tokens' must be an integer, not {_kind(value)}")
    if value < 1:
        raise _MalformedError(f"'max_new_tokens' must be at least 1, not {value}")
    return value


def _text(value: str, name: str, *, may_be_empty: bool = False) -> str:
    if not value and not may_be_empty:
        raise _MalformedError(f"{name} is empty")
    # JSON can spell half of a surrogate pair; no tokenizer and no UTF-8 file can hold one.
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _MalformedError(f"{name} holds half of a surrogate pair")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a fraction", str: "a string", list: "an array"}
    return names.get(type(value), "an object")
