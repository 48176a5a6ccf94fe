"""The process that tries the drivers, so that it is this process that they crash or hang.

Run by its path, with the seconds that it may live: ``python -P probe_child.py 10``. It imports nothing of this
package, to be up fast. What it says on standard output is one JSON object a line:

    {"up": true}            its imports are done
    {"adapters": [...]}     what the drivers list, as `found` gives it; next to come are orders
    {"ok": true}            one adapter has computed, and computed right; or else
    {"ok": false, "wrong": whether it computed, but other numbers, "reason": text}

An order on standard input is the index of the adapter to try, a line; it ends where standard input ends.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import re
import sys
from typing import Any

__all__ = ["NEEDED", "features", "found"]

NEEDED = "immediates"
COUNT, BASE = 256, 3
STORAGE, COPY_SRC = 0x80, 0x4
COMPUTE = 0x4
WGSL = """
struct Base { value: u32 }
var<immediate> base: Base;
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
    var sum = 0.0;
    for (var i = 0u; i <= id.x % 7u; i++) {
        sum += x[(id.x + i) % arrayLength(&x)];
    }
    y[id.x] = max(sum, 0.5) * f32(base.value + id.x);
}
"""


def quicken(ffi: Any) -> None:
    """Have cffi read the name of a C type without all types that it knows beside it: 0.5 ms for each, not 13.

    Before it reads a name it declares to its parser, by text, all types that there are; those are enough that the
    name is made of. Where cffi is not as expected, it stays as slow as it is.
    """
    parser: Any = getattr(ffi, "_parser", None)
    read = getattr(parser, "parse_type", None)
    if read is None or "parse_type" in vars(parser) or not isinstance(getattr(parser, "_declarations", None), dict):
        return

    def parse_type(name: str) -> Any:
        known = parser._declarations
        words = dict.fromkeys(re.findall(r"\w+", name))
        keys = [f"{kind} {word}" for word in words for kind in ("typedef", "struct", "union", "enum")]
        parser._declarations = {key: known[key] for key in keys if key in known}
        try:
            return read(name)
        finally:
            known.update(parser._declarations)
            parser._declarations = known

    parser.parse_type = parse_type


def _import_native() -> Any:
    """The native part of wgpu. It parses a large header: a quarter of that would go into looks for garbage."""
    collected = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module("wgpu.backends.wgpu_native")
    finally:
        if collected:
            gc.enable()


def found() -> list[tuple[dict[str, Any], Any]]:
    """The adapters that can run compute shaders as this package needs them: facts of each, and wgpu's object.

    Opens every driver that is installed, and lasts as long as they do.
    """
    import wgpu

    quicken(_import_native().ffi)
    adapters: list[tuple[dict[str, Any], Any]] = []
    for native in wgpu.gpu.enumerate_adapters_sync():
        info = native.info
        if info["backend_type"] == "OpenGL" or NEEDED not in native.features:
            continue
        pci = f"{info['vendor_id']:x}:{info['device_id']:x}"
        facts = {
            "index": len(adapters),
            "name": info["device"] or info["description"] or "unnamed adapter",
            "driver": info["description"] or info["vendor"],
            "backend": info["backend_type"],
            "kind": "software" if info["adapter_type"] == "CPU" else "hardware",
            "identity": f"{info['device']}|{info['description']}|{pci}|{len(adapters)}",
        }
        adapters.append((facts, native))
    return adapters


def features(native: Any, f16: bool = False) -> list[str]:
    """The features to ask the device for: what is needed, and what helps where it is offered."""
    helpful = (
        *("timestamp-query", "timestamp-query-inside-encoders", "timestamp-query-inside-passes"),
        "subgroup",
        *["shader-f16"] * f16,
    )
    return [NEEDED, *(name for name in helpful if name in native.features)]


def expected(x: list[float]) -> list[float]:
    """What the shader computes; every number on the way is held by a float32 as it is."""
    sums = [sum(x[(n + i) % COUNT] for i in range(n % 7 + 1)) for n in range(COUNT)]
    return [max(value, 0.5) * (BASE + n) for n, value in enumerate(sums)]


def attempt(native: Any) -> dict[str, Any]:
    """Make a device, compile, run one dispatch, and compare what comes back."""
    import struct

    device = native.request_device_sync(required_features=features(native), required_limits={"max-immediate-size": 16})
    x = [n * 0.25 - 8 for n in range(COUNT)]
    source = device.create_buffer_with_data(data=struct.pack(f"{COUNT}f", *x), usage=STORAGE)
    target = device.create_buffer(size=4 * COUNT, usage=STORAGE | COPY_SRC)
    kinds = ["read-only-storage", "storage"]
    group_layout = device.create_bind_group_layout(
        entries=[{"binding": n, "visibility": COMPUTE, "buffer": {"type": kind}} for n, kind in enumerate(kinds)]
    )
    layout = device.create_pipeline_layout(bind_group_layouts=[group_layout], immediate_size=4)
    module = device.create_shader_module(code=WGSL)
    pipeline = device.create_compute_pipeline(layout=layout, compute={"module": module, "entry_point": "main"})
    group = device.create_bind_group(
        layout=group_layout,
        entries=[{"binding": n, "resource": {"buffer": b}} for n, b in enumerate((source, target))],
    )
    encoder = device.create_command_encoder()
    writer = encoder.begin_compute_pass()
    writer.set_pipeline(pipeline)
    writer.set_bind_group(0, group)
    writer.set_immediates(0, struct.pack("I", BASE), 0, 4)
    writer.dispatch_workgroups(COUNT // 64)
    writer.end()
    device.queue.submit([encoder.finish()])
    y = list(struct.unpack(f"{COUNT}f", device.queue.read_buffer(target)))
    wrong = sum(a != b for a, b in zip(y, expected(x), strict=True))
    if wrong:
        return {"ok": False, "wrong": True, "reason": f"{wrong} of {COUNT} numbers that it computed are wrong"}
    return {"ok": True}


def main() -> None:
    """Answer orders."""
    # Ends this process also while a driver hangs in it, and when who started it has died.
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what drivers print is no answer

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def failed(error: Exception) -> None:
        text = " ".join(str(error).split())
        say(ok=False, wrong=False, reason=f"{type(error).__name__}: {text}"[:500])

    try:
        _import_native()
        say(up=True)
        adapters = found()
    except Exception as error:
        return failed(error)
    say(adapters=[facts for facts, _ in adapters])
    for order in sys.stdin:
        try:
            say(**attempt(adapters[int(order)][1]))
        except Exception as error:
            failed(error)


if __name__ == "__main__":
    main()
    os._exit(0)  # with no call into a driver on the way
