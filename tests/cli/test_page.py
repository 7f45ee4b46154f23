"""The page of an artifact, as text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fxc.cache import Artifact
from fxc.cli.page import page, render_page
from fxc.cli.page.view import view
from tests.cli.conftest import manifest
from tests.cli.pages import CODE, EVIL, GRAPH, PIECES, Page, publish, shown
from tests.conftest import Built

SECTIONS = ["partition", "pieces", "passes", "binaries", "build", "proof", "tensors", "key"]


@pytest.fixture(scope="module")
def text() -> str:
    return render_page(view(shown(), CODE, GRAPH, PIECES))


@pytest.fixture(scope="module")
def read(text: str) -> Page:
    return Page(text)


def test_sections_have_headings_and_links(read: Page) -> None:
    assert [element.attributes["id"] for element in read.all("section")] == SECTIONS
    assert len(read.all("h1")) == 1
    assert len(read.all("h2")) == len(SECTIONS)
    ids = [element.attributes["id"] for element in read.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    links = [element.attributes["href"] for element in read.all("a")]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    for element in read.elements:
        assert set(element.attributes.get("aria-labelledby", "").split()) <= set(ids)


def test_what_is_in_the_artifact_is_on_the_page(read: Page) -> None:
    panels = {element.attributes["id"]: element for element in read.all("article")}
    assert list(panels) == ["piece_0", "piece_1", "op-zoo-mix"]
    words = " ".join(panels["piece_0"].text.split())
    for part in (
        "2 calls · 5 ops · depends on n · aaaaaaaaaaaa",
        "linear in_0, in_1 norm_quant f32[n, 4]",
        "relu view, '</script>' norm_quant: its input is",
        "f32[n, 4] strides [1, n]",
        "x; from zoo::mix",
        "layers.{0..1}.weight",
        "n=8 300 kB 9.5 s a1",
        "n=1..64 300 kB 12.0 s a2",
    ):
        assert part in words, words
    assert "mix zoo.mix relu, 2 f32[n, 4]" in " ".join(panels["op-zoo-mix"].text.split())
    assert [link.attributes["href"] for link in read.all("a") if "title" in link.attributes] == [
        "#piece_0", "#op-zoo-mix", "#piece_0", "#piece_1",
    ]  # fmt: skip
    sections = {element.attributes["id"]: " ".join(element.text.split()) for element in read.all("section")}
    assert "norm_quant 1 2 matched noop 0 0 nothing to look at" in sections["passes"]
    assert "norm_quant piece_0 n=8 n=1..64 replaced linear left relu its input is" in sections["passes"]
    assert "4 in all, 1.2 MB" in sections["binaries"]
    assert "n=1..64 step_0 3 2" in sections["binaries"]
    assert "trace 3.0 s 30 % compile 6.0 s 60 % rest 1.0 s 10 %" in sections["build"]
    assert "step_0, whole 1 0 equal piece_0 2 2.5e-06 equal piece_1 0 1 not compared" in sections["proof"]
    assert "piece_0 n=64 2.5e-06 1.0e-04 3 rows excused" in sections["proof"]
    assert "layers.{0..1}.weight float32[4, 4] 2" in sections["tensors"]
    assert f"graph {'f' * 200}" in sections["key"]
    assert "triton none" in sections["key"]


def test_text_is_escaped(text: str, read: Page) -> None:
    assert EVIL not in text
    assert len(read.all("script")) == 1
    assert read.all("h1")[0].text.strip() == EVIL
    for section in ("pieces", "passes", "proof", "tensors", "key"):
        (element,) = read.all("section", id=section)
        assert EVIL in element.text


def test_only_its_own_script_may_run(text: str, read: Page) -> None:
    (policy,) = read.all("meta", **{"http-equiv": "Content-Security-Policy"})
    digest = base64.b64encode(hashlib.sha256(read.all("script")[0].text.encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in policy.attributes["content"]
    )


def test_it_needs_nothing_beside_it(text: str, read: Page) -> None:
    assert not re.search(r"https?:|url\(|@import|src=", text)
    assert not {"link", "img", "iframe", "object", "base"} & {element.tag for element in read.elements}


def test_the_same_text_each_time(text: str) -> None:
    assert render_page(view(shown(), CODE, GRAPH, PIECES)) == text


def test_32_layers_stay_small() -> None:
    first, op, _, last = shown().pieces["step_0"]
    deep = msgspec.structs.replace(shown(), pieces={"step_0": (last, *(op, first) * 31, op, last)})
    text = render_page(view(deep, CODE, GRAPH, PIECES))
    formula = Page(text).all("p", class_="formula")[0]
    assert " ".join(formula.text.split()) == "piece_1 31 × zoo::mix piece_0 zoo::mix piece_1"
    assert len(text) < 60_000


def test_little_in_the_manifest() -> None:
    """Level 0, nothing proved, no timings, an older build without pieces.py."""
    little = msgspec.structs.replace(manifest(), proof=(), proved=False, passes=(), seconds={}, factors=())
    read = Page(render_page(view(little, "", "", "")))
    words = " ".join(read.all("main")[0].text.split())
    for part in ("it was built before fxc kept them", "No pass runs at level 0", "None: at level 0", "has no timings", "built with --no-prove"):  # fmt: skip
        assert part in words


def test_of_a_build(built: Built) -> None:
    """Every piece, op and binary of a real one."""
    text = built.shell("fxc inspect $HASH --html -")
    manifest = json.loads(built.shell("fxc inspect $HASH --json"))
    read = Page(text)
    ids = {element.attributes.get("id"): element for element in read.elements}
    assert {"piece_0", "piece_1", "piece_2", "op-fxc-attention"} < set(ids)
    assert len(read.all("ol", class_="strip")[0].text.split()) == len(manifest["pieces"]["step_0"])
    for key, binary in manifest["binaries"].items():
        assert key[:12] in ids["binaries"].text
        assert f"{binary['piece'][:12]}" in ids["pieces"].text
    compiled = [piece for piece in manifest["pieces"]["step_0"] if piece["kind"] == "compiled"]
    for piece in compiled:
        (rows,) = read.all("ol", **{"aria-label": f"graph of {piece['name']}"})
        assert "linear" in rows.text
        assert f"{piece['ops']} ops" in ids[piece["name"]].text
    assert f"layers.{{1..{len(compiled) - 2}}}.attention_norm.weight" in ids["piece_1"].text
    assert "from fxc::attention" in ids["piece_1"].text
    assert len(text) < 200_000


def test_html_is_written(fxc: Any, artifact: Artifact, tmp_path: Path) -> None:
    told = fxc("inspect", "abcd", "--html", "page.html")
    text = (tmp_path / "page.html").read_text()
    assert (told.code, told.out) == (0, "")
    assert re.fullmatch(r"wrote page.html: [\d.]+ kB\n", told.err)
    assert text == page(artifact)
    assert fxc("inspect", "abcd", "--html", "-") == (0, text, "")
    assert fxc("inspect", "abcd", "--html", "page.html", "-q") == (0, "", "")
    assert fxc("inspect", "abcd", "--html", "page.html", "--json", "-q").json["hash"] == artifact.manifest.hash
    assert "Linear" in Page(text).all("title")[0].text
    assert [entry.name for entry in tmp_path.iterdir() if "page" in entry.name] == ["page.html"]


def test_of_a_published_artifact(tmp_path: Path) -> None:
    artifact = publish(tmp_path, shown(), transformed_code=CODE, computation_graph=GRAPH, pieces=PIECES)
    assert "linear" in Page(page(artifact)).all("article", id="piece_0")[0].text


@pytest.mark.parametrize(
    ("file", "code", "message", "hint"),
    [
        ("folder", 2, "--html folder is a directory", "name a file in it"),
        ("none/page.html", 2, "--html none/page.html: there is no directory none", "make it first"),
    ],
)
def test_where_no_page_can_be(fxc: Any, artifact: Artifact, file: str, code: int, message: str, hint: str) -> None:
    Path("folder").mkdir()
    assert fxc("inspect", "abcd", "--html", file) == (code, "", f"fxc: error: {message}\nhint: {hint}\n")


def test_stdout_is_for_one_thing(fxc: Any, artifact: Artifact) -> None:
    for other in ("--json", "--code", "--graph"):
        assert fxc("inspect", "abcd", "--html", "-", other).code == 2


def test_a_page_that_cannot_be_written_leaves_the_old_one(fxc: Any, artifact: Artifact, monkeypatch: Any) -> None:
    Path("page.html").write_text("old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    told = fxc("inspect", "abcd", "--html", "page.html")
    assert (told.code, told.err) == (1, "fxc: error: --html page.html cannot be written: No space left on device\n")
    assert Path("page.html").read_text() == "old"
    assert [entry.name for entry in Path().iterdir() if "page" in entry.name] == ["page.html"]


def test_links_and_pipes_stay_what_they_are(fxc: Any, artifact: Artifact) -> None:
    Path("site").mkdir()
    Path("page.html").symlink_to("site/index.html")
    assert fxc("inspect", "abcd", "--html", "page.html", "-q").code == 0
    assert Path("page.html").is_symlink()
    text = Path("site/index.html").read_text()
    os.mkfifo("pipe")
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True)
    assert fxc("inspect", "abcd", "--html", "pipe", "-q").code == 0
    assert reader.communicate(timeout=30)[0] == text
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


def test_a_damaged_artifact(fxc: Any, artifact: Artifact) -> None:
    (artifact.path / "rank_0_0/computation_graph.py").write_text("x")
    assert fxc("inspect", "abcd", "--html", "page.html").code == 5
    assert not Path("page.html").exists()


def test_inspect_without_a_page_is_light(artifact: Artifact, tmp_path: Path) -> None:
    script = "import sys; from fxc.cli.main import run; run(sys.argv[1:]); print('jinja2' in sys.modules, 'torch' in sys.modules)"
    environ = {**os.environ, "FXC_CACHE_DIR": str(tmp_path / "cache")}
    for more, told in (([], "False False"), (["--html", str(tmp_path / "page.html")], "True False")):
        command = [sys.executable, "-c", script, "inspect", "abcd", *more]
        assert subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.strip() == told
