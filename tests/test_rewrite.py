"""Passes of a build: which ones run, what they found, and the keys of what they change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fxc import identity, lower, pipeline, rewrite
from fxc.cli import report
from fxc.errors import PassError, SpecError, UsageError
from fxc.manifest import NearMiss, PassReport, PassSite
from fxc.passes import Outcome, Pass, Ran, run
from fxc.plan import Plan, make_plan
from fxc.shapes import Range
from fxc.spec import parse_spec
from tests.building import target
from tests.test_lower import PIECE

ON_CPU = ["attention_quant", "noop", "norm_quant", "gated_quant", "norm_rope", "rope_write"]
MODEL = """
import torch
from torch import nn
from torch.nn.functional import silu

class Gated(nn.Module):
    def __init__(self, limit=448.0):
        super().__init__()
        self.limit = limit
        self.register_buffer("scale", torch.tensor(0.5))

    def half(self, x):
        gate, up = x.reshape(-1, 64).chunk(2, -1)
        return (silu(gate) * up / self.scale).clamp(-self.limit, self.limit).to(torch.float8_e4m3fn)

    def forward(self, x):
        return self.half(x)
"""
CUSTOM = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from fxc.passes import Outcome, Pass

aten = torch.ops.aten

@dataclass(frozen=True)
class Wider(Pass):
    """Makes every SiLU a GELU: no pass anybody wants."""
    approximate: str = "none"
    name: ClassVar[str] = "wider"

    def run(self, graph, box):
        found = graph.find_nodes(op="call_function", target=aten.silu.default)
        for node in found:
            node.target, node.kwargs = aten.gelu.default, {"approximate": self.approximate}
        return Outcome(tuple(node.name for node in found))

NUMBER = 3
'''  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "custom.py").write_text(CUSTOM)
    return tmp_path


def plan(
    folder: Path,
    passes: dict[str, Any] | None = None,
    limit: float = 448.0,
    extra: tuple[Pass, ...] = (),
    **compile: Any,
) -> Plan:
    spec = {
        "model": {"target": "./model.py:Gated", "args": {"limit": limit}},
        "device": "cpu",
        "inputs": {"x": {"shape": ["n", 64], "dtype": "float32"}},
        "dims": {"n": {"min": 1, "max": 64}},
        "compile": {"level": 2, "sizes": [4], "ranges": [8], **compile},
        "passes": passes or {},
    }  # fmt: skip
    return make_plan(parse_spec(spec), folder, target(), extra)


def found(plan: Plan, name: str) -> PassReport:
    (entry,) = [entry for entry in plan.manifest.passes if entry.name == name]
    return entry


def test_what_passes_found_is_told_for_each_piece_and_range(folder: Path) -> None:
    made = plan(folder)
    labels = ["n=4", "n=1..8", "n=9..64"]
    assert [site.shape for site in found(made, "noop").sites] == labels
    assert [(site.piece, site.shape, site.matches) for site in found(made, "gated_quant").sites] == [
        ("piece_0", label, ("to",)) for label in labels
    ]
    assert {entry.name: entry.matches for entry in made.manifest.passes if entry.matches} == {
        "noop": 1,
        "gated_quant": 1,
    }
    assert [entry.name for entry in made.manifest.passes] == ON_CPU
    assert not any(entry.missed for entry in made.manifest.passes)
    for unit in made.units:
        assert "torch.ops.fxc.gated_fp8" in unit.text
        assert "aten.silu" in unit.piece.text, "what it is compared with"


def test_a_pass_that_found_nothing_where_it_might_have(folder: Path) -> None:
    made = plan(folder, limit=500.0)
    entry = found(made, "gated_quant")
    assert (entry.matches, entry.missed) == (0, True)
    miss = NearMiss(node="clamp", reason="clamps to -500.0..500.0, expected -448..448 or less")
    assert entry.sites[0] == PassSite(piece="piece_0", shape="n=4", near_misses=(miss,))
    assert report._missed(entry) == (
        "pass gated_quant matched nothing: clamp of piece_0 at n=4: clamps to -500.0..500.0, expected -448..448 or less, "
        "and 2 more: see `fxc inspect`"
    )


def test_expect(folder: Path) -> None:
    assert plan(folder, {"gated_quant": {"expect": 1}, "norm_quant": {"expect": 0}})
    with pytest.raises(PassError) as caught:
        plan(folder, {"gated_quant": {"expect": 2}})
    assert caught.value.message == "pass gated_quant matched 1 times, passes.gated_quant.expect is 2"
    with pytest.raises(PassError) as caught:
        plan(folder, {"gated_quant": {"expect": 1}}, limit=500.0)
    assert caught.value.hint.startswith("piece_0 n=4, clamp: clamps to")


def test_levels(folder: Path) -> None:
    names = {level: [entry.name for entry in plan(folder, level=level).manifest.passes] for level in (0, 1, 2)}
    assert names == {0: [], 1: ["noop"], 2: ON_CPU}
    assert plan(folder, {"gated_quant": {"expect": 7}}, level=1), "it does not run there"


def test_a_pass_can_be_switched_off(folder: Path) -> None:
    made = plan(folder, {"gated_quant": {"enabled": False}})
    assert [entry.name for entry in made.manifest.passes] == [name for name in ON_CPU if name != "gated_quant"]
    assert "fxc." not in made.units[0].text


def test_custom_passes(folder: Path) -> None:
    made = plan(
        folder, {"custom": ["./custom.py:Wider"], "gated_quant": {"enabled": False}, "wider": {"approximate": "tanh"}}
    )
    assert found(made, "wider").matches == 1
    assert "approximate='tanh'" in made.units[0].text
    assert "custom.py" in [source.file for source in made.manifest.sources]


def test_passes_from_python(folder: Path) -> None:
    from fxc.models.files import load_file

    own = load_file(folder / "custom.py").Wider()
    made = plan(folder, {"gated_quant": {"enabled": False}}, extra=(own,))
    assert found(made, "wider").matches == 1


def test_two_passes_of_one_name_and_passes_without_a_file(folder: Path) -> None:
    from fxc.models.files import load_file

    own = load_file(folder / "custom.py").Wider()
    with pytest.raises(UsageError, match="two passes are called wider"):
        plan(folder, extra=(own, own))
    idle = {"name": "nowhere", "__module__": "no_such_module", "run": lambda self, graph, box: Outcome()}
    nowhere = type("Nowhere", (Pass,), idle)
    with pytest.raises(UsageError, match="pass nowhere: Nowhere is defined in no file"):
        plan(folder, extra=(nowhere(enabled=True),))


def test_a_pass_that_has_to_match_and_cannot_run() -> None:
    old = msgspec.structs.replace(target(), device="cuda", compute_capability=(8, 0))
    data = {"model": {"target": "a:B"}, "device": "cuda", "inputs": {"x": {"shape": [1], "dtype": "float32"}}}
    with pytest.raises(PassError, match="pass norm_quant does not run on compute capability 8.0"):
        rewrite.passes(parse_spec({**data, "passes": {"norm_quant": {"expect": 1}}}), Path(), old)
    for options in ({"expect": 0}, {"expect": 1, "enabled": False}):
        assert rewrite.passes(parse_spec({**data, "passes": {"norm_quant": options}}), Path(), old)


@pytest.mark.parametrize(
    ("custom", "message", "hint"),
    [
        ("./custom.py:Widr", "passes.custom[0]: ./custom.py has no 'Widr'", "did you mean 'Wider'?"),
        ("./custom.py:NUMBER", "passes.custom[0]: NUMBER in ./custom.py is no pass", "derive a frozen dataclass with a `name` from fxc.passes.Pass"),
        ("./custm.py:Wider", "passes.custom[0]: {}/custm.py does not exist", "the path is relative to model.yaml"),
        ("no_such_module:Wider", "passes.custom[0]: no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'", "see the traceback with -v"),
    ],
)  # fmt: skip
def test_custom_passes_that_are_none(folder: Path, custom: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan(folder, {"custom": [custom]})
    assert caught.value.message.startswith(message.format(folder))
    assert caught.value.hint == hint


def test_an_unknown_pass_is_refused_before_the_model_is_looked_at(folder: Path) -> None:
    (folder / "model.py").write_text("raise SystemExit")
    with pytest.raises(SpecError, match="passes.gated_qant: unknown key"):
        plan(folder, {"gated_qant": {}})


def test_passes_in_keys(folder: Path) -> None:
    """An edited pass never gets what the old one made; one that found nothing changes the artifact's name alone."""
    custom = {"custom": ["./custom.py:Wider"]}
    keys, hashes = [], []
    for edit in ("", "# a remark\n"):
        (folder / "custom.py").write_text(CUSTOM + edit)
        made = plan(folder, {**custom, "gated_quant": {"enabled": False}})
        keys.append([unit.key for unit in made.units])
        hashes.append(made.manifest.hash)
    for edit in ("# another\n", "# and another\n"):
        (folder / "custom.py").write_text(CUSTOM + edit)
        made = plan(folder, custom)
        keys.append([unit.key for unit in made.units])
        hashes.append(made.manifest.hash)
    assert len({*hashes}) == 4
    assert keys[0] != keys[1]
    assert keys[2] == keys[3], "behind gated_quant there is no SiLU left"
    assert len({*keys[0], *keys[1], *keys[2]}) == 9


