"""docs/adding-an-operator.md: its operators are registered and run as they stand, and what it names is there."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import trio

import trionnx
from trionnx.gpu.errors import InvalidModel, UnsupportedOperator
from trionnx.gpu.graph.lowering import Lowering
from trionnx.gpu.graph.target import CPU_LIKE
from trionnx.gpu.kernels import registry

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/adding-an-operator.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KERNELS = runpy.run_path(str(ROOT / "tests/gpu/kernels/conftest.py"))
ENGINES = runpy.run_path(str(ROOT / "tests/gpu/conftest.py"))


@pytest.fixture(scope="module", autouse=True)
def page() -> Iterator[dict[str, Any]]:
    """What the page's blocks define, one after another; its operators are in the table meanwhile."""
    registry.find("Add", "", 18)
    module = sys.modules["adding_an_operator"] = ModuleType("adding_an_operator")
    for block in BLOCKS:
        exec(compile(block, "adding-an-operator.md", "exec", dont_inherit=True), vars(module))
    yield vars(module)
    del sys.modules["adding_an_operator"]
    for key in [key for key in registry._TABLE if key[0] == "org.example"]:
        del registry._TABLE[key]


def run(body: str, feeds: dict[str, Any], **load: Any) -> Any:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18, "org.example" : 1]>\n{body}')

    async def main() -> Any:
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(model, **load)
            outputs = await session.run(None, feeds)
            return outputs, {e.op: e for e in session.explain()}

    return trio.run(main)


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 150


def test_its_operators_run_on_the_gpu_and_fuse():
    x = np.random.default_rng(0).standard_normal((3, 5, 9)).astype(np.float32)
    (y,), explained = run(
        """g (float[a,b,9] x) => (float[a,b,8] y) {
            s = org.example.Standardise<epsilon = 0.01>(x) d = org.example.Differences(s)
            y = org.example.Softlimit<sharpness = 0.5>(d)
        }""",
        {"x": x},
        allow_host_steps=False,
    )
    wide = x.astype(np.float64)
    wide = np.diff((wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 0.01))
    np.testing.assert_allclose(y, wide / (1 + 0.5 * np.abs(wide)), atol=1e-6)
    assert {op: e.where for op, e in explained.items()} == {
        "Standardise": "gpu",
        "Differences": "gpu",
        "Softlimit": "gpu",
    }
    assert explained["Differences"].why == "kernel differences"


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 1), (1,)])
def test_its_operators_at_the_edges(shape):
    x = np.ones(shape, np.float32)
    (y,), _ = run(f"g (float{list(shape)} x) => (float[n] y) {{ y = org.example.Standardise(x) }}", {"x": x})
    np.testing.assert_array_equal(y, np.zeros(shape))
    if shape[-1]:
        (y,), _ = run(
            f"g (float{list(shape)} x) => (float[n] y) {{ y = org.example.Differences<axis = -1>(x) }}", {"x": x}
        )
        np.testing.assert_array_equal(y, np.zeros((*shape[:-1], shape[-1] - 1)))


def test_its_operators_take_integers_where_they_say_so():
    x = np.array([1, 4, 9, 2], np.int32)
    (y,), _ = run("g (int32[n] x) => (int32[m] y) { y = org.example.Differences(x) }", {"x": x})
    np.testing.assert_array_equal(y, [3, 5, -7])


def test_what_its_operators_refuse():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(InvalidModel, match=r"\(Differences\): axis 2 is out of range"):
        run("g (float[2,3] x) => (float[n] y) { y = org.example.Differences<axis = 2>(x) }", {"x": x})
    with pytest.raises(InvalidModel, match=r"\(Standardise\): expected at least one dimension, got a scalar"):
        run("g (float x) => (float[n] y) { y = org.example.Standardise(x) }", {"x": x[0, 0]})
    with pytest.raises(UnsupportedOperator, match="another axis than the last"):
        run(
            "g (float[2,3] x) => (float[n] y) { y = org.example.Differences<axis = 0>(x) }",
            {"x": x},
            allow_host_steps=False,
        )


def test_its_test_passes(page):
    drivers: list[Any] = []

    def open_model(source: Any, **load: Any) -> Any:
        drivers.append(ENGINES["Driver"](ENGINES["WebGpuEngine"](), source, **load))
        return drivers[-1]

    page["test_leaky_relu"](KERNELS["Cases"](open_model))
    assert drivers[0].runs == 1
    drivers[0].close()


def test_what_it_names_is_there():
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    members = set(dir(Lowering(CPU_LIKE)))
    for name in re.findall(r"plan\.(\w+)", PAGE):
        assert name in members, name
    for path in re.findall(r"`((?:gpu|tests|docs)/[\w./]+)`", prose):
        if "FAMILY" not in path:
            assert (ROOT / path).exists(), path
    for family, name in re.findall(r"`(\w+)\.([A-Z]+_[A-Z]+)`", prose):
        assert f"\n{name} = " in (ROOT / f"gpu/kernels/{family}.py").read_text()
    for name, family in re.findall(r"`(\w+)` \((\w+)\.py\)", prose):
        assert f"\ndef {name}(" in (ROOT / f"gpu/kernels/{family}.py").read_text()


def test_the_tests_of_every_operator_are_found_by_its_name():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    words = set(re.findall(r"\w+", tests))
    names: dict[Callable[..., Any], set[str]] = {}
    for (_, name), versions in registry._TABLE.items():
        for _, cls in versions:
            names.setdefault(cls, set()).add(name)
    assert len(names) > 150
    assert not [sorted(known) for known in names.values() if not known & words]
