from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidInput
from trionnx.gpu.seam import TensorInfo
from trionnx.scheduler.feeds import check_feeds, check_names, is_slow, pack


def info(dtype: str = "float32", shape: tuple[int | str | None, ...] | None = (1, 3, "h", None)) -> TensorInfo:
    return TensorInfo("x", f"tensor({dtype})", shape, np.dtype(dtype))


def check(value: Any, declared: TensorInfo | None = None) -> Any:
    return check_feeds([declared or info()], [], {"x": value})["x"]


def test_what_fits_is_passed_on_without_a_copy() -> None:
    array = np.zeros((1, 3, 5, 7), np.float32)
    assert check(array) is array
    assert pack({"x": array})["x"] is array


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.zeros((1, 3, 5, 7)), "float64 of shape (1, 3, 5, 7)"),
        (np.zeros((1, 3, 5, 7), ">f4"), ">f4 of shape (1, 3, 5, 7)"),
        (np.zeros((3, 5, 7), np.float32), "float32 of shape (3, 5, 7)"),
        (np.zeros((1, 4, 5, 7), np.float32), "float32 of shape (1, 4, 5, 7)"),
        (np.float32(1), "float32 of shape ()"),
        (None, "object of shape ()"),
        ("text", "<U4 of shape ()"),
        ([[1.0], [1.0, 2.0]], "list that makes no array"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(value: Any, got: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(value)
    assert caught.value.name == "x"
    assert caught.value.expected == "float32 of shape (1, 3, h, ?)"
    assert caught.value.got.startswith(got)
    assert str(caught.value).startswith("'x': expected float32 of shape (1, 3, h, ?), got ")


def test_one_symbolic_name_may_have_two_sizes() -> None:
    infos = [TensorInfo(name, "tensor(float)", ("n",), np.dtype(np.float32)) for name in ("a", "b")]
    feeds = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
    assert check_feeds(infos, [], feeds) == feeds


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2], "float32"),
        ([1.5, 2], "float32"),
        ([1, 255], "uint8"),
        ([True, False], "bool"),
        ([], "float32"),
        ((1, 2), "int64"),
        (["a", "bcd"], "O"),
    ],
)
def test_lists_of_python_numbers_become_arrays_of_the_declared_dtype(value: Any, dtype: str) -> None:
    array = check(value, info(dtype, ("n",)))
    assert array.tolist() == list(value)
    assert array.dtype.kind in "U" if dtype == "O" else array.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1.5], "int64"),
        ([300], "uint8"),
        ([-1], "uint8"),
        ([2**40], "int32"),
        ([1], "bool"),
        ([True], "float32"),
        (["1"], "float32"),
        ([1j], "float32"),
        ([2**70], "int64"),
        ([None], "O"),
    ],
)
def test_lists_that_would_lose_something_are_refused(value: Any, dtype: str) -> None:
    with pytest.raises(InvalidInput, match="'x': expected "):
        check(value, info(dtype, ("n",)))


def test_a_number_that_is_out_of_range_is_told() -> None:
    with pytest.raises(InvalidInput, match=r"got int64 of shape \(2\) with values 1 to 300"):
        check([1, 300], info("uint8", ("n",)))


def test_values_are_told_only_where_they_are_the_fault() -> None:
    with pytest.raises(InvalidInput) as caught:
        check(np.zeros(2, np.int32), info("int64", ("n",)))
    assert caught.value.got == "int32 of shape (2)"
    with pytest.raises(InvalidInput) as caught:
        check([1, 2, 3], info("int64", (2,)))
    assert caught.value.got == "int64 of shape (3)"


def test_scalars() -> None:
    array = check(3, info("int64", ()))
    assert array.shape == ()
    assert pack({"x": np.float32(2) + np.zeros((), np.float32)})["x"].shape == ()


def test_strings_are_taken_in_each_of_numpys_ways() -> None:
    declared = TensorInfo("x", "tensor(string)", ("n",), np.dtype(object))
    for value in (np.array(["a", "b"]), np.array(["a", "b"], object), ["a", "b"]):
        assert check(value, declared).tolist() == ["a", "b"]
    with pytest.raises(InvalidInput, match=r"expected tensor\(string\) of shape \(n\), got object"):
        check(np.array(["a", 1], object), declared)


def test_no_tensor_is_passed_through() -> None:
    value = [{"a": 1}]
    assert check(value, TensorInfo("x", "seq(map(string,float))", None, None)) is value


def test_an_unknown_rank_takes_any() -> None:
    assert check(np.zeros((2, 2), np.float32), info(shape=None)).shape == (2, 2)
    with pytest.raises(InvalidInput, match="expected float32 of any shape, got float64"):
        check(np.zeros(2), info(shape=None))


def test_names() -> None:
    inputs, overridable = [info(shape=None)], [TensorInfo("w", "tensor(float)", None, np.dtype(np.float32))]
    array = np.zeros(2, np.float32)
    assert set(check_feeds(inputs, overridable, {"x": array, "w": array})) == {"x", "w"}
    with pytest.raises(InvalidInput, match="'z': expected an input of the model: 'x', 'w', got"):
        check_feeds(inputs, overridable, {"x": array, "z": array})
    with pytest.raises(InvalidInput, match="'x': expected float32 of any shape, got nothing"):
        check_feeds(inputs, overridable, {"w": array})
    with pytest.raises(TypeError, match="input_feed is a dict of arrays by name, not ndarray"):
        check_feeds(inputs, overridable, array)  # type: ignore[arg-type]


def test_output_names() -> None:
    outputs = [TensorInfo(name, "tensor(float)", None, np.dtype(np.float32)) for name in ("a", "b")]
    assert check_names(outputs, None) == ("a", "b")
    assert check_names(outputs, []) == ("a", "b")
    assert check_names(outputs, ["b", "b"]) == ("b", "b")
    with pytest.raises(InvalidInput, match="'c': expected an output of the model: 'a', 'b'"):
        check_names(outputs, ["a", "c"])
    with pytest.raises(TypeError, match="not the string 'a'"):
        check_names(outputs, "a")
    with pytest.raises(TypeError, match="an output name is a string, not int"):
        check_names(outputs, [0])  # type: ignore[list-item]


def test_pack_makes_contiguous_and_tells_when_that_is_much_work() -> None:
    turned = np.zeros((1024, 1024), np.float32).T
    assert is_slow({"x": turned})
    assert not is_slow({"x": turned[:4, :4], "y": pack({"x": turned})["x"]})
    assert pack({"x": turned})["x"].flags.c_contiguous
