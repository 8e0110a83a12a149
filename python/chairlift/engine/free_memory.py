"""How much memory this process may still take."""

from pathlib import Path

import psutil

_UNLIMITED = 1 << 60


def free_memory_bytes() -> int:
    """RAM that this process may still take: of the machine, and of its container."""
    free = int(psutil.virtual_memory().available)
    limits = cgroup_memory()
    return free if limits is None else min(free, max(0, limits[0] - limits[1]))


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, int] | None:
    """The memory limit in bytes that leaves the least, and what of it is in use and not given up on demand; None
    where nothing limits us.

    Every level of the tree may set a limit, under version 1 and version 2 of cgroups alike.
    """
    found: list[tuple[int, int]] = []
    for line in _read_lines(own):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        level = base / path.lstrip("/")
        # Inside a container the path may be the host's, and only its upper levels be there.
        for group in (level, *level.parents):
            if not group.is_relative_to(base):
                break
            limit, used = (_read_bytes(group / name) for name in names[:2])
            # Version 1 writes "no limit" as the largest multiple of a page.
            if limit is not None and used is not None and limit < _UNLIMITED:
                found.append((limit, max(0, used - _stat(group, names[2]))))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _stat(group: Path, name: str) -> int:
    lines = (line.split() for line in _read_lines(group / "memory.stat"))
    return next((int(fields[1]) for fields in lines if fields and fields[0] == name), 0)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_bytes(path: Path) -> int | None:
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
