"""What the process that tries drivers shares with this one."""

import subprocess
import sys
from typing import Any

import pytest
from cffi import FFI

from trionnx.gpu.device.probe_child import quicken

HEADER = """
typedef struct Thing Thing;
typedef enum { RED, GREEN = 5 } Colour;
typedef struct { const char * data; size_t length; } View;
typedef void (* Told)(Colour colour, View view, void * one);
struct Thing { View name; Colour colours[3]; Told told; union { int32_t i; float f; } value; };
struct Other { Thing * things; };
"""
NAMES = [
    *("Thing", "Thing *", "struct Thing *", "Thing[4]", "Thing * *", "Colour", "Colour *", "View const *", "Told"),
    *("void (*)(Colour, View, void *)", "struct Other *", "uint32_t[1]", "char []", "unsigned int", "double (*)[2]"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_types_mean_the_same(name):
    ffi: Any = FFI()
    ffi.cdef(HEADER)
    plain = [ffi.typeof(known) for known in ("Thing *", "struct Other *", "Told")]
    quicken(ffi)
    quicken(ffi)
    slow = FFI()
    slow.cdef(HEADER)
    made, right = ffi.typeof(name), slow.typeof(name)
    assert (made.cname, made.kind) == (right.cname, right.kind)
    if name != "char []":
        assert ffi.sizeof(name) == slow.sizeof(name)
    assert [ffi.typeof(known) for known in ("Thing *", "struct Other *", "Told")] == plain


def test_what_is_no_type_is_refused_as_before():
    ffi, slow = FFI(), FFI()
    for one in (ffi, slow):
        one.cdef(HEADER)
    quicken(ffi)
    for name in ("Nothing *", "struct (", ""):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            slow.typeof(name)
        with pytest.raises(expected.type):
            ffi.typeof(name)
    assert ffi.typeof("Thing *").item is ffi.typeof("Thing")


def test_few_names_are_read_at_a_time():
    ffi: Any = FFI()
    ffi.cdef(HEADER)
    quicken(ffi)
    parser, declared = ffi._parser, []
    parse = parser._parse

    def watched(text):
        declared.append(len(parser._declarations))
        return parse(text)

    parser._parse = watched
    ffi.typeof("Colour *")
    ffi.typeof("Colour *")
    assert declared == [1]


def test_an_ffi_of_another_make_stays_as_it_is():
    class Other:
        pass

    quicken(Other())
    ffi: Any = FFI()
    ffi._parser._declarations = None
    before = ffi._parser.parse_type
    quicken(ffi)
    assert ffi._parser.parse_type == before


def test_garbage_is_collected_again_after_the_import():
    code = (
        "import gc, sys\n"
        "from trionnx.gpu.device import probe_child\n"
        "if sys.argv[1] == 'off': gc.disable()\n"
        "probe_child._import_native()\n"
        "print(gc.isenabled(), 'wgpu.backends.wgpu_native' in sys.modules)"
    )
    for wish, wanted in (("on", "True True"), ("off", "False True")):
        done = subprocess.run([sys.executable, "-c", code, wish], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == wanted
