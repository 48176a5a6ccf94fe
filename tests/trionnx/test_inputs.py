from __future__ import annotations

import numpy as np
import pytest

from trionnx.cli import inputs
from trionnx.cli.inputs import UsageError, describe, draw, parse_shapes, shape_of
from trionnx.gpu.errors import InvalidInput
from trionnx.gpu.seam import TensorInfo


def info(name: str, kind: str, dtype: type | None, shape: tuple[int | str | None, ...] | None) -> TensorInfo:
    return TensorInfo(name, kind, shape, None if dtype is None else np.dtype(dtype))


X = info("x", "tensor(float)", np.float32, ("n", 3))


def test_parse_shapes() -> None:
    assert parse_shapes(["x=1,3,48", "a=b=2", "s="]) == {"x": (1, 3, 48), "a=b": (2,), "s": ()}


@pytest.mark.parametrize("word", ["x", "x=-1", "x=1,b", "x=1.5"])
def test_no_shapes(word: str) -> None:
    with pytest.raises(UsageError, match="expected NAME=SIZE"):
        parse_shapes([word])


def test_shape_of() -> None:
    assert shape_of(X, {"x": (2, 3)}) == (2, 3)
    assert shape_of(X, {}) is None
    assert shape_of(info("x", "tensor(float)", np.float32, (2, 3)), {}) == (2, 3)
    assert shape_of(info("x", "tensor(float)", np.float32, None), {}) is None


def test_draw() -> None:
    infos = [
        X,
        info("i", "tensor(int64)", np.int64, (50,)),
        info("b", "tensor(bool)", np.bool_, (50,)),
        info("h", "tensor(float16)", np.float16, ()),
    ]
    arrays = draw(infos, {"x": (4, 3)}, 0)
    assert {name: (a.dtype, a.shape) for name, a in arrays.items()} == {
        "x": (np.float32, (4, 3)),
        "i": (np.int64, (50,)),
        "b": (np.bool_, (50,)),
        "h": (np.float16, ()),
    }
    assert arrays["i"].min() >= 0
    assert arrays["i"].max() <= 9
    assert set(arrays["b"]) == {True, False}
    np.testing.assert_array_equal(draw(infos[1:], {}, 0)["i"], arrays["i"])
    assert not np.array_equal(draw(infos[1:], {}, 1)["i"], arrays["i"])


def test_what_is_drawn_in_pieces_is_what_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"f": np.float32, "d": np.float64, "h": np.float16, "i": np.int8, "b": np.bool_}
    infos = [info(name, "tensor", dtype, (5, 7)) for name, dtype in kinds.items()]
    whole = draw(infos, {}, 3)
    monkeypatch.setattr(inputs, "DRAWN_AT_ONCE", 4)
    for name, array in draw(infos, {}, 3).items():
        np.testing.assert_array_equal(array, whole[name])


def test_what_does_not_fit_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_free_bytes", lambda: 200)
    assert draw([X], {"x": (8, 3)}, 0)["x"].nbytes == 96
    with pytest.raises(MemoryError, match="input 'x': 108 bytes, drawn at random, would take over half"):
        draw([X], {"x": (9, 3)}, 0)
    more = info("z", "tensor(float)", np.float32, (2,))
    with pytest.raises(MemoryError, match="input 'z': 8 bytes"):
        draw([X, more], {"x": (8, 3)}, 0)


def test_the_free_memory_is_known() -> None:
    assert inputs._free_bytes() > 1 << 20


def test_draw_refuses() -> None:
    with pytest.raises(UsageError, match="give its shape, such as --shape x=1,3"):
        draw([X], {}, 0)
    with pytest.raises(InvalidInput, match="an array from a file"):
        draw([info("s", "tensor(string)", object, (1,))], {}, 0)


def test_describe() -> None:
    assert describe(X) == "float32 [n, 3]"
    assert describe(info("x", "tensor(float)", np.float32, (None, 2))) == "float32 [?, 2]"
    assert describe(info("x", "tensor(string)", object, None)) == "string of any shape"
    assert describe(info("x", "seq(tensor(float))", None, None)) == "seq(tensor(float))"
