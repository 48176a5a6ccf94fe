"""Which GPU drivers are installed, as far as files and variables tell: nothing here opens one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

__all__ = ["apply", "boot", "driver_files", "environment", "machine", "variables"]

DECISIVE = (
    *("VK_", "WGPU_", "MESA_", "LIBGL_", "GALLIUM_", "DRI_", "LVP_", "LP_", "__EGL_", "__GLX_", "__NV_", "NVIDIA_"),
    *("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CONFIG_", "XDG_DATA_"),
)
"""How the names of variables begin that drivers, or the loader of drivers, look at."""

ONLY, ONLY_ONCE_CALLED, BESIDE = "VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES"
NODES = ("/dev/dri", "/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/mali*")
VERSIONS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")


def variables() -> tuple[tuple[str, str], ...]:
    """The variables of the environment that decide which drivers are opened, and how."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(DECISIVE)))


def driver_files() -> list[str]:
    """The Vulkan drivers that the loader would open, by their manifests; none where it does not go by files."""
    if not sys.platform.startswith("linux"):
        return []
    named = os.environ.get(ONLY) or os.environ.get(ONLY_ONCE_CALLED)
    places = (os.environ.get(BESIDE) or "").split(os.pathsep)
    places += named.split(os.pathsep) if named else _folders()
    return list(dict.fromkeys(file for place in places if place for file in _manifests(Path(place))))


def environment(drivers: Sequence[str] | None) -> dict[str, str | None]:
    """What a process's environment must be for the loader to open these drivers only; None: as it is."""
    if drivers is None:
        return {}
    only = os.pathsep.join(drivers)
    return {ONLY: only, ONLY_ONCE_CALLED: only, BESIDE: None}


def machine() -> str:
    """A text that changes when drivers come, go, or get another version, and when wgpu does."""
    facts: list[object] = [platform.system(), platform.release(), platform.version(), platform.machine(), variables()]
    for file in driver_files():
        facts += [file, _stamp(Path(file)), _stamp(_library(Path(file)))]
    for pattern in NODES:
        for node in _nodes(pattern):
            facts.append((node, os.access(node, os.R_OK | os.W_OK)))
    for file in VERSIONS:
        facts.append(_text(Path(file)))
    wgpu = importlib.util.find_spec("wgpu")
    facts += [wgpu.origin, _stamp(Path(wgpu.origin))] if wgpu is not None and wgpu.origin else ["no wgpu"]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def boot() -> str:
    """A text that is another one after the machine was started anew; "" where it does not tell."""
    return _text(Path("/proc/sys/kernel/random/boot_id"))


def _folders() -> list[str]:
    home, get = Path.home(), os.environ.get
    roots = [get("XDG_CONFIG_HOME") or str(home / ".config")]
    roots += (get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    roots += ["/usr/local/etc", "/etc", get("XDG_DATA_HOME") or str(home / ".local/share")]
    roots += (get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(os.pathsep)
    return [str(Path(root) / "vulkan" / "icd.d") for root in roots if root]


def _manifests(place: Path) -> Iterator[str]:
    if place.suffix == ".json":
        yield str(place)
        return
    try:
        yield from sorted(str(file) for file in place.iterdir() if file.suffix == ".json")
    except OSError:
        return


def _library(manifest: Path) -> Path:
    """The library that a manifest names; where the loader would search for it, the manifest itself."""
    try:
        content = json.loads(manifest.read_bytes())
        library = str(content["ICD"]["library_path"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return manifest
    return manifest.parent / library if os.sep in library else manifest


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def _nodes(pattern: str) -> list[str]:
    place = Path(pattern)
    if place.name.endswith("*"):
        return sorted(str(node) for node in place.parent.glob(place.name))
    try:
        return sorted(str(node) for node in place.iterdir()) if place.is_dir() else [pattern] * place.exists()
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def apply(change: Mapping[str, str | None], variables: MutableMapping[str, str]) -> None:
    """Change variables; None takes one away."""
    for name, value in change.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
