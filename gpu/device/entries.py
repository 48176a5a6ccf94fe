"""A file that remembers a few things by their names, from one process to the next: `Entries`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["Entries"]

KEPT = 16
LARGEST_FILE = 1 << 20
FORMAT = 1


class Entries:
    """Plain values by name, in one JSON file. What cannot be read or written is left be.

    Several processes may write at once: one of them wins, and the file is whole at any time.

    Args:
        file: where; its folder is made when there is something to write.
        kind: what the names are names of.
    """

    def __init__(self, file: Path, kind: str) -> None:
        self.file, self._kind = file, kind

    def read(self) -> dict[str, Any]:
        """All that is remembered; nobody has looked at what the values are."""
        try:
            with open(self.file, "rb") as file:
                content = json.loads(file.read(LARGEST_FILE))
            entries = content[self._kind] if content["format"] == FORMAT else {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def put(self, name: str, value: Any) -> None:
        """Remember, and forget the oldest where there are many; no error where that cannot be."""
        entries = self.read()
        entries.pop(name, None)
        entries[name] = value
        text = json.dumps({"format": FORMAT, self._kind: dict(list(entries.items())[-KEPT:])}, indent=1)
        made = None
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            prefix = f"{self.file.stem}-"
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, prefix=prefix, delete=False) as file:
                made = file.name
                file.write(text)
            os.replace(made, self.file)
        except OSError:
            if made is not None:
                with contextlib.suppress(OSError):
                    os.unlink(made)

    def forget(self) -> None:
        """Forget all.

        Raises:
            OSError: the file cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.file.unlink()
