"""Options, identities, order, and the check of what a pass leaves."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import fx

from fxc.errors import PassError, SpecError
from fxc.passes import PIPELINE, Found, Fusion, NearMiss, New, Outcome, Pass, configure, enabled, identity, run
from fxc.passes.match import Call, Constant, Tensor
from fxc.shapes import Range
from tests.building import target
from tests.passes.pieces import BOX, reasons

aten = torch.ops.aten
TEXT = (
    'def piece(in_0: "f32[n, 8]", in_1: "f32[n, 8]"):\n'
    "    add = torch.ops.aten.add.Tensor(in_0, 2)  # f32[n, 8]\n"
    "    mul = torch.ops.aten.mul.Tensor(add, in_1)  # f32[n, 8]\n"
    "    relu = torch.ops.aten.relu.default(mul)  # f32[n, 8]\n"
    "    return (relu,)\n"
)


@dataclass(frozen=True)
class Swap(Fusion):
    """(a + k) * b -> b * (k + a), for tests."""

    least: float = 0.0
    sizes: tuple[int, ...] = ()
    name: ClassVar[str] = "swap"
    pattern = Call(aten.mul.Tensor, (Call(aten.add.Tensor, (Tensor("a"), Constant("k"))), Tensor("b")), commutes=True)

    def anchors(self, graph: fx.Graph, box: Range) -> list[fx.Node]:
        return graph.find_nodes(op="call_function", target=aten.mul.Tensor)

    def check(self, found: Found) -> NearMiss | None:
        return NearMiss("add", "too small") if found.values["k"] < self.least else None

    def replace(self, new: New, found: Found) -> Mapping[str, fx.Node]:
        more = new.call(aten.add.Tensor, found.values["a"], found.values["k"] + 1)
        return {"root": new.call(aten.mul.Tensor, found.values["b"], more)}


def test_the_pipeline_is_a_tuple_of_dataclasses_with_names_of_their_own() -> None:
    names = [cls.name for cls in PIPELINE]
    assert len({*names}) == len(names)
    assert all(name.isidentifier() for name in names)
    assert names[:2] == ["attention_quant", "noop"]
    assert configure({}, PIPELINE) == tuple(cls() for cls in PIPELINE)


def test_options_reach_their_pass() -> None:
    given = {"swap": {"least": 1, "sizes": [1, 2], "expect": 3}, "noop": {"enabled": False}}
    found = configure(given, (*PIPELINE, Swap))
    assert found[-1] == Swap(least=1.0, sizes=(1, 2), expect=3)
    assert [entry.name for entry in found if not entry.enabled] == ["noop"]


@pytest.mark.parametrize(
    ("section", "message", "hint"),
    [
        ({"nop": {}}, "passes.nop: unknown key", "did you mean 'noop'?"),
        ({"swap": {"lest": 1}}, "passes.swap.lest: unknown key", "did you mean 'least'?"),
        ({"swap": {"least": "a"}}, "passes.swap.least: 'a' is text, expected a number", ""),
        ({"swap": {"expect": 1.5}}, "passes.swap.expect: 1.5 is a number, expected a whole number", ""),
        ({"noop": {"expect": -1}}, "passes.noop.expect: -1, expected 0 or more matches", ""),
        ({"swap": True}, "passes.swap: true is a boolean, expected a mapping with the keys enabled, expect, least, sizes", ""),
    ],
)  # fmt: skip
def test_what_no_pass_takes(section: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        configure(section, (*PIPELINE, Swap))
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_names_are_unique() -> None:
    with pytest.raises(SpecError, match="two passes are called 'swap'"):
        configure({}, (Swap, Swap))


def test_levels() -> None:
    passes = configure({}, PIPELINE)
    assert enabled(passes, 0, target()) == ()
    assert [entry.name for entry in enabled(passes, 1, target())] == ["noop"]
    on_cpu = tuple(entry for entry in passes if entry.name != "row_linear")
    assert enabled(passes, 2, target()) == enabled(passes, 3, target()) == on_cpu
    assert enabled((Swap(enabled=False),), 3, target()) == ()


@pytest.mark.parametrize(("capability", "fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_that_know_no_fp8_get_no_kernels_of_it(capability: tuple[int, int], fp8: bool) -> None:
    gpu = msgspec.structs.replace(target(), device="cuda", compute_capability=capability)
    assert ("norm_quant" in [entry.name for entry in enabled(configure({}, PIPELINE), 2, gpu)]) == fp8


def test_a_fusion_replaces_what_it_matches() -> None:
    ran = run(TEXT, BOX, [Swap()])
    assert ran.text == TEXT.replace("add.Tensor(in_0, 2)", "add.Tensor(in_0, 3)").replace("(add, in_1)", "(in_1, add)")
    assert ran.changed_by == (Swap(),)
    assert ran.outcomes == (("swap", Outcome(("mul",), ())),)


def test_passes_run_in_order() -> None:
    assert "add.Tensor(in_0, 4)" in run(TEXT, BOX, [Swap(), Swap()]).text


def test_nothing_found_is_nothing_changed() -> None:
    ran = run(TEXT, BOX, [Swap(least=3.0)])
    assert (ran.text, ran.changed_by, ran.identity) == (TEXT, (), "")
    assert reasons(ran, "swap") == ["add: too small"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("add.Tensor(in_0, 2)", "sub.Tensor(in_0, 2)", "add: is aten::sub, expected aten::add"),
        ("add.Tensor(in_0, 2)", "add.Tensor(in_0, 2, alpha=3)", "add: its alpha is 3"),
        ("add.Tensor(in_0, 2)", "add.Tensor(in_0, in_1)", "in_1: k is not a constant"),
        ("(relu,)", "(relu, add)", "add: its value is used by output, too"),
        ("(add, in_1)  # f32[n, 8]\n", "(add, in_1)  # f32[n, 8]\n    o = torch.ops.aten.neg_.default(in_0)  # f32[n, 8]\n",
         "in_0: it is written into in this piece"),
    ],
)  # fmt: skip
def test_near_misses_name_a_node_and_what_is_different(old: str, new: str, reason: str) -> None:
    text = TEXT.replace(old, new)
    ran = run(text, BOX, [Swap()])
    assert (ran.text, reasons(ran, "swap")) == (text, [reason])


def test_what_a_piece_may_have_that_passes_do_not_know() -> None:
    """Sizes that depend on data, and dtypes that have no short name."""
    text = TEXT.replace("# f32[n, 8]", "# f32[u0, 8]", 2)
    ran = run(text, BOX, [Swap()])
    assert (ran.text, reasons(ran, "swap")) == (text, ["mul: its size depends on data"])
    text = TEXT.replace("(relu,)", "(relu, view)").replace(
        "    return", "    view = torch.ops.aten.view.dtype(relu, torch.uint32)  # torch.uint32[n, 8]\n    return"
    )
    assert run(text, BOX, [Swap(least=3.0)]).text == text
    assert run(text, BOX, [Swap()]).changed_by == (Swap(),)


def test_a_pass_may_ask_for_a_range() -> None:
    @dataclass(frozen=True)
    class Small(Swap):
        def wants(self, box: Range) -> bool:
            return all(high <= 8 for _, _, high in box.bounds)

    assert run(TEXT, BOX, [Small()]).outcomes == ()
    assert run(TEXT, Range((("n", 1, 8),)), [Small()]).changed_by


class Broken(Pass):
    name: ClassVar[str] = "broken"

    spoil: Any

    def __init__(self, spoil: Any) -> None:
        object.__setattr__(self, "spoil", spoil)

    def run(self, graph: fx.Graph, box: Range) -> Outcome:
        self.spoil(graph, {node.name: node for node in graph.nodes})
        return Outcome(("add",))


def narrower(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    with graph.inserting_before(nodes["output"]):
        half = graph.call_function(aten.slice.Tensor, (nodes["relu"], 1, 0, 4))
    nodes["output"].args = ((half,),)


def unsorted(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["add"].args = (nodes["mul"], 2)


def fewer(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["output"].args = ((),)


def without_input(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["mul"].args = (nodes["add"], nodes["add"])
    graph.erase_node(nodes["in_1"])


def writing(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    with graph.inserting_before(nodes["relu"]):
        graph.call_function(aten.neg_.default, (nodes["in_0"],))


def raising(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            narrower,
            "leaves a graph that is not valid: its result slice_tensor is f32[n, 4] strides [8, 1], expected f32[n, 8]",
        ),
        (
            unsorted,
            "leaves a graph that is not valid: Argument 'mul' of Node 'add' was used before it has been defined",
        ),
        (fewer, "leaves a graph that is not valid: it has 0 results, expected 1"),
        (without_input, "leaves a graph that is not valid: its inputs are in_0, they were 2"),
        (writing, "leaves a graph that is not valid: it writes into in_0, expected nothing"),
        (raising, "failed: KeyError: 'gone'"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(spoil: Any, message: str) -> None:
    with pytest.raises(PassError) as caught:
        run(TEXT, BOX, [Broken(spoil)])
    assert caught.value.message.startswith(f"pass broken {message}")
    assert caught.value.hint == "mend it, or build with --set passes.broken.enabled=false"


def test_ops_of_others_must_not_come_in() -> None:
    """A server would have to import what registers them."""
    library = torch.library.Library("passes_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x.new_empty(x.shape), "Meta")

    def foreign(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["relu"].target = torch.ops.passes_test.twice.default

    with pytest.raises(PassError, match="relu calls passes_test::twice: a pass may put in ops of aten and fxc only"):
        run(TEXT, BOX, [Broken(foreign)])


def test_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, the pass's own source and its kernels' are in it; whether and how often it has to match is not."""
    plain = identity(Swap())
    assert identity(Swap(expect=3)) == identity(Swap(enabled=True)) == plain
    assert identity(Swap(least=1.0)) != plain
    seen = {plain}
    for source in ("A = 1\n", "A = 2\n"):
        (tmp_path / "some_pass.py").write_text(source)
        monkeypatch.setattr("inspect.getfile", lambda cls: str(tmp_path / "some_pass.py"))
        seen.add(identity(Swap()))
    with_kernels = type("Swap", (Swap,), {"kernels": ("some_kernels",)})
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: SimpleNamespace(origin=str(tmp_path / f"{n}.py")))
    for source in ("B = 1\n", "B = 2\n"):
        (tmp_path / "some_kernels.py").write_text(source)
        seen.add(identity(with_kernels()))
    assert len(seen) == 5


def test_every_named_kernel_is_a_module() -> None:
    for cls in PIPELINE:
        for name in cls.kernels:
            assert importlib.util.find_spec(name) is not None
        assert identity(cls())
