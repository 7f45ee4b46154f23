"""The picture of a benchmark: its points, its axes, and that it is XML."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from fxc.cli import plot
from fxc.cli.plot import Axis
from tests.benched import on_cpu, on_gpu

SVG = "{http://www.w3.org/2000/svg}"


def test_points() -> None:
    latency = plot.lines(on_gpu(), lambda _, seconds: seconds * 1e6)
    assert {name: [round(y, 6) for _, y in points] for name, points in latency.items()} == {
        "eager": [20000, 21000], "compiled": [8000, 8000], "piecewise": [6000], "full": [5000, 6000],
        "roofline": [4000, 4100],
    }  # fmt: skip
    assert [x for x, _ in latency["full"]] == [8, 12]
    rate = plot.lines(on_gpu(), lambda rows, seconds: rows / seconds)
    assert [round(y, 6) for _, y in rate["full"]] == [1600, 2000]
    assert list(plot.lines(on_cpu(), lambda rows, _: rows)) == ["eager", "compiled"]


def test_axes_are_logarithmic() -> None:
    across, up = Axis(1, 100, 10, 210), Axis(10, 1000, 300, 100)
    assert [across.at(value) for value in (1, 10, 100)] == [10, 110, 210]
    assert [up.at(value) for value in (10, 100, 1000)] == [300, 200, 100]


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (3, 40, [2, 5, 10, 20, 50]), (5, 5, [5, 10]), (1, 1, [1, 2]), (0.3, 0.9, [0.2, 0.5, 1]), (10, 100, [10, 20, 50, 100]),
        (5000, 81000, [5000, 10000, 20000, 50000, 100000]), (2, 30000, [1, 10, 100, 1000, 10000, 100000]),
    ],
)  # fmt: skip
def test_ticks_enclose_all_values(low: float, high: float, marks: list[float]) -> None:
    assert plot.ticks(low, high) == pytest.approx(marks)


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (1, "1"), (500, "500"), (1000, "1k"), (20000, "20k"), (5e6, "5M"), (1e9, "1G")]
)
def test_numbers_along_an_axis(value: float, text: str) -> None:
    assert plot.shown(value) == text


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_picture() -> None:
    root = ElementTree.fromstring(plot.svg(on_gpu()))
    found = texts(root)
    assert found[0] == "Llama, GPU <H>, torch 2.11.0, context 1024"
    assert found[1:6] == ["eager", "compiled", "piecewise", "full", "roofline"]
    assert [text for text in found if text in ("latency, µs", "tokens per second")] == [
        "latency, µs",
        "tokens per second",
    ]
    assert found.count("requests that decode one token each") == 2
    assert {"8", "12", "2k", "20k"} <= set(found)
    curves = list(root.iter(f"{SVG}polyline"))
    assert len(curves) == 10
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for curve in curves:
        for point in curve.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 < x < width
            assert 0 < y < height
    eager, full = ([float(p.split(",")[1]) for p in curves[index].attrib["points"].split()] for index in (0, 3))
    assert eager[1] < eager[0] < full[1] < full[0]  # slower is higher up


def test_picture_of_one_size() -> None:
    result = msgspec.structs.replace(on_cpu(), sizes=on_cpu().sizes[:1])
    root = ElementTree.fromstring(plot.svg(result))
    assert "num_tokens" in texts(root)
    assert len(list(root.iter(f"{SVG}circle"))) == 4
