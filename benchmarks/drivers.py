"""The software drivers of this machine, and runs of a program on each: a process sees one of them only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Driver", "software_drivers"]

PLACES: Mapping[str, Sequence[str]] = {
    "lavapipe": (
        "usr/share/vulkan/icd.d/lvp_icd*.json",
        "usr/local/share/vulkan/icd.d/lvp_icd*.json",
        "etc/vulkan/icd.d/lvp_icd*.json",
    ),
    "SwiftShader": (
        "usr/lib/chromium*/vk_swiftshader_icd.json",
        "usr/lib64/chromium*/vk_swiftshader_icd.json",
        "opt/google/chrome*/vk_swiftshader_icd.json",
        "opt/microsoft/*/vk_swiftshader_icd.json",
        "usr/share/vulkan/icd.d/vk_swiftshader_icd.json",
    ),
}
"""Driver -> where packages put the file that describes it, below the root."""


@dataclass(frozen=True)
class Driver:
    """A Vulkan driver that computes on the CPU.

    Attributes:
        name: "lavapipe", "SwiftShader", or what its file is called.
        files: what describes it to the Vulkan loader, which passes over those of other architectures.
    """

    name: str
    files: tuple[Path, ...]

    def environment(self, around: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process that is to see this driver alone."""
        kept = {name: value for name, value in around.items() if name not in ("VK_DRIVER_FILES", "TRIONNX_ADAPTER")}
        return {**kept, "VK_ICD_FILENAMES": os.pathsep.join(map(str, self.files))}

    def run(self, program: Path, arguments: Sequence[str]) -> int:
        """Run a Python program on this driver, for its errors and its exit code; what it prints is dropped."""
        command = [sys.executable, str(program), *arguments]
        environment = self.environment(os.environ)
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
        ).returncode


def software_drivers(root: Path = Path("/")) -> list[Driver]:
    """The software drivers that are installed below `root`."""
    found = []
    for name, patterns in PLACES.items():
        files = next((files for pattern in patterns if (files := sorted(root.glob(pattern)))), None)
        if files:
            found.append(Driver(name, tuple(files)))
    return found
