"""ONNX Runtime's errors, told apart by whose fault they are.

ONNX Runtime tells most faults by text alone: this file knows those texts.
"""

from __future__ import annotations

import re

from ..errors import InvalidData, InvalidInput, InvalidModel, OutOfDeviceMemory, UnsupportedOperator
from ..graph.model import Model

__all__ = ["load_fault", "run_fault"]

_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_NO_KERNEL = re.compile(r"Could not find an implementation for (?P<op>[\w.]+)\(\d+\) node with name '(?P<node>[^']*)'")
_NO_OP = re.compile(r'In Node, \("(?P<node>[^"]*)", .*No Op registered for (?P<op>\w+) with domain_version')
_NO_SCHEMA = re.compile(r"(?P<domain>[\w.]*)[:.](?P<op>\w+)\(-?\d+\) is not a registered function/op")
_RUNNING = re.compile(r"while running (?P<op>\w+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.DOTALL)
_NAME = re.compile(r"(?:for input: |output name:|inputs \(\[')(?P<name>[^\s']+)")
_MEMORY = re.compile(r"Failed to allocate memory|bad_alloc|Available memory of", re.IGNORECASE)


def load_fault(error: Exception, model: Model, label: str) -> Exception:
    """What an error of ``InferenceSession(...)`` is here, on a model that could be read.

    Args:
        error: what ONNX Runtime raised.
        model: the model, to look nodes up.
        label: what to call it in a message.
    """
    text = _text(error)
    if _MEMORY.search(text):
        return OutOfDeviceMemory(_line(text))
    if found := _NO_KERNEL.search(text):
        return _unsupported(found["op"], "", found["node"], model, "ONNX Runtime's CPU provider has no kernel for it")
    if found := _NO_OP.search(text):
        return _unsupported(found["op"], "", found["node"], model, "ONNX Runtime does not know it")
    if found := _NO_SCHEMA.search(text):
        domain = "" if found["domain"] == "ai.onnx" else found["domain"]
        return _unsupported(found["op"], domain, "", model, "ONNX Runtime does not know it")
    return InvalidModel(f"{label}: {_line(text)}")


def run_fault(error: Exception) -> Exception:
    """What an error of ``InferenceSession.run(...)`` is here."""
    text = _text(error)
    if _MEMORY.search(text):
        return OutOfDeviceMemory(_line(text))
    if found := _RUNNING.search(text):
        return InvalidData(found["node"] or found["op"], _line(found["why"]))
    if ": INVALID_ARGUMENT :" in str(error) or isinstance(error, ValueError | RuntimeError):
        name = _NAME.search(text)
        return InvalidInput(name["name"] if name else "", "what the model declares", _line(text))
    return error


def _unsupported(op: str, domain: str, node: str, model: Model, reason: str) -> UnsupportedOperator:
    if not node:
        node = next((n.name for n in model.graph.nodes if n.op == op and n.domain == domain), "")
    return UnsupportedOperator(op, domain, model.opsets.get(domain, 0), node, reason)


def _text(error: Exception) -> str:
    return _PREFIX.sub("", str(error)).strip()


def _line(text: str) -> str:
    """The text without the position in ONNX Runtime's source that may come first."""
    if text.startswith("/"):
        _, found, rest = text.partition(" was false. ")
        text = rest if found else text.rpartition(") ")[2]
    return " ".join(text.split()) or "ONNX Runtime gives no reason"
