"""What a second build finds, what it compiles, and what names the artifact."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fxc
from tests.e2e import world
from tests.e2e.conftest import Built
from tests.e2e.world import Project
from tests.models.configs import COMMON

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
    assert done.err.startswith("in the cache:")  # and nothing before it: neither traced nor compiled


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

CONFIG = "config.json"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = json.loads((Path(__file__).parent / CONFIG).read_text())

    def forward(self, x):
        return x * float(os.environ.get("MODEL_SCALE", "1")) + self.config["shift"]
"""


@pytest.mark.parametrize("config", ["config.json", "../configs/c.json"])
def test_what_the_model_reads_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """An environment variable and a file: not asked for, yet part of what the model is."""
    (tmp_path / "project").mkdir()
    (tmp_path / "configs").mkdir()
    files = {
        "model.py": READS.replace("config.json", config),
        config: '{"shift": 1}',
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
    edit(project, config, "1", "5")
    third, found = build()
    assert (third in (first, second), found) == (False, False)
    edit(project, config, "5", "1")
    assert build() == (first, True)


REWRITES = """from pathlib import Path

from torch import nn

FACTOR = 2.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        text = Path(__file__).read_text()
        if "\\nFACTOR = 2.0" in text:
            Path(__file__).write_text(text.replace("\\nFACTOR = 2.0", "\\nFACTOR = 3.0"))

    def forward(self, x):
        return x * FACTOR
"""


def test_a_file_that_is_saved_while_it_is_traced(tmp_path: Path) -> None:
    """The build is of the text before, and never found for the text after."""
    yaml = world.PLAIN_YAML.replace("./plain.py:Plain", "./model.py:Model").replace("{width: 16}", "{}")
    project = world.make(tmp_path / "project", tmp_path / "cache", {"model.py": REWRITES, "model.yaml": yaml})
    results = [fxc.build(project.yaml, level=0, cache_dir=project.cache) for _ in range(3)]
    texts = [(project.artifact(r.hash) / "rank_0_0" / "transformed_code.py").read_text() for r in results]
    assert [("2.0" in text, "3.0" in text) for text in texts] == [(True, False), (False, True), (False, True)]
    assert [result.seconds["trace"] > 0 for result in results] == [True, True, False]


TWO = """from torch import nn


class Two(nn.Module):
    def forward(self, x, y):
        return x - y
"""


def test_inputs_the_other_way_round_are_another_program(tmp_path: Path) -> None:
    import torch

    x, y = "x: {shape: [n], dtype: float32}", "y: {shape: [n], dtype: float32}"
    yaml = "model: {target: './two.py:Two'}\ndevice: cpu\ninputs: {X, Y}\ndims: {n: {min: 1, max: 64}}\ncompile: {level: 0}\n"
    project = world.make(tmp_path / "project", tmp_path / "cache", {"two.py": TWO})
    for order, result in [((x, y), 4), ((y, x), -4)]:
        project.yaml.write_text(yaml.replace("X", order[0]).replace("Y", order[1]))
        fxc.build(project.yaml, cache_dir=project.cache)
        program = fxc.load(project.yaml, cache_dir=project.cache).bind({})
        assert program(torch.full([3], 5.0), torch.ones(3)).tolist() == [result] * 3


LOADS = """import os, sys

def watch(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork"):
        print("ran", arguments[:2])

sys.addaudithook(watch)
import fxc
print(fxc.load(sys.argv[1]).manifest.hash)
"""


@pytest.mark.parametrize("compiler", ["none", "another"])
def test_loading_a_model_yaml_runs_no_compiler(tmp_path: Path, compiler: str) -> None:
    """A server has none, or not the one that the binaries were made with."""
    project = world.plain(tmp_path / "project", tmp_path / "cache")
    project.yaml.write_text(project.yaml.read_text().replace("level: 1", "level: 0"))
    hash = fxc.build(project.yaml, cache_dir=project.cache).hash
    other = tmp_path / "other-g++"
    other.write_text("#!/bin/sh\necho 'g++ 99.1.0'\n")
    other.chmod(0o755)
    environ = {"PATH": "", "FXC_CACHE_DIR": str(project.cache), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environ |= {"CXX": str(other)} if compiler == "another" else {}
    done = project.python(LOADS, str(project.yaml), environ=environ)
    assert (done.code, done.out.split()) == (0, [hash]), done


def test_a_hugging_face_folder_is_found_again(tmp_path: Path) -> None:
    yaml = "model: {huggingface: ., dtype: float32}\ndevice: cpu\ncompile: {level: 0}\n"
    config = json.dumps({**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    project = world.make(tmp_path / "project", tmp_path / "cache", {"config.json": config, "model.yaml": yaml})
    first, second = (fxc.build(project.yaml, cache_dir=project.cache) for _ in range(2))
    assert (first.hit, second.hit, second.seconds["trace"], second.hash) == (False, True, 0, first.hash)
