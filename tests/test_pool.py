"""Workers: a process per job; what a job does to its process, and what that does to the build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxc import pool as pool_module
from fxc._worker import CheckJob, CompileJob, Reply, _message
from fxc.errors import BuildError
from fxc.pool import Pool

TEXT = 'def piece(in_0: "f32[n, 8]"):\n    neg = torch.ops.aten.neg.default(in_0)  # f32[n, 8]\n    return (neg,)\n'


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(2, tmp_path_factory.mktemp("models")) as running:
        yield running


def check(directory: Path, number: int = 0, imports: tuple[str, ...] = (), library: str = "/nowhere.so") -> CheckJob:
    directory.mkdir(exist_ok=True)
    return CheckJob(
        id=number, text=TEXT, device="cpu", imports=imports, library=library, points=(), lowest={"n": 1}, values=(None,),
        directory=str(directory),
    )  # fmt: skip


def test_a_failure_is_one_line_and_all_of_it(pool: Pool, tmp_path: Path) -> None:
    pool.send(check(tmp_path / "job"))
    reply = pool.receive()
    assert (reply.id, reply.result) == (0, None)
    assert reply.error.startswith("IncompatibleError: /nowhere.so cannot be loaded with torch")
    assert "Traceback (most recent call last)" in reply.detail


def test_a_job_that_crashes_harms_no_other(pool: Pool, tmp_path: Path) -> None:
    crash = tmp_path / "crash.py"
    crash.write_text("import os, signal, sys\nprint('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    pool.send(check(tmp_path / "first", 1, (str(crash),)))
    pool.send(check(tmp_path / "second", 2))
    replies = {reply.id: reply for reply in (pool.receive(), pool.receive())}
    assert replies[1].error == "the process crashed (killed by SIGSEGV)"
    assert "last words" in replies[1].detail
    assert replies[2].error.startswith("IncompatibleError")


def test_jobs_run_side_by_side(pool: Pool, tmp_path: Path) -> None:
    """The first waits for a file that the second makes."""
    made = tmp_path / "made"
    for number, (name, code) in enumerate((
        ("waits", f"import os, time\nwhile not os.path.exists({str(made)!r}): time.sleep(0.01)\n"),
        ("makes", f"open({str(made)!r}, 'w').close()\n"),
    )):
        (tmp_path / f"{name}.py").write_text(code)
        pool.send(check(tmp_path / name, number, (str(tmp_path / f"{name}.py"),)))
    assert {pool.receive().id, pool.receive().id} == {0, 1}


def test_a_piece_that_cannot_be_compiled(pool: Pool, tmp_path: Path) -> None:
    directory = tmp_path / "compile"
    directory.mkdir()
    text = TEXT.replace("neg.default(in_0)", "mm.default(in_0, in_0)")
    pool.send(
        CompileJob(
            id=7, text=text, dims={"n": (1, 64, 37)}, device="cpu", options={}, imports=(), directory=str(directory),
            scratch=str(tmp_path), fast=False,
        )
    )  # fmt: skip
    reply = pool.receive()
    assert (reply.id, reply.result) == (7, None)
    assert "\n" not in reply.error
    assert reply.detail


def test_a_message_is_what_the_compiler_calls_an_error() -> None:
    text = "CppCompileError: C++ compile error\n\nCommand:\ng++ x\n\nOutput:\nx.cpp:3:1: error: 'foo' was not declared\n"
    assert _message(RuntimeError(text)) == "RuntimeError: error: 'foo' was not declared"
    assert _message(ValueError("first\nsecond")) == "ValueError: first"
    assert _message(ValueError()) == "ValueError: "


def test_environment_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PATH": "/bin", "TORCHINDUCTOR_CACHE_DIR": "x", "TRITON_DEBUG": "1", "OMP_NUM_THREADS": "3", "CXX": "g++-12"}
    seen = pool_module.environment(given)
    assert (seen["PATH"], seen["CXX"]) == ("/bin", "g++-12")
    assert not {"TORCHINDUCTOR_CACHE_DIR", "TRITON_DEBUG", "OMP_NUM_THREADS"} & set(seen)
    assert seen["PYTHONPATH"].split(os.pathsep) == [entry for entry in sys.path if entry]


def test_workers_that_die(tmp_path: Path) -> None:
    with Pool(1, tmp_path) as running:
        running._process.send_signal(signal.SIGKILL)
        with pytest.raises(BuildError, match="the compile workers ended unexpectedly with exit code -9"):
            running.receive()


def test_closing_takes_jobs_along(tmp_path: Path) -> None:
    """No process of a pool outlives it, whatever its jobs do."""
    mark = tmp_path / "pid"
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    with Pool(1, tmp_path) as running:
        running.send(check(tmp_path / "job", 0, (str(stubborn),)))
        deadline = 60.0
        while not (mark.exists() and mark.read_text()) and deadline > 0:
            subprocess.run(["sleep", "0.05"], check=True)
            deadline -= 0.05
    pid = int(mark.read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        subprocess.run(["sleep", "0.05"], check=True)
    raise AssertionError(f"process {pid} still runs")


def test_replies_are_plain_data() -> None:
    assert Reply(1, 0.5) == Reply(1, 0.5, None, "", "")
