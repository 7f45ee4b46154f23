"""What stands in for Inductor's call of the host compiler, with a compiler that only notes what it is asked."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fxc.host_compiler import HostCompiler

INTERFACE = "// entry points\nint entry() { return 1; }"
DEVICE = "#define CPU\n"
SOURCE = f"{DEVICE}{INTERFACE}\nint model() {{ return 2; }}\n"


class Place:
    """A compiler that writes its arguments to a log and makes the file after -o."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.scratch = path / "scratch"
        self.scratch.mkdir()
        self.gxx = path / "g++"
        self.gxx.write_text(
            f'#!/bin/sh\necho "$@" >> {self.log}\n'
            'case "$*" in *-mfails*) exit 1;; *-mkilled*) exit 137;; esac\n'
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n'
        )
        self.gxx.chmod(self.gxx.stat().st_mode | stat.S_IXUSR)
        self.ran: list[str] = []

    def compiler(self, make: bool = True, identity: str = "torch 1", baseline: str = "") -> HostCompiler:
        return HostCompiler(lambda line, cwd: self.ran.append(line), INTERFACE, self.scratch, make, identity, baseline)

    def compile(self, host: HostCompiler, flags: str = "-O2", text: str = SOURCE) -> str:
        source = self.path / "piece.cpp"
        source.write_text(text)
        host(f"{self.gxx} {source} {flags} -c -o {self.path / 'piece.o'}", str(self.path))
        return self.ran[-1]

    def made(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.scratch.iterdir() if path.name.endswith(suffix))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    monkeypatch.setenv("CXX", str(place.gxx))
    return place


def test_the_interface_is_compiled_once_and_linked_to_each_piece(place: Place) -> None:
    host = place.compiler()
    line = place.compile(host)
    assert f" -include {place.scratch}/" in line
    assert INTERFACE not in (place.path / "piece.cpp").read_text()
    assert "int model()" in (place.path / "piece.cpp").read_text()
    assert (len(place.made(".h.gch")), len(place.made(".o"))) == (1, 1)
    host(f"{place.gxx} -shared {place.path / 'piece.o'} -o piece.so", str(place.path))
    assert str(place.scratch / place.made(".o")[0]) in place.ran[-1].split()
    before = place.log.read_text()
    place.compile(host)
    assert place.log.read_text() == before


@pytest.mark.parametrize("change", ["flags", "identity"])
def test_other_flags_or_versions_share_nothing(place: Place, change: str) -> None:
    place.compile(place.compiler())
    place.compile(
        place.compiler(identity="torch 2" if change == "identity" else "torch 1"), "-O3" if change == "flags" else "-O2"
    )
    assert (len(place.made(".h.gch")), len(place.made(".o"))) == (2, 2)


def test_nothing_is_made_for_few_binaries_but_what_is_there_is_used(place: Place) -> None:
    line = place.compile(place.compiler(make=False))
    assert (place.made(""), "-include" in line) == ([], False)
    assert INTERFACE in (place.path / "piece.cpp").read_text()
    place.compile(place.compiler())
    assert "-include" in place.compile(place.compiler(make=False))


def test_other_sources_pass_through(place: Place) -> None:
    line = place.compile(place.compiler(), text="int other;\n")
    assert line == f"{place.gxx} {place.path / 'piece.cpp'} -O2 -c -o {place.path / 'piece.o'}"
    place.compiler()(f"{place.gxx} --version", str(place.path))
    assert place.ran[-1] == f"{place.gxx} --version"


def test_flags_that_are_changed(place: Place) -> None:
    line = place.compile(place.compiler(make=False, baseline="x86-64-v3"), "-g1 -march=native -O2")
    assert "-march=x86-64-v3" in line
    assert "-g1" not in line.split()
    assert "-march=native" in place.compile(place.compiler(make=False), "-march=native")


def test_a_flag_is_asked_about_once(place: Place) -> None:
    host = place.compiler()
    assert [host.accepts(["-mgood"], "int x;"), host.accepts(["-mfails"], "int x;")] == [True, False]
    before = place.log.read_text()
    assert [host.accepts(["-mgood"], "int x;"), host.accepts(["-mfails"], "int x;")] == [True, False]
    assert place.log.read_text() == before


def test_a_killed_compiler_is_no_answer(place: Place) -> None:
    host = place.compiler()
    assert not host.accepts(["-mkilled"], "int x;")
    assert place.made(".accepted") == []
