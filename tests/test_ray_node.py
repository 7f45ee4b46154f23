"""What a node of a cluster does with a job, in this process; see tests/e2e/test_ray.py for a cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fxc import identity, ray_node
from fxc.errors import BuildError
from fxc.jobs import CheckJob, CompileJob, UserOps
from fxc.ray_node import Done, Head, Refused, Request
from tests.building import target
from tests.test_identity import OTHER
from tests.test_lower import TEXT, made


def compile_job(ops: UserOps) -> CompileJob:
    unit = made()
    return CompileJob(
        id=7, label=unit.label, text=TEXT, dims=unit.dims(), target=target(), options=dict(unit.options), ops=ops,
        directory="/driver/stage/7", scratch="/driver/scratch", fast=False,
    )  # fmt: skip


@pytest.mark.parametrize("field", OTHER)
def test_a_node_that_is_not_like_the_builder_is_refused(field: str) -> None:
    ray_node.require(target(), target())
    other = msgspec.structs.replace(target(), **{field: OTHER[field]})
    with pytest.raises(BuildError) as caught:
        ray_node.require(other, target())
    here = getattr(target(), field)
    message = f"its {field} is {here or 'none'!r}, that of the machine that builds {OTHER[field]!r}"
    assert caught.value.message == message
    assert "have all nodes of the cluster like the machine that builds" in caught.value.hint


def test_another_fxc_is_refused_whatever_else_it_asks() -> None:
    data = msgspec.msgpack.encode({"code": "0" * 32, "unheard": "of"})
    answer = msgspec.msgpack.decode(ray_node.run(data, b""), type=ray_node.Answer)
    assert isinstance(answer, Refused)
    assert f"its fxc is '{identity.own_code()}', that of the machine that builds '{'0' * 32}'" in answer.message
    request = Request(identity.own_code(), target(), compile_job(UserOps()), {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Head).code == identity.own_code()


def test_files_of_a_user_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on another machine sees them at other places, but in the same order, and what it makes comes back."""
    from fxc.jobs import ProbeJob, Reply
    from fxc.ray_node import _Compiler

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "ops.py").write_text("WIDTH = 3\n")
    (tmp_path / "shared.py").write_text("import torch\n")
    sources = tuple(str(path) for path in (folder / "ops.py", tmp_path / "shared.py", tmp_path / "gone.py"))
    ops = UserOps((str(folder / "ops.py"), "installed.ops"), str(folder), sources)
    packed = ray_node.pack(ops)
    (folder / "ops.py").unlink()
    monkeypatch.setenv("FXC_CACHE_DIR", str(tmp_path / "node"))
    seen = []

    class Pool:
        def do(self, job: CompileJob | CheckJob | ProbeJob) -> Reply:
            assert isinstance(job, CompileJob)
            stage = Path(job.directory)
            seen.append(stage)
            assert job.ops.imports == (f"{stage}/sources{folder}/ops.py", "installed.ops")
            assert (Path(job.ops.imports[0])).read_text() == "WIDTH = 3\n"
            assert (Path(job.ops.directory).parent / "shared.py").read_text() == "import torch\n"
            assert job.scratch == str(tmp_path / "node" / "v1" / "scratch" / "compiler")
            (stage / "made.so").write_bytes(b"library")
            return Reply(job.id, 1.5, {"library": str(stage / "made.so"), "calls": "", "assumptions": ["n >= 1"]})

        def target(self, device: str, directory: Path) -> object:
            return target()

    monkeypatch.setattr(_Compiler, "get", Pool)
    request = Request(identity.own_code(), target(), compile_job(ops), {})
    answer = msgspec.msgpack.decode(ray_node.run(msgspec.msgpack.encode(request), packed), type=ray_node.Answer)
    assert answer == Done(
        Reply(7, 1.5, {"library": "made.so", "calls": "", "assumptions": ["n >= 1"]}), {"made.so": b"library"}
    )
    assert not seen[0].exists()
