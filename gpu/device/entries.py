"""A file that remembers a few things by their names, from one process to the next: `Entries`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

__all__ = ["Entries"]

KEPT = 16
LARGEST_FILE = 1 << 20
FORMAT = 2


class Entries:
    """Plain values by name, in one JSON file. What cannot be read, or was damaged, is not there.

    Several processes may write at once: one of them wins, and the file is whole at any time.

    Args:
        file: where; its folder is made when there is something to write.
        kind: what the names are names of.
    """

    def __init__(self, file: Path, kind: str) -> None:
        self.file, self._kind = file, kind

    def read(self) -> dict[str, Any]:
        """All that is remembered, as it was put."""
        try:
            with open(self.file, "rb") as file:
                content = json.loads(file.read(LARGEST_FILE))
            entries = content[self._kind] if content["format"] == FORMAT else {}
            sound = (name for name, entry in entries.items() if entry["check"] == _check(entry["value"]))
            return {name: entries[name]["value"] for name in sound}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}

    def put(self, name: str, value: Any) -> None:
        """Remember, and forget the oldest where there are many.

        Raises:
            OSError: it cannot be written; what was there before still is.
        """
        values = self.read()
        values.pop(name, None)
        values[name] = value
        entries = {one: {"check": _check(values[one]), "value": values[one]} for one in list(values)[-KEPT:]}
        text = json.dumps({"format": FORMAT, self._kind: entries}, indent=1)
        made = None
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            prefix = f"{self.file.stem}-"
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, prefix=prefix, delete=False) as file:
                made = file.name
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(made, self.file)
        except OSError:
            if made is not None:
                with contextlib.suppress(OSError):
                    os.unlink(made)
            raise

    def forget(self) -> None:
        """Forget all.

        Raises:
            OSError: the file cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.file.unlink()


def _check(value: Any) -> int:
    """A number that is another one where anything is."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
