"""What a figure holds for: the processor, the versions, and how busy the machine was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def describe_cpu() -> str:
    """The processor's name as the kernel has it, and which of the units that bf16 depends on it has."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in flags]
    return f"{fields.get('model name') or platform.machine()} ({', '.join(units)})"


def describe_machine() -> str:
    """The processor, the cores that this process may use, and the load now."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{describe_cpu()}, {cores} cores, load {load:.1f} at the start"


def installed_version(package: str) -> str:
    """The installed version of a package, or a dash."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def describe_versions(*packages: str) -> str:
    """The installed versions of packages, and Python's."""
    versions = ", ".join(f"{package} {installed_version(package)}" for package in packages)
    return f"{versions}, Python {platform.python_version()}"
