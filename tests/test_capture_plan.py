"""The note of what graphs took."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxc.capture_plan import CapturePlan, Recorded, beside, note, read

EIGHT = Recorded({"n": 8}, "full", 100, 0.5)
ONE = Recorded({"n": 1}, "piecewise", 10, 0.1)


def test_sizes_are_put_in_place_of_what_was_said_of_them(tmp_path: Path) -> None:
    file = beside(tmp_path / "abc")
    assert (file.name, read(file)) == ("abc.captures.json", None)
    assert beside(tmp_path / "v1" / "artifacts" / "abc") == tmp_path / "v1" / "captures" / "abc.json"
    note(file, "GPU", "2.11", [EIGHT, ONE])
    again = Recorded({"n": 8}, "full", 90, 0.4)
    note(file, "GPU", "2.11", [again])
    assert read(file) == CapturePlan("GPU", "2.11", (again, ONE))
    assert CapturePlan("GPU", "2.11", (again, ONE)).bytes == {"full n=8": 90, "piecewise n=1": 10}
    assert [path.name for path in tmp_path.iterdir()] == ["abc.captures.json"]


@pytest.mark.parametrize(("device", "torch"), [("other GPU", "2.11"), ("GPU", "2.12")])
def test_what_another_gpu_or_torch_took_is_dropped(tmp_path: Path, device: str, torch: str) -> None:
    file = beside(tmp_path / "abc")
    note(file, "GPU", "2.11", [EIGHT])
    note(file, device, torch, [ONE])
    assert read(file) == CapturePlan(device, torch, (ONE,))


def test_where_it_cannot_be_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "captures").write_text("no directory")
    note(beside(tmp_path / "v1" / "artifacts" / "abc"), "GPU", "2.11", [EIGHT])
    assert [path.name for path in (tmp_path / "v1").iterdir()] == ["captures"]
    file = beside(tmp_path / "abc")
    file.write_text("{")
    assert read(file) is None
    note(file, "GPU", "2.11", [EIGHT])
    assert read(file) == CapturePlan("GPU", "2.11", (EIGHT,))
