"""Operators through the real engine: many one-node cases in one model, each against an oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import trionnx.gpu.device.device as device_module
from trionnx.gpu.device import adapters
from trionnx.gpu.graph import placement

Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """One node. `want` None: ONNX Runtime's CPU provider says."""

    op: str
    inputs: Sequence[Array | None]
    attrs: dict[str, Any]
    known: tuple[int, ...]
    outputs: int
    want: list[Array] | None
    tol: float
    domain: str = ""

    def names(self, number: int) -> tuple[list[str], list[str]]:
        inputs = ["" if x is None else f"i{number}_{k}" for k, x in enumerate(self.inputs)]
        return inputs, [f"o{number}_{k}" for k in range(self.outputs)]

    def __str__(self) -> str:
        shapes = ", ".join("-" if x is None else f"{x.dtype}{list(x.shape)}" for x in self.inputs)
        return f"{self.op}({shapes}) {self.attrs}"


@dataclass
class Cases:
    """Cases of one test; `check` runs them all in one model and compares."""

    open_model: Callable[..., Any]
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        op: str,
        *inputs: Any,
        known: tuple[int, ...] = (),
        fed: tuple[int, ...] = (),
        outputs: int = 1,
        want: Any = None,
        tol: float = 2e-6,
        domain: str = "",
        **attrs: Any,
    ) -> None:
        """Add a case: int64 inputs are known (initialisers) unless `fed`, others where `known` says."""
        arrays = [None if x is None else np.asarray(x) for x in inputs]
        shapes = {k for k, x in enumerate(arrays) if x is not None and x.dtype == np.int64}
        known = tuple({*known, *shapes} - set(fed))
        wanted = None if want is None else [np.asarray(w) for w in (want if isinstance(want, list) else [want])]
        self.cases.append(Case(op, arrays, attrs, known, outputs, wanted, tol, domain))

    def model(self, cases: Sequence[tuple[int, Case]], opset: int) -> onnx.ModelProto:
        nodes, inputs, outputs, constants = [], [], [], []
        for number, case in cases:
            names, made = case.names(number)
            nodes.append(helper.make_node(case.op, names, made, f"case {number}", domain=case.domain, **case.attrs))
            outputs += [onnx.ValueInfoProto(name=name) for name in made]
            for k, (name, x) in enumerate(zip(names, case.inputs, strict=True)):
                if x is None:
                    continue
                if k in case.known:
                    constants.append(onnx.numpy_helper.from_array(x, name))
                else:
                    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
                    inputs.append(helper.make_tensor_value_info(name, kind, x.shape))
        graph = helper.make_graph(nodes, "cases", inputs, outputs, constants)
        domains = {case.domain for _, case in cases} - {""}
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)

    def check(self, opset: int = 18, *, host: Sequence[str] = ()) -> None:
        """Run and compare. `host`: operators that may run as host steps."""
        numbered = list(enumerate(self.cases))
        feeds = {
            name: x
            for number, case in numbered
            for k, (name, x) in enumerate(zip(case.names(number)[0], case.inputs, strict=True))
            if x is not None and k not in case.known
        }
        driver = self.open_model(self.model(numbered, opset))
        values = iter(driver.run(feeds))
        wrong = [n for n in driver.engine.explain() if n.where == "host" and n.op not in host]
        assert not wrong
        for number, case in numbered:
            got = [np.asarray(next(values)) for _ in range(case.outputs)]
            wanted = case.want if case.want is not None else self._oracle(number, case, opset, feeds)
            for mine, right in zip(got, wanted, strict=True):
                _compare(mine, right, case)

    def _oracle(self, number: int, case: Case, opset: int, feeds: dict[str, Array]) -> list[Array]:
        model = self.model([(number, case)], opset)
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [np.asarray(x) for x in session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})]


def _compare(got: Array, want: Array, case: Case) -> None:
    assert got.shape == want.shape, f"{case}: shape {got.shape}, expected {want.shape}"
    if case.want is None:
        assert got.dtype == want.dtype, f"{case}: {got.dtype}, expected {want.dtype}"
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want, err_msg=str(case))
        return
    finite = want[np.isfinite(want)]
    scale = float(np.abs(finite).max(initial=0)) or 1.0
    np.testing.assert_allclose(got, want, rtol=0, atol=case.tol * scale, err_msg=str(case))


@pytest.fixture
def cases(open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Cases:
    """A collection of cases; see Cases. Small integers go to the GPU too."""
    monkeypatch.setattr(placement, "HOST_LIMIT", 0)
    return Cases(open_model)


@pytest.fixture(params=["software", "hardware"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels as software adapters get them, and as real GPUs do."""
    return force(request.param, monkeypatch)


@pytest.fixture(params=["software", "narrow", "no subgroups", "hardware"])
def product_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, and software adapters with subgroups of four, and with none that are known."""
    return force(request.param, monkeypatch)


def force(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have devices say that they are of another kind."""
    real = adapters.target_of
    if name == "hardware":
        monkeypatch.setattr(device_module, "target_of", lambda info: replace(real(info), cpu=False))
    elif name in ("narrow", "no subgroups"):
        # Where a subgroup has more than four, four invocations are a part of one: kernels hold there, too.
        monkeypatch.setattr(device_module, "measure_subgroup", lambda device: 4 if name == "narrow" else 0)
    return name


@pytest.fixture
def by_reference() -> Callable[..., Any]:
    """`by_reference(op, arrays, opset, outputs=1, **attrs)`: what onnx.reference makes of a node, as a list."""

    def evaluate(op: str, arrays: Sequence[Array | None], opset: int, outputs: int = 1, **attrs: Any) -> list[Array]:
        names = ["" if a is None else f"i{k}" for k, a in enumerate(arrays)]
        made = [f"o{k}" for k in range(outputs)]
        given = [helper.make_tensor_value_info(n, 1, None) for n in names if n]
        wanted = [helper.make_tensor_value_info(n, 1, None) for n in made]
        graph = helper.make_graph([helper.make_node(op, names, made, **attrs)], "g", given, wanted)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
        return [np.asarray(made) for made in ReferenceEvaluator(model).run(None, feeds)]

    return evaluate
