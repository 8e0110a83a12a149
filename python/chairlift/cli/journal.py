"""The output file: one JSON line per finished request, in finishing order, and what a resumed run may skip.

A line counts once it is whole, so a run killed at any moment leaves a file that the next run can go on
with. Nothing here knows a model or a manager.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Set
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from chairlift.cli.report import CliError

Record = dict[str, Any]


class Existing(Enum):
    """What to do with an output file that has something in it already."""

    REFUSE = "refuse"
    OVERWRITE = "overwrite"
    RESUME = "resume"


class Journal:
    """Owns the output from `open` to `close`. `done` holds the ids that are served already."""

    def __init__(
        self,
        path: Path | None,
        file: BinaryIO,
        *,
        truncate: bool = False,
        done: Set[str] = frozenset(),
        drop: Set[int] = frozenset(),
    ) -> None:
        self.path = path
        self.done = done
        self._file = file
        self._truncate = truncate
        self._drop = drop
        # Kept open to the end: the lock of a replaced file still turns away whoever opened it before.
        self._replaced: BinaryIO | None = None

    @classmethod
    def open(cls, path: Path | None, existing: Existing = Existing.REFUSE) -> Journal:
        """Opens and looks, and changes nothing yet: a run may still fail before its first request.

        Raises:
            CliError: the file has content and neither flag was given, another run holds it, it cannot be
                opened, or it is to be resumed and holds lines that no run of ours wrote.
        """
        if path is None:
            return cls(None, sys.stdout.buffer)
        path = path.resolve()  # os.replace on a link would put a file in the link's place
        try:
            file = open(path, "ab+", buffering=0)  # noqa: SIM115 (the journal closes it)
        except OSError as error:
            raise CliError(f"cannot write the output {path}: {error.strerror}") from error
        try:
            return cls._look(path, file, existing)
        except BaseException:
            file.close()
            raise

    @classmethod
    def _look(cls, path: Path, file: BinaryIO, existing: Existing) -> Journal:
        if not path.is_file():
            if existing is Existing.RESUME:
                raise CliError(f"cannot resume {path}: it is not a regular file")
            return cls(path, file)
        _lock(file, path)
        if path.stat().st_size == 0:
            return cls(path, file)
        if existing is Existing.REFUSE:
            raise CliError(f"the output {path} is not empty: give --resume to go on with it, or --overwrite")
        if existing is Existing.OVERWRITE:
            return cls(path, file, truncate=True)
        done, drop = scan(path)
        return cls(path, file, done=done, drop=drop)

    def begin(self) -> None:
        """Makes the file ready for the first record: emptied, or rid of its torn line and error records."""
        with self._naming_the_output():
            if self._truncate:
                self._file.truncate(0)
            if self.path is not None and self._drop:
                self._rewrite(self.path)
            elif self.path is not None and self.done and not _ends_with_newline(self.path):
                _write_all(self._file, b"\n")

    def write(self, record: Record) -> None:
        """Appends one record. It is with the operating system when this returns."""
        with self._naming_the_output():
            _write_all(self._file, json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        for file in (self._file, self._replaced):
            if file is not None and file is not sys.stdout.buffer:
                file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _naming_the_output(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:  # a full disk, most often; the torn line it leaves is what --resume cuts
            raise CliError(f"cannot write the output {self.path or 'to stdout'}: {error.strerror}") from error

    def _rewrite(self, path: Path) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            kept = os.fdopen(descriptor, "ab+", buffering=0)
            _lock(kept, path)
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if number not in self._drop:
                        _write_all(kept, line if line.endswith(b"\n") else line + b"\n")
            os.fsync(kept.fileno())
            shutil.copymode(path, name)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._file, self._replaced = kept, self._file


def scan(path: Path) -> tuple[set[str], set[int]]:
    """The ids served in an output file, and the 1-based numbers of the lines that a resumed run drops.

    Dropped are the records of failures, to be tried again, and a last line that the death of a run tore.
    Anything else that is no record of ours raises: the file may be something the user wants to keep.
    """
    done: set[str] = set()
    drop: set[int] = set()
    torn: int | None = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            record = _record(line)
            if torn is not None or (record is None and not _is_torn(line)):
                raise CliError(f"cannot resume {path}: line {torn or number} is no record of chairlift generate")
            if record is None:
                torn = number
            if record is None or "error" in record:
                drop.add(number)
            else:
                done.add(record["id"])
    return done, drop


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    return record if isinstance(record.get("error", record.get("text")), str) else None


def _is_torn(line: bytes) -> bool:
    # A machine that goes down may leave zeros where the file had grown but its data had not arrived.
    start, head = line.strip(b"\0\n"), b'{"id": "'
    return start.startswith(head) or head.startswith(start)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CliError(f"another run is writing {path}") from error


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    file.flush()
