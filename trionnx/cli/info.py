"""``trionnx info``: what a model says of itself. Needs no device."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator

from ..gpu.graph.model import Graph, Node
from ..gpu.graph.read import read_model
from .console import output, table
from .inputs import describe

__all__ = ["main"]


def main(arguments: argparse.Namespace) -> int:
    """Print what a model says of itself."""
    model = read_model(arguments.model, optimise=False)
    console, about = output(), model.metadata
    facts = table("model", arguments.model)
    facts.add_row("size", f"{os.path.getsize(arguments.model):,} bytes")
    facts.add_row("producer", about.producer_name or "(not said)")
    facts.add_row("graph", about.graph_name or "(no name)")
    if about.description:
        facts.add_row("description", " ".join(about.description.split()))
    if about.domain or about.version:
        facts.add_row("domain, version", f"{about.domain or '(none)'}, {about.version}")
    facts.add_row("IR version", str(model.ir_version))
    facts.add_row("opsets", ", ".join(f"{domain or 'ai.onnx'} {v}" for domain, v in sorted(model.opsets.items())))
    for key, value in about.custom_metadata_map.items():
        facts.add_row(f"metadata {key}", _short(" ".join(value.split())))
    console.print(facts)
    console.print()

    values = table("", "name", "type and shape")
    for kind, infos in (("input", model.inputs), ("may be fed", model.overridable), ("output", model.outputs)):
        for info in infos:
            values.add_row(kind, info.name, describe(info))
    console.print(values)
    console.print()

    counts = Counter((node.domain, node.op) for node in _nodes(model.graph))
    nodes = table("nodes", "operator")
    for (domain, op), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        nodes.add_row(str(count), f"{domain}.{op}" if domain else op)
    nodes.add_row(str(sum(counts.values())), "together")
    console.print(nodes)
    return 0


def _nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for nested in node.graphs():
            yield from _nodes(nested)


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
