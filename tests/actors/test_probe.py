"""The probe: children that are scripts, and real drivers that misbehave."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from trionnx.actors import probe as probes
from trionnx.actors.probe import cache_folder, open_probe, unwritten
from trionnx.gpu.device.adapters import AdapterInfo
from trionnx.gpu.device.drivers import driver_files
from trionnx.gpu.device.entries import Entries
from trionnx.gpu.device.verdicts import Survey, Verdict

FACTS = [
    {"index": n, "name": name, "driver": "1.0", "backend": "Vulkan", "kind": "software", "identity": name}
    for n, name in enumerate(("first", "second"))
]
FIRST, SECOND = (AdapterInfo(n, name, "1.0", "Vulkan", "software", name) for n, name in enumerate(("first", "second")))
HEAD = f"""
import json, os, signal, sys, time
def say(**answer):
    print(json.dumps(answer), flush=True)
def hang():
    while True:
        time.sleep(1000)
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
def garbage():
    print("once upon a time", flush=True)
    hang()
def listed():
    say(up=True)
    say(adapters={FACTS})
"""
SOUND = "listed()\nfor order in sys.stdin: say(ok=True)"


class Children:
    """Runs scripts instead of the process that tries drivers, and looks after what became of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.started: list[trio.Process] = []
        self.news = trio.Event()
        start = trio.lowlevel.open_process

        async def open_process(command: Any, **options: Any) -> trio.Process:
            process = await start(command, **options)
            self.started.append(process)
            self.news.set()
            return process

        monkeypatch.setattr(trio.lowlevel, "open_process", open_process)

    def script(self, body: str) -> None:
        self.monkeypatch.setattr(probes, "COMMAND", (sys.executable, "-ISc", HEAD + body))

    def bound(self, seconds: float) -> None:
        self.monkeypatch.setenv("TRIONNX_PROBE", str(seconds))

    def fresh_process(self) -> None:
        """Forget what this process knows; what is in files stays."""
        self.monkeypatch.setattr(probes, "_process", probes._Process())


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Children]:
    made = Children(monkeypatch)
    monkeypatch.setenv("TRIONNX_CACHE_DIR", str(tmp_path / "cache"))
    made.fresh_process()
    yield made
    assert [process for process in made.started if process.returncode is None] == []


async def surveyed() -> Survey:
    async with open_probe() as probe:
        return probe.survey


@pytest.mark.parametrize(
    ("script", "bound", "outcome", "reason"),
    [
        ("hang()", 0.2, "timeout", r"did not answer within 0.2 s \(TRIONNX_PROBE=0.8 waits longer\)"),
        ("say(up=True); hang()", 0.5, "timeout", "did not answer within 0.5 s"),
        ("crash()", 30, "crash", r"ended the process that tried it \(SIGSEGV\)"),
        ("say(up=True); crash()", 30, "crash", "SIGSEGV"),
        ("say(up=True)", 30, "crash", "exit code 0"),
        ("sys.exit(3)", 30, "crash", "exit code 3"),
        ("garbage()", 30, "error", "cannot be understood: b'once upon a time'"),
        ("say(up=True); garbage()", 30, "error", "cannot be understood"),
        ("print('[' * 100_000, flush=True); hang()", 30, "error", "cannot be understood"),
        ("os.write(1, bytes(3_000_000)); hang()", 30, "error", "an answer without end"),
        ("print('7', flush=True)", 30, "error", "cannot be understood: b'7'"),
        ("say(up=1)", 30, "error", "an unexpected answer"),
        ("say(up=True); say(adapters=7)", 30, "error", "list of adapters cannot be understood"),
        ("say(up=True); say(adapters=[{}])", 30, "error", "list of adapters cannot be understood"),
        ("say(ok=False, wrong=False, reason='ImportError: no wgpu')", 30, "error", "^ImportError: no wgpu$"),
    ],
)
async def test_drivers_that_cannot_be_listed(
    children: Children, script: str, bound: float, outcome: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "driver_files", list)
    children.script(script)
    children.bound(bound)
    survey = await surveyed()
    assert (survey.listing.outcome, survey.adapters) == (outcome, ())
    assert re.search(reason, survey.listing.reason)
    assert len(children.started) == 1
    assert await surveyed() == survey
    assert len(children.started) == 1


