from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("actors", "gpu", "scheduler")

TRY = """
import importlib, pathlib, pkgutil, sys
import numpy as np, trio, trionnx

home = pathlib.Path(sys.prefix).resolve()
names = ["trionnx"]
for module in pkgutil.walk_packages(trionnx.__path__, "trionnx."):
    if not module.name.endswith("__main__"):
        names.append(module.name)
for name in names:
    file = pathlib.Path(importlib.import_module(name).__file__).resolve()
    assert home in file.parents, f"{name} comes from {file}"

async def main():
    from trionnx.gpu.device.adapters import list_adapters
    backends = ["cpu", "webgpu"] if list_adapters() else ["cpu"]
    for backend in backends:
        async with trionnx.open_scheduler(backend=backend) as scheduler:
            session = await scheduler.load(sys.argv[1])
            y, = await session.run(None, {"x": np.array([[1, 2], [3, 4]], np.float32)})
            np.testing.assert_allclose(y, [[1, 4], [9, 16]])
            assert session.backend == backend

trio.run(main)
print(*names)
"""


def configuration() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def folder(package: str) -> Path:
    """Where a package lies in the repository."""
    first, *rest = package.split(".")
    return ROOT.joinpath(*rest) if rest and rest[0] in LINKED else ROOT.joinpath(first, *rest)


def sources() -> set[str]:
    """The modules of the repository, by their paths in a wheel."""
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "trionnx").glob("*.py")}
    found |= {str(path.relative_to(ROOT)) for path in (ROOT / "trionnx" / "cli").rglob("*.py")}
    for name in LINKED:
        found |= {str("trionnx" / path.relative_to(ROOT)) for path in (ROOT / name).rglob("*.py")}
    return found


def test_every_folder_of_modules_is_a_listed_package() -> None:
    packages = configuration()["tool"]["setuptools"]["packages"]
    assert packages == sorted(packages)
    assert {str(Path(source).parent).replace(os.sep, ".") for source in sources()} == set(packages)
    for package in packages:
        assert (folder(package) / "__init__.py").is_file()
        assert (folder(package) / "py.typed").is_file()


def test_the_links_lead_to_the_folders() -> None:
    mapped = configuration()["tool"]["setuptools"]["package-dir"]
    assert mapped == {f"trionnx.{name}": name for name in LINKED}
    for name in LINKED:
        link = ROOT / "trionnx" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert link.resolve() == ROOT / name


FIRST = """
import os, sys

failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            __import__(name)
        except BaseException as error:
            print(name, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(bool(failed))
"""


def test_each_module_can_be_the_first_that_is_imported() -> None:
    names = [source.removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__") for source in sources()]
    names = sorted(name for name in names if not name.endswith("__main__"))
    heavy = "import numpy, trio, onnx, ml_dtypes, outcome, platformdirs\n"
    done = subprocess.run([sys.executable, "-c", heavy + FIRST, *names], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_root_is_no_package() -> None:
    assert not (ROOT / "__init__.py").exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def test_the_wheel_holds_the_modules_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name for name in names if name.endswith(".py")} == sources()
    assert {Path(name).suffix or Path(name).name for name in names} <= {".py", ".typed", ".wgsl"}
    assert len(names) == len(set(names))


def test_the_sdist_holds_what_a_reader_wants(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_in_a_clean_environment_it_runs_a_model(
    built: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    environment = tmp_path / "env"
    venv.create(environment, symlinks=os.name != "nt")
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python = str(scripts / "python")
    # What it depends on is taken from here, unseen by the .pth file that makes trionnx editable here.
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(paths["purelib"], "dependencies.pth").write_text("\n".join(sorted(here)))
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"),
        *("--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall", str(built[kind])),
        cwd=tmp_path,
    )
    file = tmp_path / "square.onnx"
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["y"])], "square", infos[:1], infos[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)

    names = run(python, "-I", "-c", TRY, str(file), cwd=tmp_path).split()
    assert {name for name in names if name.count(".") == 1} >= {f"trionnx.{name}" for name in (*LINKED, "cli")}
    assert "nodes" in run(str(scripts / "trionnx"), "info", str(file), cwd=tmp_path)


def run(*command: str, cwd: Path) -> str:
    """The standard output of a command that must succeed."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRIONNX_", "PIP_"))}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
