"""From the machine that builds to those that serve: a walk through autoscaling, with compiled binaries."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import fxc
from fxc.cache import Cache, Rules
from tests.cache.test_s3 import needs_s3, port  # noqa: F401
from tests.e2e import world
from tests.e2e.conftest import Built

NO_COMPILER = {"CXX": "/nonexistent", "PATH": "/nonexistent"}


SERVE = """import subprocess, sys

def watch(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.system"):
        print("ran", arguments[:2])

sys.addaudithook(watch)
import torch
import fxc

sys.path.insert(0, sys.argv[2])
from plain import Plain

model = Plain().requires_grad_(False)
program = fxc.load(sys.argv[1]).bind(model)
for n in (1, 2, 4, 37, 64):
    x = torch.randn(n, 16)
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
print("compilers", sorted({"torch._dynamo", "torch._inductor"} & sys.modules.keys()))
print("served", program.manifest.hash)
"""


@pytest.fixture
def bucket(port: int) -> tuple[str, dict[str, str]]:  # noqa: F811
    """A place on a server that speaks S3, and the environment that it is reached by."""
    import s3fs

    endpoint, name = f"http://127.0.0.1:{port}", f"bucket-{uuid.uuid4()}"
    s3fs.S3FileSystem(key="key", secret="secret", client_kwargs={"endpoint_url": endpoint}).mkdir(name)
    environ = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    return f"s3://{name}/fxc", {"AWS_ENDPOINT_URL": endpoint, **{f"AWS_{key}": word for key, word in environ.items()}}


@needs_s3
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_autoscaling(
    copied: Callable[[Built], Built], plain: Built, bucket: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """Built and pushed; the builder is gone; an image is made with what was pushed; a machine starts from the image,
    without a compiler and without the network."""
    built, (remote, s3) = copied(plain), bucket
    assert built.project.fxc("push", built.hash, "--remote", remote, environ=s3).code == 0
    shutil.rmtree(built.project.cache)

    image = world.plain(tmp_path / "server", tmp_path / "image")
    done = image.fxc("pull", str(image.yaml), "--remote", remote, environ={**NO_COMPILER, **s3})
    assert done.hash == built.hash
    subprocess.run(["chmod", "-R", "a-w", str(image.cache)], check=True)

    server = image._replace(cache=tmp_path / "own")
    over = {**NO_COMPILER, "FXC_CACHE_PATH": str(image.cache)}
    done = server.fxc("warm", str(server.yaml), "--require-hit", "--json", environ=over)
    assert done.code == 0, done
    assert (done.json["hash"], done.json["hit"], done.json["compilations"]) == (built.hash, True, 0)
    for ref in (str(server.yaml), built.hash):
        done = server.python(SERVE, ref, str(server.folder), environ={**server.environ(), **over})
        assert (done.code, done.out.splitlines()) == (0, ["compilers []", f"served {built.hash}"]), done
    assert not server.root.exists()
    subprocess.run(["chmod", "-R", "u+w", str(image.cache)], check=True)


def test_binaries_of_an_import_are_reused(copied: Callable[[Built], Built], plain: Built, tmp_path: Path) -> None:
    """One more size compiles that size only, also where the rest came in an archive."""
    built, file = copied(plain), str(tmp_path / "model.tar")
    assert built.project.fxc("export", built.hash, file).code == 0
    other = built.project._replace(cache=tmp_path / "other")
    assert other.fxc("import", file).hash == built.hash
    told = other.fxc("why", str(built.project.yaml), "--set", "compile.level=2", "--json")
    assert told.code == 0, told
    assert [entry["piece"] for entry in told.json["compile"]] == ["piece_0 n=4"]
    assert told.json["compile"][0]["seconds"] > 0


def test_pruned_under_a_program(copied: Callable[[Built], Built], plain: Built) -> None:
    """What a program maps stays, artifact and binary, until the program is gone."""
    built = copied(plain)
    cache = Cache.open(built.project.cache)
    program = fxc.load(built.hash, cache_dir=built.project.cache)
    pruned = cache.prune(Rules(keep_latest=0))
    assert pruned.in_use == (built.hash,)
    assert cache.artifact(built.hash).verify() >= 3
    assert all(cache.binary(key) is not None for key in program.manifest.binaries)
    del program
    gc.collect()
    assert [removal.hash for removal in cache.prune(Rules(keep_latest=0)).removed] == [built.hash]
    assert os.listdir(cache.root / "binaries") == []