@pytest.mark.parametrize(
    ("act", "bound", "outcome", "reason"),
    [
        ("crash()", 30, "crash", "SIGSEGV"),
        ("hang()", 1, "timeout", "did not answer within 1 s"),
        ("garbage()", 30, "error", "cannot be understood"),
        ("say(ok=False, wrong=True, reason='7 numbers are wrong')", 30, "wrong", "7 numbers are wrong"),
        ("say(ok=False, wrong=False, reason='no memory')", 30, "error", "no memory"),
        ("say(ok='yes')", 30, "error", "an unexpected answer"),
    ],
)
async def test_an_adapter_that_does_not_work_costs_itself_only(
    children: Children, act: str, bound: float, outcome: str, reason: str
) -> None:
    children.script(f"listed()\nfor order in sys.stdin:\n if order == '0\\n': {act}\n else: say(ok=True)")
    children.bound(bound)
    async with open_probe() as probe:
        assert probe.survey.adapters == (FIRST, SECOND)
        verdict = await probe.attempt(FIRST)
        assert verdict.outcome == outcome
        assert reason in verdict.reason
        assert (await probe.attempt(SECOND)).ok
        assert await probe.attempt(FIRST) == verdict
    assert len(children.started) == 2


async def test_an_adapter_that_is_gone(children: Children) -> None:
    children.script(f"listed()\nif os.path.exists({str(cache_folder())!r}): crash()")
    await surveyed()
    children.script("say(up=True); say(adapters=[])\nfor order in sys.stdin: say(ok=True)")
    async with open_probe() as probe:
        assert (await probe.attempt(FIRST)).reason == "it is gone"


async def test_a_probe_that_cannot_be_started(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "COMMAND", ("/nowhere/python",))
    assert "cannot be started" in (await surveyed()).listing.reason


# --- remembered ------------------------------------------------------------------------------------------------------


async def test_what_one_process_found_the_next_one_knows(children: Children) -> None:
    children.script(SOUND)
    async with open_probe() as probe:
        verdict = await probe.attempt(FIRST)
        known = probe.survey
    children.fresh_process()
    async with open_probe() as probe:
        assert probe.survey == known
        assert await probe.attempt(FIRST) == verdict
        assert len(children.started) == 1
        await probe.attempt(SECOND)
    assert len(children.started) == 2
    async with open_probe(anew=True) as probe:
        assert probe.survey.trials == {}
    assert len(children.started) == 3


