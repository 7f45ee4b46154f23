"""What a second build finds, what it compiles, and what names the artifact."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fxc
from tests.e2e import world
from tests.e2e.conftest import Built
from tests.e2e.world import Project

Fresh = Callable[..., Project]
Copied = Callable[[Built], Built]


@pytest.fixture
def moved(plain: Built, tmp_path: Path) -> Project:
    """The project's folder, copied whole to another place; the same cache."""
    shutil.copytree(plain.project.folder, tmp_path / "other place")
    return plain.project._replace(folder=tmp_path / "other place")


def test_second_build_is_a_hit(plain: Built) -> None:
    done = plain.project.fxc("build", str(plain.project.yaml))
    assert done.hash == plain.hash
    assert done.seconds < 3
    assert done.err.startswith("in the cache:")


def test_moved_project_is_a_hit(moved: Project, plain: Built) -> None:
    result = moved.build()
    assert (result["hit"], result["hash"]) == (True, plain.hash)
    assert result["seconds"]["trace"] == 0


@pytest.mark.parametrize("spelling", ["relative", "absolute", "symlink", "dots"])
def test_spelling_of_the_path(moved: Project, plain: Built, tmp_path: Path, spelling: str) -> None:
    link = tmp_path / "link to a model.yaml"
    link.symlink_to(moved.yaml)
    where, path = {
        "relative": (moved.folder, "model.yaml"),
        "absolute": (Path("/"), str(moved.yaml)),
        "symlink": (Path("/"), str(link)),
        "dots": (moved.folder, "../other place/./model.yaml"),
    }[spelling]
    assert moved.fxc("build", path, cwd=where).hash == plain.hash


def test_another_user_and_environment_build_the_same(plain: Built, fresh: Fresh, tmp_path: Path) -> None:
    """Built anew, in another cache and folder, whose paths are long and have spaces."""
    project = fresh("é project", "/".join(["é a folder with a long name " + "x" * 100] * 8))
    (tmp_path / "home").mkdir()
    environ = {
        "HOME": str(tmp_path / "home"), "USER": "nobody", "LOGNAME": "nobody", "HOSTNAME": "elsewhere",
        "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CPP_WRAPPER": "1", "TORCH_COMPILE_DEBUG": "1",
        "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE": "1", "TORCHINDUCTOR_SIZE_ASSERTS": "0", "ATEN_CPU_CAPABILITY": "default",
        "AOT_INDUCTOR_DEBUG_COMPILE": "1", "TMPDIR": "/nonexistent", "LANG": "C", "TORCHINDUCTOR_COMPILE_THREADS": "9",
    }  # fmt: skip
    done = project.fxc("build", "model.yaml", "--json", "--jobs", "1", environ=environ, cwd=project.folder)
    assert done.code == 0, done
    assert done.json["hash"] == plain.hash
    assert done.json["binaries"] == {"compiled": 1, "reused": 0}
    assert not list((tmp_path / "home").iterdir())
    assert not list((project.root / "staging").iterdir())


def test_one_more_size_compiles_that_size(copied: Copied, plain: Built) -> None:
    project = copied(plain).project
    shutil.copytree(plain.project.root / "scratch", project.root / "scratch", copy_function=os.link)
    result = project.build("-O2")  # sizes: [4]
    assert (result["hit"], result["sizes"], result["binaries"]) == (False, [4], {"compiled": 1, "reused": 1})
    again = project.build("-O2", "--set", "cudagraph.mode=none", "--set", "cudagraph.sizes=[4]")
    assert (again["hit"], again["hash"]) == (True, result["hash"])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plain.py", "        self.op = ", "        # which one?\n        self.op = "),
        ("helper.py", "SCALE = 2.0", "SCALE = 2.0  # as in the paper"),
        ("model.yaml", "device: cpu", "# here\ndevice:    cpu"),
    ],
)
def test_an_edited_comment_compiles_nothing(moved: Project, plain: Built, name: str, old: str, new: str) -> None:
    edit(moved, name, old, new)
    first, second = (fxc.build(moved.yaml, cache_dir=moved.cache) for _ in range(2))
    assert (first.hit, first.hash, first.binaries["compiled"]) == (True, plain.hash, 0)
    assert (first.seconds["trace"] > 0) == (name != "model.yaml")
    assert (second.hit, second.seconds["trace"]) == (True, 0)


def edit(project: Project, name: str, old: str, new: str) -> None:
    text = (project.folder / name).read_text()
    assert old in text
    (project.folder / name).write_text(text.replace(old, new))


CHANGES: dict[str, tuple[str, ...] | Callable[[Project], None]] = {
    "nothing": (),
    "an op": lambda project: edit(project, "plain.py", "* SCALE", "/ SCALE"),
    "an imported constant": lambda project: edit(project, "helper.py", "2.0", "3.0"),
    "an argument": ("model.args.width=32",),
    "an op by argument": ("model.args.op=tanh",),
    "dtype": ("model.dtype=float64", "inputs.x.dtype=float64"),
    "a splitting op": ('partition.splitting_ops=["aten::relu"]',),
    "bounds": ("dims.n.max=65",),
    "a boundary": ("compile.ranges=[8]",),
    "made-up values": ("inputs.x.values=[0,1]",),
    "level 0": ("compile.level=0",),
    "level 2": ("compile.level=2",),
    "level 3": ("compile.level=3",),
    "sizes": ("compile.level=2", "compile.sizes=[4,8]"),
}


def test_every_change_is_a_miss(tmp_path: Path) -> None:
    from fxc import machine
    from fxc.plan import make_plan
    from fxc.spec import load_spec

    names = {}
    for change, how in CHANGES.items():
        project = world.plain(tmp_path / change, tmp_path / "cache")
        if callable(how):
            how(project)
        spec = load_spec(project.yaml, () if callable(how) else how)
        names[change] = make_plan(spec, project.folder, machine.probe("cpu")).manifest.hash
    assert len(set(names.values())) == len(names), names


READS = """import json, os
from pathlib import Path

from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = json.loads((Path(__file__).parent / "config.json").read_text())

    def forward(self, x):
        return x * float(os.environ.get("MODEL_SCALE", "1")) + self.config["shift"]
"""


def test_what_the_model_reads_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable and a file beside it: not asked for, yet part of what the model is."""
    files = {
        "model.py": READS,
        "config.json": '{"shift": 1}',
        "model.yaml": world.PLAIN_YAML.replace("./plain.py:Plain", "./model.py:Model").replace("{width: 16}", "{}"),
    }
    project = world.make(tmp_path / "project", tmp_path / "cache", files)

    def build() -> tuple[str, bool]:
        """The hash, and whether it was found without tracing."""
        result = fxc.build(project.yaml, level=0, cache_dir=project.cache)
        return result.hash, result.seconds["trace"] == 0

    first, _ = build()
    monkeypatch.setenv("UNRELATED", "1")
    assert build() == (first, True)
    monkeypatch.setenv("MODEL_SCALE", "2")
    second, found = build()
    assert (second != first, found) == (True, False)
    monkeypatch.delenv("MODEL_SCALE")
    assert build() == (first, True)
    edit(project, "config.json", "1", "5")
    third, found = build()
    assert (third in (first, second), found) == (False, False)
    edit(project, "config.json", "5", "1")
    assert build() == (first, True)