def test_what_the_key_of_a_unit_has_of_passes() -> None:
    one = lower.unit(PIECE, Range((("n", 1, 64),)), 2, target(), "piece_0")
    text = PIECE.text.replace("aten.neg", "fxc.neg")
    others = [
        one,
        dataclasses.replace(one, text=text),
        dataclasses.replace(one, text=text, passes="a"),
        dataclasses.replace(one, passes="a"),
    ]
    assert len({unit.key for unit in others}) == 4


def test_kernels_are_in_the_key_of_what_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lower.unit(PIECE, Range((("n", 1, 64),)), 2, target(), "piece_0")
    fused = dataclasses.replace(plain, text=PIECE.text.replace("aten.neg", "fxc.neg"))
    before = plain.key, fused.key
    monkeypatch.setattr(lower, "KERNELS", "others")
    assert (plain.key == before[0], fused.key == before[1]) == (True, False)


def test_a_pass_that_fails_names_the_piece(folder: Path) -> None:
    (folder / "custom.py").write_text(
        CUSTOM.replace("return Outcome", "raise ValueError('oh')\n        return Outcome")
    )
    with pytest.raises(PassError) as caught:
        plan(folder, {"custom": ["./custom.py:Wider"]})
    assert caught.value.message == "piece_0 n=4: pass wider failed: ValueError: oh"


