"""What a model's code reads besides its own file."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from fxc.models import reads
from fxc.models.files import load_file
from fxc.runtime.custom_ops import _run_file
from fxc.spec import load_spec


def test_imports_are_followed(tmp_path: Path) -> None:
    (tmp_path / "reads_a.py").write_text("import os, json\nimport reads_b\nimport reads_pkg.inner\n")
    (tmp_path / "reads_b.py").write_text("def later():\n    import reads_c\n\nlater()\n")
    (tmp_path / "reads_c.py").write_text("X = 1\n")
    (tmp_path / "reads_pkg").mkdir()
    (tmp_path / "reads_pkg" / "__init__.py").write_text("")
    (tmp_path / "reads_pkg" / "inner.py").write_text("from . import sibling\nfrom .sibling import Y\n")
    (tmp_path / "reads_pkg" / "sibling.py").write_text("Y = 2\n")
    load_file(tmp_path / "reads_a.py")
    found = reads.imported([tmp_path / "reads_a.py"])
    names = ["reads_b.py", "reads_c.py", "reads_pkg/__init__.py", "reads_pkg/inner.py", "reads_pkg/sibling.py"]
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == names


def test_variables_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.bin").write_bytes(bytes(reads.LARGEST + 1))
    (tmp_path / "asks.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def ask():\n"
        "    os.environ.get('ASKED'); os.getenv('ABSENT'); 'PRESENT' in os.environ\n"
        "    here = Path(__file__).parent\n"
        "    (here / 'config.json').read_text(); (here / 'weights.bin').read_bytes(); open('/proc/self/stat').close()\n"
        "    (here / 'written.txt').write_text('')\n"
    )
    module = load_file(tmp_path / "asks.py")
    with reads.recorded(tmp_path) as read:
        module.ask()
        os.environ.get("OF_A_LIBRARY")
    module.ask()
    assert read.variables - {"OF_A_LIBRARY"} == {"ASKED", "ABSENT", "PRESENT"}
    assert read.files() == {tmp_path / "config.json"}


def test_a_module_is_executed_again_when_what_it_read_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.txt").write_text("1")
    (tmp_path / "once.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "VALUE = (Path(__file__).parent / 'config.txt').read_text() + os.environ.get('ONCE', '')\n"
    )
    first = load_file(tmp_path / "once.py")
    with reads.recorded(tmp_path) as read:
        assert load_file(tmp_path / "once.py") is first
    assert (read.variables, read.files()) == ({"ONCE"}, {tmp_path / "config.txt"})
    (tmp_path / "config.txt").write_text("2")
    assert load_file(tmp_path / "once.py").VALUE == "2"
    monkeypatch.setenv("ONCE", "x")
    assert load_file(tmp_path / "once.py").VALUE == "2x"


def test_a_file_that_was_executed_for_its_ops(tmp_path: Path) -> None:
    file = tmp_path / "served.py"
    file.write_text("VALUE = 1\n")
    os.utime(file, (1, 1))
    _run_file(file)
    assert load_file(file) is sys.modules["_fxc_target_served"]
    file.write_text("VALUE = 2\n")
    os.utime(file, (2**32, 2**32))  # edited since this process began
    assert load_file(file).VALUE == 2
    assert "_fxc_target_served_2" not in sys.modules


ASKS = """import importlib, json, linecache, os
from pathlib import Path

HERE = Path(__file__).parent

def ask(through):
    json.loads((HERE / "../configs/c.json").read_text())
    os.close(os.open(HERE / "../configs/low.bin", os.O_RDONLY))
    exec((HERE / "../configs/more.py").read_text())
    (HERE / "../configs/linked.json").read_text()
    through(HERE / "../configs/by_library.txt")
    importlib.import_module("reads_dynamic")
    linecache.getline(str(HERE / "shown.py"), 1)
    open(os.__file__).close(), open("/proc/self/stat").close(), open(os.devnull).close()
    open(HERE / "../configs/large.bin", "rb").close()
    open(HERE / "../site-packages/installed.json").close()
    open(HERE / "../configs/written.txt", "w").close()
    try:
        open(HERE / "../configs/absent.txt")
    except OSError:
        pass
"""


def test_what_the_code_opens_counts_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for installed files, the system's, and very large ones."""
    for folder in ("project", "configs", "site-packages"):
        (tmp_path / folder).mkdir()
    configs, project = tmp_path / "configs", tmp_path / "project"
    for name in ("c.json", "low.bin", "more.py", "target.json", "by_library.txt", "by_fxc.txt"):
        (configs / name).write_text("0")
    (configs / "linked.json").symlink_to("target.json")
    with open(configs / "large.bin", "wb") as large:
        large.truncate(reads.LARGEST + 1)
    (tmp_path / "site-packages" / "installed.json").touch()
    library = tmp_path / "site-packages" / "reads_library.py"
    library.write_text("def through(path):\n    return path.read_text()\n")
    (project / "reads_dynamic.py").touch()
    (project / "shown.py").touch()
    (project / "asks.py").write_text(ASKS)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(project)
    through = importlib.import_module("reads_library").through
    module = load_file(project / "asks.py")
    expected = {configs / name for name in ("c.json", "low.bin", "more.py", "linked.json", "by_library.txt")}
    for _ in ("from the text of reads_dynamic", "from what Python kept of it"):
        sys.modules.pop("reads_dynamic", None)
        with reads.recorded(project) as read:
            module.ask(through)
        assert read.files() == expected | {project / "reads_dynamic.py"}


def test_fxc_asks_for_itself(tmp_path: Path) -> None:
    """What it opens beside model.yaml is no part of the model because of that; data there is, whoever opens it."""
    (tmp_path / "project").mkdir()
    (tmp_path / "model.yaml").write_text(
        "model: {target: 'a:b'}\ndevice: cpu\ninputs: {x: {shape: [1], dtype: int8}}\n"
    )
    for directory, found in [(tmp_path / "project", set()), (tmp_path, {tmp_path / "model.yaml"})]:
        with reads.recorded(directory) as read:
            load_spec(tmp_path / "model.yaml")
        assert read.files() == found
