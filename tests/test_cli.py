"""The command line: what it reads, what it writes, what it says, and how it survives being killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import chairlift.cli
from chairlift.cli import demo, environment, generate
from chairlift.cli.generate import Dtype, Options, Tokenized, run
from chairlift.cli.journal import Existing, Journal
from chairlift.cli.prompts import Prompts, Request, parse_lines, read_prompts
from chairlift.cli.report import CliError, percentile

LONGEST_PROMPT = 60


class FakeTokenizer:
    """A character is a token."""

    chat_template: str | None = "a template"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        assert options == {"add_generation_prompt": True, "return_dict": True}
        if messages[0]["role"] == "assistant":
            raise RuntimeError("roles must\nalternate")
        return self("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, tokens))


@dataclass
class FakeOutput:
    request_id: str
    generated_tokens: list[int]
    finish_reason: str = "length"
    error: str | None = None
    created_time: float = 1.0
    cached_tokens: int = 3
    timestamps: list[float] = field(default_factory=lambda: [1.5, 2.0])


@dataclass
class FakeStats:
    owned_blocks: int = 4
    capacity: int = 10
    peak_owned_blocks: int = 5
    generated_tokens: int = 40


@dataclass
class FakeManager:
    """Answers a prompt with its last characters reversed, the newest request first."""

    before_result: Callable[[int], None] = lambda _: None
    failing: frozenset[str] = frozenset()
    served: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    waiting: list[FakeOutput] = field(default_factory=list)

    def __call__(self, model: Any, options: Options, requests: Sequence[Tokenized]) -> FakeManager:
        return self

    def start(self) -> None:
        self.calls.append("start")

    def add_request(
        self, input_ids: list[int], request_id: str, *, max_new_tokens: int, record_timestamps: bool
    ) -> str:
        if len(input_ids) > LONGEST_PROMPT:
            raise ValueError(f"prompt of {len(input_ids)} tokens cannot fit")
        output = FakeOutput(request_id, input_ids[::-1][:max_new_tokens])
        if request_id in self.failing:
            output.finish_reason, output.error = "error", "it burst"
        self.waiting.append(output)
        return request_id

    def get_result(self, *, timeout: float) -> FakeOutput | None:
        self.before_result(len(self.served))
        if not self.waiting:
            return None
        output = self.waiting.pop()
        self.served.append(output.request_id)
        return output

    def stats(self) -> FakeStats:
        return FakeStats()

    def stop(self, *, hard_stop: bool) -> None:
        self.calls.append("hard stop" if hard_stop else "stop")

    def destroy(self) -> None:
        self.calls.append("destroy")


def load_fake(options: Options) -> tuple[Any, Any]:
    return object(), FakeTokenizer()


def records(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines()
    found = {record["id"]: record for record in map(json.loads, lines)}
    assert len(found) == len(lines), "an id was written twice"
    return found


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": n, "prompt": f"prompt number {n}"}) + "\n" for n in range(12)))
    return path


@pytest.fixture
def options(tmp_path: Path, prompts_file: Path) -> Callable[..., Options]:
    def make(**changes: Any) -> Options:
        defaults = {"demo": True, "prompts": str(prompts_file), "output": tmp_path / "out.jsonl"}
        return Options(**(defaults | changes))

    return make


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_line(*arguments), capture_output=True, text=True, check=False, **options)


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from chairlift.cli import main; main()", *arguments]


def main_in_process(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["chairlift", *arguments])
    with pytest.raises(SystemExit) as ended:
        chairlift.cli.main()
    return int(ended.value.code or 0)


class TestReadingPrompts:
    def parse(self, text: str | bytes, form: Any = "jsonl") -> Prompts:
        return parse_lines(text.encode() if isinstance(text, str) else text, form, "here")

    def test_a_json_line_is_a_prompt_or_a_chat(self) -> None:
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
        lines = [{"prompt": "hi", "id": "a"}, {"messages": messages, "id": 7, "max_new_tokens": 3}]
        read = self.parse("\n".join(map(json.dumps, lines)))
        assert read.requests == [Request("a", "hi"), Request("7", messages, 3)]
        assert read.bad_lines == []

    def test_a_line_without_an_id_is_named_after_its_number_blank_lines_counted(self) -> None:
        read = self.parse('\n{"prompt": "a"}\r\n\n{"prompt": "b"}')
        assert [request.id for request in read.requests] == ["line-2", "line-4"]

    def test_a_text_file_holds_a_prompt_a_line_as_it_stands(self) -> None:
        read = self.parse("one \r\n\n   \n  {two}\n", "text")
        assert read.requests == [Request("line-1", "one "), Request("line-4", "  {two}")]

    def test_a_line_separator_inside_a_string_ends_no_line(self) -> None:
        assert self.parse('{"prompt": "a\u2028b"}').requests[0].prompt == "a\u2028b"

    def test_a_byte_order_mark_is_no_part_of_the_first_prompt(self) -> None:
        assert self.parse(b"\xef\xbb\xbfhi", "text").requests == [Request("line-1", "hi")]

    @pytest.mark.parametrize(("first", "count"), [('{"prompt": "a"}', 1), ("a\n{b}", 2)])
    def test_stdin_is_json_if_its_first_line_opens_an_object(
        self, first: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "stdin"
        path.write_text(f"\n {first}\n")
        with path.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            read = read_prompts("-")
        assert len(read.requests) == count
        assert not read.bad_lines

    def test_a_file_of_another_name_is_looked_at_like_stdin(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts"
        path.write_text('{"prompt": "a"}\n')
        assert read_prompts(str(path)).requests == [Request("line-1", "a")]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{nonsense", "not JSON: .* at column 2"),
            ('{"prompt": "a"', "not JSON"),
            ('{"prompt": ' + "9" * 5000 + "}", "not JSON that can be read"),
            ("[" * 100_000, "not JSON"),
            ("[1]", "must be a JSON object, not an array"),
            ('"a"', "must be a JSON object, not a string"),
            ("{}", "neither"),
            ('{"prompt": "a", "messages": []}', "both"),
            ('{"prompt": 3}', "'prompt' must be a string, not an integer"),
            ('{"prompt": null}', "not null"),
            ('{"prompt": NaN}', "not a fraction"),
            ('{"prompt": ""}', "the prompt is empty"),
            ('{"prompt": "\\ud83d"}', "surrogate"),
            ('{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
            ('{"prompt": "a", "temperature": 1}', "unknown key 'temperature'"),
            ('{"prompt": "a", "id": true}', "'id' must be a string or an integer, not a boolean"),
            ('{"prompt": "a", "id": 1.5}', "'id' must be"),
            ('{"prompt": "a", "id": ""}', "'id' is empty"),
            ('{"prompt": "a", "max_new_tokens": 0}', "must be at least 1, not 0"),
            ('{"prompt": "a", "max_new_tokens": "9"}', "'max_new_tokens' must be an integer, not a string"),
            ('{"prompt": "a", "max_new_tokens": true}', "not a boolean"),
            ('{"prompt": "a", "max_new_tokens": null}', "not null"),
            ('{"messages": "a"}', "'messages' must be an array"),
            ('{"messages": []}', "the prompt is empty"),
            ('{"messages": ["a"]}', "message 1: must be a JSON object"),
            ('{"messages": [{"role": "user"}]}', "message 1: 'content' must be a string: it is missing"),
            ('{"messages": [{"role": 1, "content": "a"}]}', "message 1: 'role' must be a string, not an int"),
            ('{"messages": [{"role": "", "content": "a"}]}', "message 1: 'role' is empty"),
            ('{"messages": [{"role": "user", "content": "a", "x": 1}]}', "message 1: unknown key 'x'"),
        ],
    )
    def test_a_bad_line_is_named_and_the_others_are_read(self, line: str, reason: str) -> None:
        read = self.parse(f'{{"prompt": "good"}}\n{line}\n{{"prompt": "better"}}\n')
        assert [request.id for request in read.requests] == ["line-1", "line-3"]
        [bad] = read.bad_lines
        assert bad.line == 2
        assert re.search(reason, bad.reason), bad.reason

    def test_a_line_that_is_not_utf_8_is_a_bad_line(self) -> None:
        read = self.parse(b'{"prompt": "a"}\n{"prompt": "\xff"}')
        assert [(bad.line, bad.reason) for bad in read.bad_lines] == [(2, "not UTF-8 (byte 13 of the line)")]

    def test_an_id_given_twice_names_both_lines_and_serves_the_first(self) -> None:
        read = self.parse('{"prompt": "a", "id": 1}\n{"prompt": "b"}\n{"prompt": "c", "id": "1"}')
        assert [request.prompt for request in read.requests] == ["a", "b"]
        [bad] = read.bad_lines
        assert (bad.line, bad.reason) == (3, "id '1' was given on line 1 already")

    def test_an_id_given_may_not_collide_with_a_default_one(self) -> None:
        read = self.parse('{"prompt": "a", "id": "line-2"}\n{"prompt": "b"}')
        assert [bad.line for bad in read.bad_lines] == [2]


class TestOptions:
    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"demo": False}, "exactly one of --model DIR and --demo"),
            ({"model": Path("/"), "demo": True}, "exactly one of --model DIR and --demo"),
            ({"prompt": ("a",)}, "not both"),
            ({"model": Path("/no/such"), "demo": False}, "the model folder /no/such does not exist"),
            ({"existing": Existing.RESUME, "output": None}, "--resume needs the --output"),
            ({"top_k": 3}, "give a --temperature"),
            ({"top_p": 0.5}, "give a --temperature"),
            ({"prompts": "/no/such.txt"}, "cannot read the prompts in /no/such.txt: No such file"),
            ({"prompts": "/"}, "cannot read the prompts in /: Is a directory"),
        ],
    )
    def test_a_mistake_is_one_error_before_anything_is_loaded(
        self, options: Callable[..., Options], changes: dict[str, Any], complaint: str
    ) -> None:
        with pytest.raises(CliError, match=complaint):
            run(options(**changes), pytest.fail, pytest.fail)  # type: ignore[arg-type]

    def test_no_prompts_at_all_is_an_error(self, options: Callable[..., Options], tmp_path: Path) -> None:
        with pytest.raises(CliError, match="there are no prompts"):
            Options(model=self.model_dir(tmp_path)).check()
        (tmp_path / "empty.txt").write_text("\n \n")
        with pytest.raises(CliError, match="there are no prompts in"):
            run(options(prompts=str(tmp_path / "empty.txt")), load_fake, FakeManager())

    def test_a_folder_that_is_no_model_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CliError, match=f"{tmp_path} has no config.json"):
            Options(model=tmp_path, prompt=("a",)).check()

    def test_the_output_may_not_be_the_prompts(self, options: Callable[..., Options], prompts_file: Path) -> None:
        with pytest.raises(CliError, match="is the file of the prompts"):
            options(output=prompts_file, existing=Existing.OVERWRITE).check()

    def model_dir(self, tmp_path: Path) -> Path:
        (tmp_path / "config.json").write_text("{}")
        return tmp_path


class TestServing:
    def test_records_are_written_in_finishing_order(self, options: Callable[..., Options]) -> None:
        manager, chosen = FakeManager(), options(max_new_tokens=4)
        assert run(chosen, load_fake, manager) == 0
        assert chosen.output is not None
        written = records(chosen.output)
        assert list(written) == manager.served == [str(n) for n in reversed(range(12))]
        assert written["3"] == {
            "id": "3",
            "text": "3 re",
            "finish_reason": "length",
            "prompt_tokens": len("prompt number 3"),
            "cached_tokens": 3,
            "generated_tokens": 4,
        }
        assert manager.calls == ["start", "stop", "destroy"]

    def test_stdout_is_for_records_and_stderr_for_the_table(
        self, options: Callable[..., Options], capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run(options(output=None), load_fake, FakeManager()) == 0
        out, err = capfd.readouterr()
        assert len([json.loads(line) for line in out.splitlines()]) == 12
        assert "requests" in err
        assert "p50 0.500 s, p99 0.500 s" in err
        assert "50.0%" in err

    def test_quiet_says_nothing_when_all_is_well(
        self, options: Callable[..., Options], capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run(options(quiet=True), load_fake, FakeManager()) == 0
        assert capfd.readouterr() == ("", "")

    def test_the_request_s_own_limit_comes_before_the_option(
        self, options: Callable[..., Options], prompts_file: Path
    ) -> None:
        prompts_file.write_text('{"prompt": "abcdef", "max_new_tokens": 2}\n{"prompt": "abcdef"}\n')
        chosen = options(max_new_tokens=3)
        assert run(chosen, load_fake, FakeManager()) == 0
        assert chosen.output is not None
        assert {id_: record["text"] for id_, record in records(chosen.output).items()} == {
            "line-1": "fe",
            "line-2": "fed",
        }

    def test_chats_and_chat_go_through_the_template_and_plain_prompts_do_not(
        self, options: Callable[..., Options], prompts_file: Path
    ) -> None:
        messages = [{"role": "user", "content": "b"}]
        prompts_file.write_text(f'{{"prompt": "a"}}\n{json.dumps({"messages": messages})}\n')
        tokenize = generate._Run(options(), Journal.open(None), FakeTokenizer()).tokenize
        wrap = generate._Run(options(chat=True), Journal.open(None), FakeTokenizer()).tokenize
        requests = read_prompts(str(prompts_file)).requests
        text = FakeTokenizer().decode
        assert [text(r.input_ids, skip_special_tokens=True) for r in tokenize(requests)] == ["a", "<user>b"]
        assert [text(r.input_ids, skip_special_tokens=True) for r in wrap(requests)] == ["<user>a", "<user>b"]

    def test_a_chat_without_a_template_is_an_error(
        self, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeTokenizer, "chat_template", None)
        with pytest.raises(CliError, match="no chat template"):
            run(options(chat=True), load_fake, FakeManager())

    def test_what_fails_is_recorded_and_the_others_are_served(
        self, options: Callable[..., Options], prompts_file: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        lines = [
            {"id": "long", "prompt": "x" * (LONGEST_PROMPT + 1)},
            {"id": "bursting", "prompt": "a"},
            {"id": "impolite", "messages": [{"role": "assistant", "content": "a"}]},
            {"id": "good", "prompt": "a"},
            {"id": "bad", "prompt": ""},
        ]
        prompts_file.write_text("\n".join(map(json.dumps, lines)))
        chosen = options()
        assert run(chosen, load_fake, FakeManager(failing=frozenset({"bursting"}))) == 1
        assert chosen.output is not None
        written = records(chosen.output)
        assert {id_: record["error"] for id_, record in written.items() if "error" in record} == {
            "long": f"prompt of {LONGEST_PROMPT + 1} tokens cannot fit",
            "bursting": "it burst",
            "impolite": "roles must alternate",
        }
        assert written["good"]["text"] == "a"
        errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
        assert [line.split(": ")[1] for line in errors] == [
            f"{prompts_file} line 5",
            "impolite",
            "long",
            "bursting",
        ]

    def test_a_model_that_cannot_be_served_is_one_error(self, options: Callable[..., Options]) -> None:
        def refuse(model: Any, options: Options, requests: Sequence[Tokenized]) -> FakeManager:
            raise ValueError("linear attention is not served")

        with pytest.raises(CliError, match="the model cannot be served: linear attention"):
            run(options(), load_fake, refuse)

    def test_the_death_of_the_engine_keeps_what_has_finished(
        self, options: Callable[..., Options], capfd: pytest.CaptureFixture[str]
    ) -> None:
        def die(count: int) -> None:
            if count == 5:
                raise RuntimeError("out of memory")

        manager, chosen = FakeManager(before_result=die), options()
        assert run(chosen, load_fake, manager) == 1
        assert chosen.output is not None
        assert len(records(chosen.output)) == 5
        assert manager.calls == ["start", "hard stop", "destroy"]
        assert "the engine died: out of memory" in capfd.readouterr().err

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
    def test_an_interrupt_stops_hard_and_leaves_whole_records(
        self, options: Callable[..., Options], signum: signal.Signals
    ) -> None:
        before = signal.getsignal(signum)

        def interrupt(count: int) -> None:
            if count == 3:
                os.kill(os.getpid(), signum)

        manager, chosen = FakeManager(before_result=interrupt), options()
        assert run(chosen, load_fake, manager) == 128 + signum
        assert chosen.output is not None
        assert 3 <= len(records(chosen.output)) <= 4
        assert manager.calls == ["start", "hard stop", "destroy"]
        assert signal.getsignal(signum) is before

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_one_error(self, options: Callable[..., Options]) -> None:
        manager = FakeManager()
        with pytest.raises(CliError, match="cannot write the output /dev/full: No space left"):
            run(options(output=Path("/dev/full")), load_fake, manager)
        assert manager.calls == ["start", "hard stop", "destroy"]


class TestOutputAndResume:
    def undisturbed(self, options: Callable[..., Options], tmp_path: Path) -> dict[str, dict[str, Any]]:
        run(options(output=tmp_path / "undisturbed.jsonl"), load_fake, FakeManager())
        return records(tmp_path / "undisturbed.jsonl")

    def test_a_file_with_content_is_not_touched_unasked(self, options: Callable[..., Options]) -> None:
        chosen = options()
        assert chosen.output is not None
        chosen.output.write_text("precious\n")
        with pytest.raises(CliError, match=r"is not empty: give --resume .* or --overwrite"):
            run(chosen, pytest.fail, pytest.fail)  # type: ignore[arg-type]
        assert chosen.output.read_text() == "precious\n"

    def test_an_empty_file_is_no_reason_to_refuse(self, options: Callable[..., Options]) -> None:
        chosen = options()
        assert chosen.output is not None
        chosen.output.touch()
        assert run(chosen, load_fake, FakeManager()) == 0

    def test_overwrite_begins_anew_once_the_model_is_there(self, options: Callable[..., Options]) -> None:
        def fail(options: Options) -> tuple[Any, Any]:
            raise CliError("no model")

        chosen = options(existing=Existing.OVERWRITE)
        assert chosen.output is not None
        chosen.output.write_text("old\n")
        with pytest.raises(CliError, match="no model"):
            run(chosen, fail, FakeManager())
        assert chosen.output.read_text() == "old\n"
        assert run(chosen, load_fake, FakeManager()) == 0
        assert len(records(chosen.output)) == 12

    def test_a_folder_that_is_not_there_is_one_error(self, options: Callable[..., Options]) -> None:
        with pytest.raises(CliError, match=r"cannot write the output /no/such/out\.jsonl: No such file"):
            run(options(output=Path("/no/such/out.jsonl")), load_fake, FakeManager())

    def test_two_runs_cannot_share_an_output(self, options: Callable[..., Options]) -> None:
        chosen = options()
        assert run(chosen, load_fake, FakeManager(failing=frozenset({"4"}))) == 1
        with Journal.open(chosen.output, Existing.RESUME) as journal:
            for _ in ("as it was", "replaced by one without its errors"):
                with pytest.raises(CliError, match="another run is writing"):
                    Journal.open(chosen.output, Existing.RESUME)
                journal.begin()

    def test_resume_tries_failures_again_and_nothing_else(
        self, options: Callable[..., Options], tmp_path: Path
    ) -> None:
        chosen, manager = options(existing=Existing.RESUME), FakeManager()
        assert chosen.output is not None
        assert run(chosen, load_fake, FakeManager(failing=frozenset({"2", "7", "11"}))) == 1
        chosen.output.chmod(0o640)
        assert run(chosen, load_fake, manager) == 0
        assert sorted(manager.served, key=int) == ["2", "7", "11"]
        assert records(chosen.output) == self.undisturbed(options, tmp_path)
        assert chosen.output.stat().st_mode & 0o777 == 0o640
        assert {path.name for path in tmp_path.iterdir()} == {
            "prompts.jsonl",
            "out.jsonl",
            "undisturbed.jsonl",
        }

    def test_resume_of_a_whole_run_loads_nothing(self, options: Callable[..., Options]) -> None:
        chosen = options(existing=Existing.RESUME)
        assert run(chosen, load_fake, FakeManager()) == 0
        assert run(chosen, pytest.fail, pytest.fail) == 0  # type: ignore[arg-type]

    def test_resume_serves_a_mended_line(self, options: Callable[..., Options], prompts_file: Path) -> None:
        prompts_file.write_text('{"prompt": "a"}\n{"prompt": }\n')
        chosen, manager = options(existing=Existing.RESUME), FakeManager()
        assert chosen.output is not None
        assert run(chosen, load_fake, FakeManager()) == 1
        assert list(records(chosen.output)) == ["line-1"]
        prompts_file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        assert run(chosen, load_fake, manager) == 0
        assert manager.served == ["line-2"]

    def test_resume_follows_a_link_to_the_output(self, options: Callable[..., Options], tmp_path: Path) -> None:
        link = tmp_path / "link.jsonl"
        link.symlink_to(tmp_path / "out.jsonl")
        assert run(options(output=link), load_fake, FakeManager(failing=frozenset({"1"}))) == 1
        assert run(options(output=link, existing=Existing.RESUME), load_fake, FakeManager()) == 0
        assert link.is_symlink()
        assert len(records(tmp_path / "out.jsonl")) == 12

    @pytest.mark.parametrize("cut", [1, 7, 8, 20, -2])
    @pytest.mark.parametrize("tail", [b"", b"\0" * 9, b"\n"])
    def test_a_torn_last_line_is_cut_off_and_served_again(
        self, options: Callable[..., Options], tmp_path: Path, cut: int, tail: bytes
    ) -> None:
        chosen, manager = options(existing=Existing.RESUME), FakeManager()
        assert run(chosen, load_fake, FakeManager()) == 0
        assert chosen.output is not None
        *whole, last = chosen.output.read_bytes().splitlines(keepends=True)
        chosen.output.write_bytes(b"".join(whole) + last[:cut] + tail)
        assert run(chosen, load_fake, manager) == 0
        assert manager.served == [json.loads(last)["id"]]
        assert records(chosen.output) == self.undisturbed(options, tmp_path)

    def test_a_last_record_that_lacks_only_its_newline_counts(
        self, options: Callable[..., Options], tmp_path: Path
    ) -> None:
        chosen, manager = options(existing=Existing.RESUME), FakeManager()
        assert run(chosen, load_fake, FakeManager()) == 0
        assert chosen.output is not None
        whole = chosen.output.read_bytes().splitlines(keepends=True)
        chosen.output.write_bytes(b"".join(whole[:7]).removesuffix(b"\n"))
        assert run(chosen, load_fake, manager) == 0
        assert len(manager.served) == 5
        assert records(chosen.output) == self.undisturbed(options, tmp_path)

    @pytest.mark.parametrize(
        ("content", "line"),
        [
            (b"shopping list\n", 1),
            (b'{"prompt": "a"}\n', 1),
            (b'{"id": "a", "text": "b"}\n{"id": "c", "te\n{"id": "d", "text": "e"}\n', 2),
            (b'{"id": 3, "text": "b"}\n', 1),
        ],
    )
    def test_a_file_that_is_not_ours_is_not_cut(
        self, options: Callable[..., Options], content: bytes, line: int
    ) -> None:
        chosen = options(existing=Existing.RESUME)
        assert chosen.output is not None
        chosen.output.write_bytes(content)
        with pytest.raises(CliError, match=f"line {line} is no record"):
            run(chosen, pytest.fail, pytest.fail)  # type: ignore[arg-type]
        assert chosen.output.read_bytes() == content

    def test_a_killed_run_loses_nothing_and_repeats_nothing(
        self, options: Callable[..., Options], tmp_path: Path
    ) -> None:
        def kill(count: int) -> None:
            if count == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        chosen, second = options(existing=Existing.RESUME), FakeManager()
        assert chosen.output is not None
        first = multiprocessing.get_context("fork").Process(
            target=run, args=(chosen, load_fake, FakeManager(before_result=kill))
        )
        first.start()
        first.join()
        assert first.exitcode == -signal.SIGKILL
        survived = list(records(chosen.output))
        assert len(survived) == 5
        assert run(chosen, load_fake, second) == 0
        assert sorted(survived + second.served, key=int) == [str(n) for n in range(12)]
        assert records(chosen.output) == self.undisturbed(options, tmp_path)


class TestTheCommand:
    def test_help_loads_neither_torch_nor_transformers(self) -> None:
        program = "import sys, chairlift.cli; print({'torch', 'transformers'} & set(sys.modules))"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert ended.stdout.strip() == "set()"

    def test_help_and_version_answer(self) -> None:
        assert "--max-new-tokens" in command("generate", "--help", env=os.environ | {"COLUMNS": "200"}).stdout
        assert command("--version").stdout.startswith("chairlift ")

    def test_a_mistake_is_one_line_and_exit_code_2(self, tmp_path: Path) -> None:
        ended = command("generate", "--model", str(tmp_path / "no [b]such[/b]"), "--prompt", "a")
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == f"error: the model folder {tmp_path}/no [b]such[/b] does not exist\n"

    def test_all_options_arrive(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        seen: list[Options] = []
        monkeypatch.setattr(generate, "run", lambda options: seen.append(options) or 7)
        arguments = "--model m --prompt a --prompt b --chat -o out --resume --max-new-tokens 5 --temperature 0.5"
        arguments += " --top-k 4 --top-p 0.9 --seed 3 --dtype bfloat16 --page-size 16 --num-blocks 8"
        arguments += " --max-batch-tokens 64 --max-requests-per-batch 2 --quiet"
        assert main_in_process(monkeypatch, "generate", *arguments.split()) == 7
        assert seen == [
            Options(
                model=Path("m"),
                prompt=("a", "b"),
                chat=True,
                output=Path("out"),
                existing=Existing.RESUME,
                max_new_tokens=5,
                temperature=0.5,
                top_k=4,
                top_p=0.9,
                seed=3,
                dtype=Dtype.BFLOAT16,
                page_size=16,
                num_blocks=8,
                max_batch_tokens=64,
                max_requests_per_batch=2,
                quiet=True,
            )
        ]
        assert main_in_process(monkeypatch, "generate", "--demo") == 7
        assert seen[1] == Options(demo=True)

    def test_resume_and_overwrite_exclude_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert main_in_process(monkeypatch, "generate", "--demo", "-o", "x", "--resume", "--overwrite") == 2

    def test_an_interrupt_while_loading_is_130(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(options: Options) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(generate, "run", interrupted)
        assert main_in_process(monkeypatch, "generate", "--demo") == 130

    def test_a_reader_that_leaves_ends_the_run_in_peace(self, prompts_file: Path) -> None:
        program = (
            "import sys, time, test_cli as t\n"
            "from pathlib import Path\n"
            "options = t.Options(demo=True, prompts=sys.argv[1], quiet=True)\n"
            "slow = t.FakeManager(before_result=lambda count: time.sleep(0.05))\n"
            "sys.exit(t.run(options, t.load_fake, slow))\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, str(prompts_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
        ) as ended:
            assert ended.stdout is not None
            assert ended.stderr is not None
            ended.stdout.readline()
            ended.stdout.close()
            assert ended.stderr.read() == b""
        assert ended.returncode == 1

    def test_percentiles_are_measured_values(self) -> None:
        values = [float(n) for n in range(1, 101)]
        assert (percentile(values, 50), percentile(values, 99), percentile([3.0], 50)) == (50.0, 99.0, 3.0)


class TestLoading:
    def test_a_broken_model_folder_is_one_error_that_names_it(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(CliError, match=f"cannot load {tmp_path}: "):
            generate.load_model(Options(model=tmp_path, prompt=("a",)))

    def test_a_folder_without_a_tokenizer_is_one_error(self, tmp_path: Path) -> None:
        save_tiny_model(tmp_path)
        with pytest.raises(CliError, match=f"cannot load {tmp_path}: "):
            generate.load_model(Options(model=tmp_path, prompt=("a",)))

    def test_greedy_drops_what_the_model_says_about_sampling_and_nothing_else(self, tmp_path: Path) -> None:
        model = save_tiny_model(tmp_path)
        vars(model.generation_config).update(do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
        greedy = generate.generation_config(model, Options(demo=True, max_new_tokens=9))
        assert (greedy.do_sample, greedy.temperature, greedy.top_p) == (False, None, None)
        assert (greedy.repetition_penalty, greedy.max_new_tokens) == (1.1, 9)
        sampled = generate.generation_config(model, Options(demo=True, temperature=1.2, top_k=7))
        assert (sampled.do_sample, sampled.temperature, sampled.top_k, sampled.top_p) == (True, 1.2, 7, 0.9)
        assert model.generation_config.temperature == 0.6

    def test_the_cache_folder_can_be_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CHAIRLIFT_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert demo.cache_dir() == Path.home() / ".cache" / "chairlift"
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert demo.cache_dir() == Path("/xdg/chairlift")
        monkeypatch.setenv("CHAIRLIFT_CACHE", "/chosen")
        assert demo.cache_dir() == Path("/chosen")

    def test_a_demo_that_cannot_be_fetched_is_one_error_and_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
        failing = [sys.executable, "-c", "import sys; sys.exit('one\\nno index\\n')"]
        monkeypatch.setattr(demo, "_pip", lambda: failing)
        with pytest.raises(CliError, match=r"cannot fetch the demo model: .* failed: no index"):
            demo.demo_model_dir()
        assert list((tmp_path / "smollm2-135m-instruct").iterdir()) == []

    def test_without_any_pip_the_error_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _: None)
        monkeypatch.setattr(demo.shutil, "which", lambda _: None)
        with pytest.raises(CliError, match="there is no pip"):
            demo._pip()

    @pytest.mark.smollm2
    def test_the_unpacked_copy_is_the_packed_model(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, tokenizer = demo.load_demo()
        packed = {"gguf_file": demo.WEIGHTS_NAME, "dtype": torch.float32}
        original = AutoModelForCausalLM.from_pretrained(demo.demo_model_dir(), **packed)
        plain = AutoTokenizer.from_pretrained(demo.demo_model_dir(), gguf_file=demo.WEIGHTS_NAME)
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        expected = plain.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        assert torch.equal(encoded["input_ids"], expected["input_ids"])
        with torch.no_grad():
            assert torch.equal(model(**encoded).logits, original(**expected).logits)


def save_tiny_model(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    model.save_pretrained(folder)
    return model


class TestEnv:
    def test_env_answers_whatever_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setitem(sys.modules, "chairlift._native", None)
        monkeypatch.setitem(sys.modules, "chairlift.attention", None)
        assert main_in_process(monkeypatch, "env") == 0
        out = capsys.readouterr().out
        for expected in ("transformers", "Rust core", "instruction sets", "GiB free of", "cannot be loaded"):
            assert expected in out

    def test_env_shows_each_backend_and_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @dataclass
        class Backend:
            name: str
            available: bool
            reason: str

        class Attention:
            @staticmethod
            def available_backends() -> list[Backend]:
                return [Backend("flash_attention_2", False, "needs CUDA")]

        monkeypatch.setitem(sys.modules, "chairlift.attention", Attention())  # type: ignore[arg-type]
        assert environment.attention_backends() == [("flash_attention_2", False, "needs CUDA")]


@pytest.mark.smollm2
def test_the_demo_killed_midway_and_resumed_equals_an_undisturbed_run(tmp_path: Path) -> None:
    prompts, whole, disturbed = (tmp_path / name for name in ("prompts.jsonl", "whole.jsonl", "disturbed.jsonl"))
    subjects = ("the sea", "a glacier", "winter", "a lighthouse", "copper", "chess", "bread", "the moon")
    chats = [[{"role": "user", "content": f"Tell me about {subject}."}] for subject in subjects]
    prompts.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    # Two at a time, so that the records come one by one and the kill meets a run that is under way.
    arguments = [
        "generate",
        str(prompts),
        "--demo",
        "--max-new-tokens",
        "48",
        "--max-requests-per-batch",
        "2",
    ]

    undisturbed = command(*arguments, "--output", str(whole))
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed = subprocess.Popen(command_line(*arguments, "--output", str(disturbed)), stderr=subprocess.DEVNULL)
    while killed.poll() is None and not (disturbed.exists() and disturbed.read_bytes().count(b"\n") >= 2):
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    survived = disturbed.read_bytes().count(b"\n")
    assert 2 <= survived < len(subjects)

    resumed = command(*arguments, "--output", str(disturbed), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{survived} of {len(subjects)} requests are served already" in resumed.stderr
    assert records(disturbed) == records(whole)