def test_passes_run_once_for_equal_pieces_and_ranges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(*args: Any) -> Ran:
        seen.append(args[1].label)
        return run(*args)

    monkeypatch.setattr(rewrite, "run", counted)
    plan(folder)
    assert seen == ["n=4", "n=1..8", "n=9..64"]


def test_built_and_proved_from_python(folder: Path) -> None:
    """The binary of the rewritten piece equals eager of the piece as it was traced; a wrong pass is found out."""
    from fxc.errors import ProofError
    from fxc.models.files import load_file

    (folder / "model.yaml").write_text(
        "model: {target: ./model.py:Gated}\ndevice: cpu\ninputs: {x: {shape: [n, 64], dtype: float32}}\n"
        "dims: {n: {min: 1, max: 64}}\n"
    )
    cache = folder / "cache"
    result = pipeline.build(folder / "model.yaml", cache_dir=cache, jobs=1)
    counts = {entry.name: entry.matches for entry in result.passes}
    assert counts == dict.fromkeys(ON_CPU, 0) | {"noop": 1, "gated_quant": 1}
    assert max(line.max_rel_err for line in result.proof) < 0.02
    again = pipeline.build(folder / "model.yaml", cache_dir=cache)
    assert (again.hit, again.passes) == (True, result.passes)
    wrong = load_file(folder / "custom.py").Wider()
    with pytest.raises(ProofError, match="does not equal eager") as caught:
        pipeline.build(
            folder / "model.yaml", cache_dir=cache, jobs=1, passes=[wrong],
            overrides=["passes.gated_quant.enabled=false"],
        )  # fmt: skip
    assert caught.value.hint.endswith(f"--set passes.{wrong.name}.enabled=false")
    assert identity.own_code()
    assert torch.is_grad_enabled()
