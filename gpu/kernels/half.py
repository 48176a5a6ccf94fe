"""Buffers of f16 under kernels that are written for f32: in their WGSL each load widens, each store narrows.

A kernel says `x[i]` where it reads and `y[i] = v;` where it writes; these are what is rewritten. What is
stored has been rounded before: float16 has the value. This file knows no kernel.

Fours are two words, single elements f16. But on software adapters what is only read is words there, too:
where they load f16, and after the built-in conversions, they go on with f16 and call a function for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["admitted", "conversions", "halved", "rewritten"]

_FOURS = ("vec4f", "vec4<f32>")
_LOAD = {
    "f16": "f32({name}[{at}])",
    "u32": "from_half({name}[u32({at}) / 2u], u32({at}))",
    "vec2u": "from_halves({name}[{at}])",
}
_KEEP = {"f16": "{name}[{at}] = f16({value})", "vec2u": "{name}[{at}] = to_halves({value})"}
_STORE = re.compile(r"\s*=(?!=)")

_BUILT_IN = """fn from_halves(v: vec2u) -> vec4f { return vec4f(unpack2x16float(v.x), unpack2x16float(v.y)); }
fn to_halves(v: vec4f) -> vec2u { return vec2u(pack2x16float(v.xy), pack2x16float(v.zw)); }
"""
# Exponents differ by 112; below 2 ** -14 float16 counts in steps of 2 ** -24, which is the last bit of 0.5.
_BY_BITS = """fn from_halves(v: vec2u) -> vec4f {
    let h = vec4u(v.x, v.x >> 16u, v.y, v.y >> 16u);
    let m = (h & vec4u(0x7fffu)) << vec4u(13u);
    let small = bitcast<vec4f>(m + vec4u(0x38800000u)) - vec4f(6.103515625e-5);
    let large = bitcast<vec4f>(m + select(vec4u(0x38000000u), vec4u(0x70000000u), m >= vec4u(0x0f800000u)));
    let sign = (h & vec4u(0x8000u)) << vec4u(16u);
    return bitcast<vec4f>(bitcast<vec4u>(select(large, small, m < vec4u(0x00800000u))) | sign);
}
fn to_halves(v: vec4f) -> vec2u {
    let b = bitcast<vec4u>(v);
    let m = b & vec4u(0x7fffffffu);
    let most = select(vec4u(0x7c00u), vec4u(0x7e00u), m > vec4u(0x7f800000u));
    let large = min((m - vec4u(0x38000000u)) >> vec4u(13u), most);
    let small = bitcast<vec4u>(abs(v) + vec4f(0.5)) - vec4u(0x3f000000u);
    let h = select(large, small, m < vec4u(0x38800000u)) | ((b >> vec4u(16u)) & vec4u(0x8000u));
    return h.xz | (h.yw << vec2u(16u));
}
fn from_half(v: u32, i: u32) -> f32 {
    let h = v >> (i % 2u * 16u);
    let m = (h & 0x7fffu) << 13u;
    let small = bitcast<f32>(m + 0x38800000u) - 6.103515625e-5;
    let large = bitcast<f32>(m + select(0x38000000u, 0x70000000u, m >= 0x0f800000u));
    return bitcast<f32>(bitcast<u32>(select(large, small, m < 0x00800000u)) | ((h & 0x8000u) << 16u));
}
"""


def conversions(cpu: bool) -> str:
    """The functions that rewritten WGSL calls, for a software adapter or a real GPU."""
    return _BY_BITS if cpu else _BUILT_IN


def halved(kind: str, written: bool, cpu: bool) -> str:
    """What a buffer of f16 is declared to hold in the place of f32 or vec4<f32>.

    Args:
        kind: "f32", "vec4f" or "vec4<f32>".
        written: the shader writes it.
        cpu: for a software adapter.
    """
    if kind in _FOURS:
        return "vec2u"
    return "u32" if cpu and not written else "f16"


def admitted(code: str, name: str, kind: str) -> bool:
    """Whether a binding's buffer may hold f16: its elements are f32, and they are loaded and stored, no more."""
    return kind in ("f32", *_FOURS) and not re.search(rf"(?<![\w.]){name}\b(?!\s*\[)", code)


def rewritten(code: str, kinds: Mapping[str, str]) -> str:
    """WGSL for what its bindings are declared as: `kinds` has what `halved` says for each one that holds f16."""
    if not kinds:
        return code
    names = re.compile(rf"(?<![\w.])({'|'.join(kinds)})\s*\[")
    made, done = [], 0
    while (found := names.search(code, done)) is not None:
        name, kind = found[1], kinds[found[1]]
        made.append(code[done : found.start()])
        done = _closed(code, found.end() - 1)
        at = rewritten(code[found.end() : done - 1], kinds)
        store = _STORE.match(code, done)
        if store is None:
            made.append(_LOAD[kind].format(name=name, at=at))
        else:
            done = code.index(";", store.end())
            value = rewritten(code[store.end() : done].strip(), kinds)
            made.append(_KEEP[kind].format(name=name, at=at, value=value))
    return "".join((*made, code[done:]))


def _closed(code: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth == 0:
            return at + 1
    raise ValueError(f"a bracket is not closed in {code!r}")
