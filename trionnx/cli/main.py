"""What the words on the command line mean, and how each command ends."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

from .._interrupt import EXIT_CANCELLED
from .._interrupt import end as imports_are_over
from ..actors.probe import answer_bound
from ..gpu.errors import DeviceHung, DeviceLost, InvalidData, InvalidInput, InvalidModel, NoAdapter, UnsupportedOperator
from ..scheduler.backends import check_backend
from .console import quiet_drivers
from .inputs import UsageError

__all__ = ["EXIT_CANCELLED", "EXIT_FAILED", "EXIT_USAGE", "main"]

EXIT_FAILED, EXIT_USAGE = 1, 2

FAULTS = (
    DeviceHung,
    DeviceLost,
    InvalidData,
    InvalidInput,
    InvalidModel,
    MemoryError,
    NoAdapter,
    OSError,
    UnsupportedOperator,
)
"""Errors that are told in one line; anything else is a bug, and its traceback is wanted."""


class _Command(Protocol):
    def main(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after the program's name; default: the process's.

    Returns:
        0; 1 where it failed, 2 where it was called wrongly, 130 where it was cancelled.
    """
    arguments = _parse(argv)
    quiet_drivers()
    command = cast(_Command, importlib.import_module(f".{arguments.command}", __package__))
    try:
        imports_are_over()
        _check_environment(arguments)
        return command.main(arguments)
    except KeyboardInterrupt:
        return _say("cancelled", EXIT_CANCELLED)
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is None:
            return _say("cancelled", EXIT_CANCELLED)
        raise
    except UsageError as error:
        return _say(str(error), EXIT_USAGE)
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_FAILED
    except FAULTS as error:
        return _say(_line(error), EXIT_FAILED)


def _check_environment(arguments: argparse.Namespace) -> None:
    try:
        if getattr(arguments, "backend", None) is not None:
            check_backend(arguments.backend, "--backend")
        check_backend(os.environ.get("TRIONNX_BACKEND") or "auto", "TRIONNX_BACKEND")
        answer_bound()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _version() -> str:
    try:
        return version("trionnx")
    except PackageNotFoundError:
        return "(not installed)"


def _say(line: str, code: int) -> int:
    print(f"trionnx: {line}", file=sys.stderr)
    return code


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes no more positionals once it has seen an option behind MODEL.
    if rest and (arguments.command not in ("run", "profile") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.inputs = [*arguments.inputs, *rest]
    for option in ("backend", "adapter"):
        if getattr(arguments, option, None) == "":  # as an empty variable of the environment
            setattr(arguments, option, None)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trionnx", description="Run ONNX models on any GPU, and really stop them.")
    parser.add_argument("--version", action="version", version=f"trionnx {_version()}")
    names = "run | info | explain | profile | doctor | top"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)

    run = commands.add_parser("run", help="run a model once, or several times", description=(
        "Run a model. Inputs come from files; what no file gives is drawn at random, from --seed. "
        "Ctrl-C cancels, and says how far the run got."
    ))
    _feed_options(run)
    run.add_argument("--output", metavar="FILE.npz", help="save the outputs")
    run.add_argument("--repeat", type=_positive, default=1, metavar="N", help="run N times (default: 1)")
    _place_options(run)

    info = commands.add_parser("info", help="what a model says of itself", description="What a model says of itself.")
    info.add_argument("model", metavar="MODEL", type=_path, help="an .onnx file")

    explain = commands.add_parser("explain", help="where each node runs, and why", description=(
        "Where each node of a model runs, and why, for given shapes of its inputs."
    ))
    explain.add_argument("model", metavar="MODEL", type=_path, help="an .onnx file")
    _shape_option(explain)
    _place_options(explain)

    profile = commands.add_parser("profile", help="where a model's time goes", description=(
        "What each kernel of a model takes on the device, what it does in that time, and how much of what the device "
        "can do that is; inputs as of run. Of several runs the shortest counts."
    ))
    _feed_options(profile)
    profile.add_argument("--nodes", action="store_true", help="a line for each node, not for each kernel")
    profile.add_argument("--json", action="store_true", help="print JSON")
    profile.add_argument("--repeat", type=_positive, default=5, metavar="N", help="of N runs (default: 5)")
    profile.add_argument(
        "--remeasure", action="store_true", help="measure anew what the device can do, which is remembered else"
    )
    _place_options(profile)

    doctor = commands.add_parser("doctor", help="what there is to run on", description=(
        "What there is to run on, what is chosen and why, and how long a cancel takes there."
    ))
    doctor.add_argument(
        "--reprobe", action="store_true", help="forget what is remembered of the drivers, and try them anew"
    )
    _place_options(doctor)

    top = commands.add_parser("top", help="what running schedulers are doing", description=(
        "What the schedulers of your processes are doing, live, until Ctrl-C; of those that were opened with "
        "expose=True or TRIONNX_EXPOSE=1."
    ))
    top.add_argument("--once", action="store_true", help="print it once, as where standard output is no terminal")
    return parser


def _feed_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=_path, help="an .onnx file")
    files = "NAME=FILE.npy, or FILE.npz with an array per input"
    parser.add_argument("inputs", metavar="INPUT", nargs="*", default=(), help=files)
    _shape_option(parser)
    parser.add_argument("--seed", type=_seed, default=0, help="of the inputs that are drawn at random (default: 0)")


def _shape_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", metavar="NAME=1,3,48,320", action="append", default=[], help="the shape of an input; may be repeated"
    )


def _place_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default=None, help="auto, webgpu or cpu (default: TRIONNX_BACKEND, else auto)")
    parser.add_argument("--adapter", default=None, help="index or part of a name (default: TRIONNX_ADAPTER)")


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return text


def _positive(text: str) -> int:
    return _at_least(1, text)


def _seed(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return value
