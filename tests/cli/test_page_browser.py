"""The page in a browser: a second page holds it in a frame, uses it, and writes down what happens."""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fxc.cli.page import render_page
from fxc.cli.page.view import view
from tests.cli.pages import CODE, GRAPH, PIECES, shown

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--dump-dom",
    "--virtual-time-budget=20000", "--force-prefers-reduced-motion",
)  # fmt: skip
MARKER = "errors are seen"
HARNESS = """<!DOCTYPE html>
<link rel="icon" href="data:,">
<iframe id="frame" width="1200" height="800" src="page.html"></iframe>
<pre id="told"></pre>
<script>
const frame = document.getElementById("frame");
const wait = () => new Promise((done) => setTimeout(done, 300));
const told = {};
frame.onload = async () => {
  frame.onload = null;
  const inner = frame.contentWindow, page = frame.contentDocument, all = (query) => [...page.querySelectorAll(query)];
  const shown = () => all(".panel").filter((panel) => panel.getClientRects().length).map((panel) => panel.id);
  const current = () => [...new Set(all("[aria-current]").map((link) => link.hash))];
  const press = (key) => page.activeElement.dispatchEvent(new inner.KeyboardEvent("keydown", { key, bubbles: true }));
  const step = async (name, act) => { act(); await wait(); told[name] = [shown(), current()]; };
  await step("first", () => {});
  await step("clicked", () => all(".strip a")[3].click());
  told.graph = all("#piece_1 .rows li").map((row) => row.textContent.trim().replace(/\\s+/g, " "));
  await step("op", () => all(".strip a")[1].click());
  await step("section", () => all("nav a").find((link) => link.hash === "#proof").click());
  all(".strip a")[0].focus();
  press("ArrowRight");
  press("ArrowRight");
  told.focused = all(".strip a").indexOf(page.activeElement);
  press("Home");
  told.home = all(".strip a").indexOf(page.activeElement);
  told.stops = all(".strip a").filter((link) => link.tabIndex === 0).length;
  await step("entered", () => all(".strip a")[0].click());
  all("#piece_0 .rows li")[3].focus();
  for (const name of ["active", "source", "user"])
    told[name] = all("#piece_0 .rows li." + name).map((row) => row.querySelector(".name").textContent);
  told.lit = all("#piece_0 path.on").length;
  told.dots = all("#piece_0 .dot").map((dot, index) => {
    const row = all("#piece_0 .rows li")[index].getBoundingClientRect(), at = dot.getBoundingClientRect();
    return Math.round(Math.abs((at.top + at.bottom) / 2 - (row.top + row.bottom) / 2));
  });
  told.widths = [];
  for (const width of [1200, 700, 320]) {
    frame.width = width;
    await wait();
    told.widths.push([width, page.documentElement.scrollWidth]);
  }
  const stops = () => all(".scroll").filter((box) => box.getClientRects().length && !box.closest("details")).map((box) => (box.scrollWidth > box.clientWidth) === (box.tabIndex === 0));
  for (let turn = 0; turn < 50 && !stops().every(Boolean); turn++) await wait();  // the page hears of a new width a little later
  told.stopsOfTables = stops();
  document.getElementById("told").textContent = JSON.stringify(told);
  console.error("MARKER");
};
</script>
""".replace("MARKER", MARKER)


class Seen(NamedTuple):
    told: dict[str, Any]
    console: list[str]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """What happened in the browser, and what it wrote to its console."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(render_page(view(shown(), CODE, GRAPH, PIECES)), encoding="utf-8")
    (folder / "harness.html").write_text(HARNESS, encoding="utf-8")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield _visit(f"http://127.0.0.1:{server.server_address[1]}/harness.html", folder / "profile")
    finally:
        server.shutdown()
        server.server_close()


def _visit(address: str, profile: Path) -> Seen:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", address]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
    written = re.search(r'<pre id="told">(.+?)</pre>', done.stdout, re.DOTALL)
    assert written is not None, done.stderr
    console = re.findall(r"CONSOLE[(:]\d+\)?\] \"(.*)\", source", done.stderr)
    return Seen(json.loads(html.unescape(written[1])), console)


def test_no_errors_on_the_console(seen: Seen) -> None:
    assert seen.console == [MARKER]


def test_choosing_a_piece_shows_it(seen: Seen) -> None:
    assert seen.told["first"] == [["piece_0"], ["#piece_0"]]
    assert seen.told["clicked"] == [["piece_1"], ["#piece_1"]]
    assert seen.told["graph"] == [
        "in_1 its result f32[8]",
        "in_0 from piece_0 f32[n, 4]",
        "copy_ copy_ in_1, in_0 f32[8]",
    ]
    assert seen.told["op"] == [["op-zoo-mix"], ["#op-zoo-mix"]]
    assert seen.told["section"] == [["piece_0"], ["#piece_0"]]


def test_keys(seen: Seen) -> None:
    assert (seen.told["focused"], seen.told["home"], seen.told["stops"]) == (2, 0, 1)
    assert seen.told["entered"] == [["piece_0"], ["#piece_0"]]


def test_a_row_shows_its_neighbours(seen: Seen) -> None:
    assert seen.told["active"] == ["linear"]
    assert seen.told["source"] == ["in_0", "in_1"]
    assert seen.told["user"] == ["view"]
    assert seen.told["lit"] == 3


def test_dots_stand_beside_their_rows(seen: Seen) -> None:
    assert max(seen.told["dots"]) <= 1


def test_nothing_is_wider_than_the_window(seen: Seen) -> None:
    assert all(needed <= width for width, needed in seen.told["widths"])
    assert all(seen.told["stopsOfTables"])
