"""Which operators have a kernel: `@op` puts a class in the table, `find` looks one up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

from ..errors import InvalidModel

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.model import Node
    from ..graph.tensor import Tensor

__all__ = ["NoKernel", "Operator", "TooLarge", "find", "op"]


class NoKernel(Exception):
    """An operator's kernel does not do this case: it becomes a host step. The text says why."""


class TooLarge(NoKernel):
    """A tensor is larger than what the adapter lets a shader see: no other kernel would do either."""


class Operator:
    """An operator's kernel. Fields are ONNX's attributes with ONNX's defaults.

    A node's attributes that a class has no field for are ignored; a field without default is a
    required attribute.
    """

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor | tuple[Tensor | None, ...]:
        """Add steps to the plan and return the outputs (one, or one per output).

        Order: first ask for values (`plan.value`, which may end the block) and refuse
        (`NoKernel`, `InvalidModel`, `InvalidInput`), then emit.

        Raises:
            NoKernel: this case has no kernel.
            InvalidModel: the node breaks ONNX's rules, whatever the values.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, node: Node) -> Operator:
        """Make the operator of a node from its attributes. Raises InvalidModel where a required one is missing."""
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        for field in fields:
            if {field.default, field.default_factory} == {dataclasses.MISSING} and field.name not in node.attrs:
                raise InvalidModel(f"node {node.name!r} ({node.op}): its attribute {field.name!r} is missing")
        names = {field.name for field in fields}
        return cls(**{name: value for name, value in node.attrs.items() if name in names})


_TABLE: dict[tuple[str, str], list[tuple[int, type[Operator]]]] = {}
T = TypeVar("T", bound=type[Operator])


@dataclass_transform(kw_only_default=True)
def op(name: str, *, since: int = 1, domain: str = "") -> Callable[[T], T]:
    """Register a kernel for an operator from an opset version on, up to the next registered one."""

    def register(cls: T) -> T:
        made: Any = cls if "__dataclass_fields__" in cls.__dict__ else dataclasses.dataclass(kw_only=True)(cls)
        versions = _TABLE.setdefault((domain, name), [])
        versions.append((since, made))
        versions.sort(key=lambda version: version[0])
        return made  # type: ignore[no-any-return]

    return register


def find(name: str, domain: str, opset: int) -> type[Operator] | None:
    """The kernel of an operator at an opset version; None where there is none."""
    from . import families  # noqa: F401  (fills the table)

    found = None
    for since, cls in _TABLE.get((domain, name), ()):
        if since <= opset:
            found = cls
    return found
