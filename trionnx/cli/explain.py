"""``trionnx explain``: where each node of a model runs, and why."""

from __future__ import annotations

import argparse
from collections import Counter

import trio

from ..gpu.graph.read import read_model
from ..gpu.seam import Explained
from ..gpu.shapes import check_shapes
from ..scheduler import open_scheduler
from .console import bar, output, table
from .inputs import describe, parse_shapes, shape_of

__all__ = ["main"]


def main(arguments: argparse.Namespace) -> int:
    """Print where each node runs."""
    given = parse_shapes(arguments.shape)
    model = read_model(arguments.model, optimise=False)
    check_shapes((*model.inputs, *model.overridable), given)
    shapes = {info.name: shape_of(info, given) for info in model.inputs}
    free = [info for info in model.inputs if shapes[info.name] is None]
    known = {name: shape for name, shape in shapes.items() if shape is not None} | given
    place, rows = trio.run(_explain, arguments, None if free else known)

    console = output()
    lines = table("node", "operator", "where", "why")
    for row in rows:
        lines.add_row(row.node, row.op, row.where, row.why)
    console.print(lines)
    counts = Counter(row.where for row in rows)
    console.print(f"{len(rows)} nodes: {', '.join(f'{count} {where}' for where, count in counts.most_common())}")
    console.print(place)
    for info in free:
        console.print(f"input {info.name} is {describe(info)}: give --shape {info.name}=... to see its plan")
    return 0


async def _explain(
    arguments: argparse.Namespace, shapes: dict[str, tuple[int, ...]] | None
) -> tuple[str, list[Explained]]:
    with bar() as progress:
        task = progress.add_task("load", total=None)

        def on_progress(phase: str, done: int, total: int) -> None:
            progress.update(task, description=phase, completed=done, total=total or None)

        async with open_scheduler(backend=arguments.backend or "auto", adapter=arguments.adapter) as scheduler:
            session = await scheduler.load(arguments.model, input_shapes=shapes, on_progress=on_progress)
            return f"{session.backend}: {session.adapter}", list(session.explain())