async def test_another_environment_is_another_machine(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    children.script(SOUND)
    await surveyed()
    monkeypatch.setenv("VK_DRIVER_FILES", "/nowhere/driver.json")
    await surveyed()
    assert len(children.started) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\x00", b"[]", b'{"format": 2}', b'{"format": 2, "machines": 7}', b"[" * 100_000, b"{}", None],
)
async def test_a_file_that_cannot_be_understood_is_made_anew(children: Children, content: bytes | None) -> None:
    children.script(SOUND)
    survey = await surveyed()
    file = cache_folder() / "probes.json"
    if content is None:
        entries = Entries(file, "machines")
        for name, entry in entries.read().items():
            entry["adapters"][0]["kind"] = "furniture"
            entries.put(name, entry)
    else:
        file.write_bytes(content)
    children.fresh_process()
    assert (await surveyed()).adapters == survey.adapters
    assert len(children.started) == 2
    children.fresh_process()
    await surveyed()
    assert len(children.started) == 2


FAULTS = {
    "a file in the way": (None, "", errno.EEXIST),
    "no right": (Path, "mkdir", errno.EACCES),
    "read-only": (tempfile, "NamedTemporaryFile", errno.EROFS),
    "full": (os, "fsync", errno.ENOSPC),
    "no right to replace": (os, "replace", errno.EPERM),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_cannot_be_remembered_is_used_all_the_same(
    children: Children, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise OSError(number, "no")

    children.script(SOUND)
    owner, call, number = FAULTS[fault]
    with monkeypatch.context() as patch:
        if owner is None:
            (tmp_path / "cache").write_text("here")
        else:
            patch.setattr(owner, call, refuse)
        for _ in range(2):
            async with open_probe() as probe:
                assert (await probe.attempt(FIRST)).ok
        assert len(children.started) == 1
        refused = unwritten()
        assert refused is not None
        assert refused.errno == number
    assert not (tmp_path / "cache").is_dir() or list((tmp_path / "cache").iterdir()) == []
    children.fresh_process()
    async with open_probe() as probe:
        assert (await probe.attempt(FIRST)).ok
    assert len(children.started) == 2
    assert (unwritten() is None) == (owner is not None)


@pytest.mark.skipif(not shutil.which("unshare") or not shutil.which("mount"), reason="there is no mount of one's own")
@pytest.mark.parametrize(
    ("options", "why"), [("ro", errno.EROFS), ("size=4k", errno.ENOSPC), ("nr_inodes=2", errno.ENOSPC)]
)
def test_doctor_says_that_the_cache_folder_cannot_be_written(options: str, why: int, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    script = (
        'mount -t tmpfs -o "$1" tmpfs "$2" || exit 9\n'
        '{ head -c 5000 /dev/zero > "$2/other"; } 2> /dev/null\n'
        'for _ in 1 2; do "$3" -m trionnx doctor --adapter abacus; ls "$2"; done'
    )
    command = ["unshare", "-rm", "sh", "-c", script, "sh", options, str(tmp_path / "cache"), sys.executable]
    environment = {**os.environ, "TRIONNX_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "1000"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr}")
    told = f"nothing can be remembered in {tmp_path / 'cache'}: {os.strerror(why)}; each process tries anew\n"
    assert done.stdout.count(told) == 2
    assert done.stdout.count("tried now") + done.stdout.count("no adapters") >= 2
    assert "as of 20" not in done.stdout
    assert "probes" not in done.stdout
    assert done.stderr == ""


async def test_a_fault_that_does_not_hold_any_more_is_tried_again(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "driver_files", list)
    children.script("crash()")
    assert not (await surveyed()).listing.ok
    children.script("listed()\nfor order in sys.stdin: crash()")
    monkeypatch.setattr(Verdict, "holds", lambda verdict, now, boot: verdict.ok)
    async with open_probe() as probe:
        assert not (await probe.attempt(FIRST)).ok
        children.script(SOUND)
        assert (await probe.attempt(FIRST)).ok
        assert (await probe.attempt(FIRST)).ok
    assert len(children.started) == 3


# --- one at a time, and cancelled ------------------------------------------------------------------------------------


async def test_loads_at_the_same_time_share_a_probe(children: Children) -> None:
    children.script(SOUND)
    found = []

    async def one() -> None:
        async with open_probe() as probe:
            found.append(await probe.attempt(SECOND))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(one)
    assert found == [found[0]] * 5
    assert len(children.started) == 1


def test_so_do_those_of_several_trio_runs(children: Children) -> None:
    children.script(SOUND)
    found: list[Survey] = []
    threads = [threading.Thread(target=lambda: found.append(trio.run(surveyed))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 4
    assert len(children.started) == 1


@pytest.mark.parametrize("script", ["hang()", "say(up=True); hang()", "listed(); hang()"])
async def test_a_cancel_leaves_no_process_and_no_lock(children: Children, script: str) -> None:
    children.script(script)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def doomed() -> None:
                async with open_probe() as probe:
                    await probe.attempt(FIRST)

            nursery.start_soon(doomed)
            await children.news.wait()
            nursery.cancel_scope.cancel()
        assert [process.returncode is None for process in children.started] == [False]
        children.script(SOUND)
        assert (await surveyed()).listing.ok


async def test_who_waits_for_a_probe_that_is_cancelled_makes_one(children: Children) -> None:
    children.script("hang()")
    found = []

    async def second() -> None:
        found.append(await surveyed())

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, trio.open_nursery() as first:
            first.start_soon(surveyed)
            await children.news.wait()
            nursery.start_soon(second)
            await trio.testing.wait_all_tasks_blocked()
            children.script(SOUND)
            first.cancel_scope.cancel()
    assert found[0].listing.ok


async def test_a_wait_for_another_runs_probe_can_be_cancelled(children: Children) -> None:
    probes._process.lock.acquire()
    try:
        with trio.move_on_after(0) as scope:
            await surveyed()
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(surveyed)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    finally:
        probes._process.lock.release()
    assert children.started == []


def test_a_forked_child_does_not_wait_for_its_parents_probe(children: Children) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    code = (
        "import os, sys, trio\n"
        "from trionnx.actors import probe\n"
        f"probe.COMMAND = {(sys.executable, '-ISc', HEAD + SOUND)!r}\n"
        "async def main():\n"
        "    async with probe.open_probe() as one:\n"
        "        print(len(one.survey.adapters), flush=True)\n"
        "probe._process.lock.acquire()\n"
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "trio.run(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "2\n"


# --- drivers ---------------------------------------------------------------------------------------------------------

Driver = Callable[..., str]


@pytest.fixture(scope="session")
def real() -> tuple[str, str]:
    """A software driver that works: its manifest, and its library."""
    for file in driver_files():
        content = json.loads(Path(file).read_text())
        if "lvp" in content["ICD"]["library_path"]:
            return file, content["ICD"]["library_path"]
    pytest.skip("lavapipe is not installed")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """`build(stage, action)`: a driver that misbehaves; its manifest."""
    if not any(os.access(Path(folder) / "cc", os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("drivers")

    def compile_one(stage: str, action: str, real: str | None = None) -> str:
        name = f"{stage}-{action}".lower()
        options = [f"-DSTAGE={stage}", f"-DACTION={action}", *([f'-DREAL="{real}"'] if real else [])]
        source = Path(__file__).with_name("driver.c")
        library = folder / f"{name}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-w", *options, str(source), "-o", str(library), "-ldl"], check=True)
        manifest = {"file_format_version": "1.0.0", "ICD": {"library_path": str(library), "api_version": "1.3.0"}}
        (folder / f"{name}.json").write_text(json.dumps(manifest))
        return str(folder / f"{name}.json")

    return compile_one


def only(monkeypatch: pytest.MonkeyPatch, *manifests: str) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(name, os.pathsep.join(manifests))


@pytest.mark.parametrize(
    ("stage", "action", "outcome"),
    [("LOAD", "FAIL", None), ("NEGOTIATE", "FAIL", None), ("NEGOTIATE", "CRASH", "crash"), ("LOAD", "HANG", "timeout")],
)
async def test_a_driver_that_cannot_be_opened_is_left_out(
    children: Children,
    build: Driver,
    real: tuple[str, str],
    stage: str,
    action: str,
    outcome: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = build(stage, action)
    only(monkeypatch, bad, real[0])
    children.bound(4 if action == "HANG" else 30)
    async with open_probe() as probe:
        survey = probe.survey
        assert [adapter.name.split()[0] for adapter in survey.adapters] == ["llvmpipe"]
        if outcome is None:
            assert survey.drivers is None
        else:
            assert survey.drivers == (real[0],)
            assert {file: verdict.outcome for file, verdict in survey.refused.items()} == {bad: outcome}
        assert (await probe.attempt(survey.adapters[0])).ok


@pytest.mark.parametrize(
    ("stage", "action", "outcome"),
    [
        ("DEVICE", "FAIL", "error"),
        ("DEVICE", "CRASH", "crash"),
        ("DEVICE", "HANG", "timeout"),
        ("DISPATCH", "CRASH", "crash"),
        ("DISPATCH", "FAIL", "wrong"),
    ],
)
async def test_a_driver_that_fails_at_work(
    children: Children,
    build: Driver,
    real: tuple[str, str],
    stage: str,
    action: str,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, build(stage, action, real[1]))
    children.bound(4 if action == "HANG" else 30)
    async with open_probe() as probe:
        (adapter,) = probe.survey.adapters
        verdict = await probe.attempt(adapter)
    assert verdict.outcome == outcome
    assert verdict.reason


PROGRAM = """
import numpy as np, onnx, sys, trio, trionnx

async def main():
    graph = "g (float[4] x) => (float[4] y) { y = Add(x, x) }"
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]>' + graph)
    async with trionnx.open_scheduler(backend=sys.argv[1]) as scheduler:
        session = await scheduler.load(model)
        y, = await session.run(None, {"x": np.ones(4, np.float32)})
        print(session.backend, y.tolist())

try:
    trio.run(main)
except trionnx.NoAdapter as error:
    print(error)
"""


def test_a_program_survives_drivers_that_cannot_be_opened(
    children: Children, build: Driver, real: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(backend: str) -> str:
        command = [sys.executable, "-c", PROGRAM, backend]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return done.stdout.strip()

    crashes = build("LOAD", "CRASH")
    only(monkeypatch, crashes, real[0])
    children.bound(30)
    assert run("webgpu") == "webgpu [2.0, 2.0, 2.0, 2.0]"
    only(monkeypatch, crashes)
    assert run("auto") == "cpu [2.0, 2.0, 2.0, 2.0]"
