"""`chairlift env`: what this machine and this installation offer, for a bug report or a first look."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

# Instruction sets that decide how fast the CPU backends are, as the kernel names them.
_CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)


def env() -> None:
    """Versions, devices, memory and attention backends."""
    console = Console()
    for title, rows in (("versions", versions()), ("machine", machine())):
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
    table = Table("backend", "available", "why", title="attention backends", title_justify="left")
    for name, available, reason in attention_backends():
        table.add_row(name, "yes" if available else "no", reason)
    console.print(table)


def versions() -> list[tuple[str, str]]:
    rows = [("chairlift", installed_version("chairlift")), ("Rust core", _core_version())]
    rows.append(("python", f"{platform.python_version()} ({platform.python_implementation()})"))
    return rows + [(name, installed_version(name)) for name in ("torch", "transformers", "numpy", "flash-attn")]


def installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _core_version() -> str:
    try:
        return str(importlib.import_module("chairlift._native").__version__)
    except ImportError as error:
        return f"cannot be loaded: {error}"


def machine() -> list[tuple[str, str]]:
    import torch

    from chairlift.engine.free_memory import cgroup_memory

    name, flags = _cpu()
    rows = [
        ("platform", platform.platform()),
        ("CPU", name),
        (
            "threads",
            f"{torch.get_num_threads()} used by torch, {_usable_cpus()} usable, {os.cpu_count()} present",
        ),
        ("instruction sets", f"torch uses {torch.backends.cpu.get_cpu_capability()}; {' '.join(flags)}"),
    ]
    memory = psutil.virtual_memory()
    rows.append(("memory", f"{_gib(memory.available)} free of {_gib(memory.total)}"))
    if limits := cgroup_memory():
        limit, used = limits
        rows.append(("memory limit (cgroup)", f"{_gib(limit)}, of which {_gib(limit - used)} free"))
    return rows + _accelerators(torch)


def _accelerators(torch: Any) -> list[tuple[str, str]]:
    rows = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)} (compute {major}.{minor})"
        rows.append((f"cuda:{index}", f"{name}, {_gib(free)} free of {_gib(total)}"))
    rows += [(name, "present") for name in ("mps", "xpu") if getattr(torch, name).is_available()]
    return rows or [("accelerators", "none: models run on the CPU")]


def attention_backends() -> list[tuple[str, bool, str]]:
    """Name, available and why, for each; the package decides, this only asks."""
    try:
        backends = importlib.import_module("chairlift.attention").available_backends()
    except (ImportError, AttributeError) as error:
        return [("all", False, f"chairlift.attention cannot be loaded: {error}")]
    return [(backend.name, backend.available, backend.reason) for backend in backends]


def _cpu() -> tuple[str, list[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    fields = dict(reversed([line.split(":", 1) for line in text.splitlines() if ":" in line]))
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return facts.get("model name") or platform.machine(), [flag for flag in _CPU_FLAGS if flag in flags]


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gib(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB"
