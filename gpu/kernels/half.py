"""Buffers of f16 under kernels that are written for f32: in their WGSL each load widens, each store narrows.

A kernel says `x[i]` where it reads and `y[i] = v;` where it writes; these are what is rewritten. This
file knows no kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["admitted", "halved", "rewritten"]

_HALVED = {"f32": "f16", "vec4f": "vec4<f16>", "vec4<f32>": "vec4<f16>"}
_STORE = re.compile(r"\s*=(?!=)")


def halved(kind: str) -> str:
    """The type of an element of f16 for one of f32. Raises KeyError for others."""
    return _HALVED[kind]


def admitted(code: str, name: str, kind: str) -> bool:
    """Whether a binding's buffer may hold f16: its elements are f32, and they are loaded and stored, no more."""
    return kind in _HALVED and not re.search(rf"(?<![\w.]){name}\b(?!\s*\[)", code)


def rewritten(code: str, kinds: Mapping[str, str]) -> str:
    """WGSL under which the bindings of `kinds` (name: type of an element) hold f16."""
    if not kinds:
        return code
    names = re.compile(rf"(?<![\w.])({'|'.join(kinds)})\s*\[")
    made, at = [], 0
    while (found := names.search(code, at)) is not None:
        kind = kinds[found[1]]
        end = _closed(code, found.end() - 1)
        place = f"{found[1]}[{rewritten(code[found.end() : end - 1], kinds)}]"
        made.append(code[at : found.start()])
        store = _STORE.match(code, end)
        if store is None:
            made.append(f"{kind}({place})")
            at = end
        else:
            at = code.index(";", end)
            made.append(f"{place} = {_HALVED[kind]}({rewritten(code[store.end() : at].strip(), kinds)})")
    return "".join((*made, code[at:]))


def _closed(code: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth == 0:
            return at + 1
    raise ValueError(f"a bracket is not closed in {code!r}")
