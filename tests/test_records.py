"""Records of GPUs: those that are shipped, and what is said of a file that is none."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from fxc import machine, records
from fxc.errors import IncompatibleError, UsageError
from fxc.target import X86_64_V2, X86_64_V3, Target

SHIPPED = {
    "a100": ("sm_80", 108, 166912), "b200": ("sm_100", 148, 232448), "h100": ("sm_90", 132, 232448),
    "h200": ("sm_90", 132, 232448), "l4": ("sm_89", 58, 101376), "l40s": ("sm_89", 142, 101376),
}  # fmt: skip
"""Architecture, multiprocessors, bytes of shared memory that a block can have."""


def test_shipped() -> None:
    found = records.shipped()
    facts = {
        name: (r.arch, r.properties["multi_processor_count"], r.properties["shared_memory_per_block_optin"])
        for name, r in found.items()
    }
    assert facts == SHIPPED
    for record in found.values():
        assert record.source
        told = record.properties
        assert int(told["shared_memory_per_multiprocessor"]) - int(told["shared_memory_per_block_optin"]) == 1024
        assert records.decode(records.encode(record), "again") == record
    assert [name for name, record in found.items() if record.tested] == ["h200"]


def test_bandwidth_follows_from_the_numbers() -> None:
    """Clock in kHz, bus in bits, two transfers a cycle: GB/s as the data sheets say, within a twentieth."""
    sheets = {"a100": 2039, "b200": 7700, "h100": 3350, "h200": 4800, "l4": 300, "l40s": 864}
    for name, record in records.shipped().items():
        told = record.properties
        found = 2 * int(told["memory_clock_rate"]) * int(told["memory_bus_width"]) / 8 / 1e6
        assert found == pytest.approx(sheets[name], rel=0.05), name


def test_by_name_or_file(tmp_path: Path) -> None:
    assert records.find("H200") == records.shipped()["h200"]
    file = tmp_path / "mine.json"
    file.write_bytes(records.encode(records.find("l4")))
    assert records.find(str(file)).name == "NVIDIA L4"
    with pytest.raises(UsageError, match="there is no target 'h20'") as caught:
        records.find("h20")
    assert "did you mean 'h200'?" in caught.value.hint
    with pytest.raises(UsageError, match="nope.json cannot be read: No such file"):
        records.find(str(tmp_path / "nope.json"))


def test_what_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="x is not a target record"):
        records.decode(b"{", "x")
    record = records.find("h200")
    properties = {name: value for name, value in record.properties.items() if name not in ("warp_size", "clock_rate")}
    with pytest.raises(UsageError, match="target record x has no warp_size, clock_rate"):
        records.decode(records.encode(msgspec.structs.replace(record, properties=properties)), "x")
    wrong = msgspec.structs.replace(record, properties={**record.properties, "L2_cache_size": "60 MB"})
    with pytest.raises(UsageError, match="L2_cache_size is '60 MB', expected an integer"):
        records.decode(records.encode(wrong), "x")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("warp_size", 0, "warp_size is 0, expected 1 to 9223372036854775807"),
        ("clock_rate", -1, "clock_rate is -1, expected 0 to 9223372036854775807"),
        ("shared_memory_per_block_optin", 2**70, "shared_memory_per_block_optin is 1180591620717411303424, expected 1"),
        ("name", 5, "name is 5, expected 1 to 200 printable characters"),
        ("name", " ", "name is ' ', expected 1"),
        ("name", "a\nb\x1b[31m", r"name is 'a\nb\x1b[31m', expected 1"),
        ("name", "x" * 201, "xxx..., expected 1"),
        ("clock_rate", 1.5, "properties.clock_rate: 1.5 is a number, expected a whole number or text"),
        ("is_integrated", True, "properties.is_integrated: true is a boolean, expected a whole number or text"),
        ("compute_capability", [-1, 0], "compute_capability is [-1, 0], expected 1 to 99 and 0 to 9"),
        ("compute_capability", [9, 10], "compute_capability is [9, 10], expected 1 to 99 and 0 to 9"),
        ("compute_capability", ["9", 0], "compute_capability[0]: '9' is text, expected a whole number"),
        ("compute_capability", [9], "compute_capability: [9] has 1 entries, expected 2"),
    ],
)
def test_values_that_no_device_has(field: str, value: object, said: str) -> None:
    """Limits of a record are held against a device at load: one below zero would let any pass."""
    record = msgspec.to_builtins(records.find("h200"))
    (record if field in record else record["properties"])[field] = value
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        records.decode(msgspec.json.encode(record), "x")
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_clocks_that_a_device_does_not_tell() -> None:
    record = records.find("h200")
    untold = msgspec.structs.replace(record, properties={**record.properties, "memory_clock_rate": 0})
    assert records.decode(records.encode(untold), "x") == untold


def target(name: str, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(machine, "torch_version", lambda: ("2.11.0+cu130", "13.0"))
    monkeypatch.setattr(machine, "_arch", lambda: "x86_64")
    return records.target(records.find(name))


def test_a_target_is_what_a_native_build_would_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    found = target("h200", monkeypatch)
    assert (found.device, found.torch, found.cuda) == ("cuda", "2.11.0+cu130", "13.0")
    assert (found.compute_capability, found.cpu_features) == ((9, 0), X86_64_V3)
    assert tuple(found.properties) == machine.PROPERTIES


def test_a_torch_without_cuda_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_version", lambda: ("2.13.0+cpu", ""))
    with pytest.raises(IncompatibleError, match=r"torch 2.13.0\+cpu is built without CUDA") as caught:
        records.target(records.find("h200"))
    assert caught.value.hint.startswith("pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/")


def test_a_corrected_record_is_another_key_and_a_device_like_it_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is read while compiling is in the target, of a record as of a device; the size of its memory is not."""
    record = records.find("h200")
    plain = target("h200", monkeypatch)
    for name in records.NEEDED:
        value = record.properties[name]
        other = {**record.properties, name: value + 1 if isinstance(value, int) else f"{value} NVL"}
        corrected = records.target(msgspec.structs.replace(record, properties=other))
        assert (corrected == plain) == (name == "total_memory"), name
    told = SimpleNamespace(**{**record.properties, "total_memory": 1}, major=9, minor=0, uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    assert machine.probe("cuda") == plain


def test_another_level_for_host_code(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.with_march(target("h200", monkeypatch), "x86-64-v2")
    assert (found.march, found.cpu_features) == ("x86-64-v2", X86_64_V2)
    with pytest.raises(UsageError, match="expected x86-64-v2, x86-64-v3, x86-64-v4"):
        machine.with_march(found, "native")
    with pytest.raises(UsageError, match="host code for cpu on x86_64 is for the builder's own CPU"):
        machine.with_march(Target("cpu", "x86_64", (), "2.13.0+cpu"), "x86-64-v3")


def test_a_device_with_less_than_the_record_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = target("h100", monkeypatch)
    more = {**here.properties, "shared_memory_per_block_optin": 300000}
    with pytest.raises(IncompatibleError, match="shared_memory_per_block_optin: built for 300000, here 232448"):
        machine.require_fit(msgspec.structs.replace(here, properties=more), here)
    with pytest.raises(IncompatibleError, match=r"compute_capability: built for 8.9, here 9.0 \(must be equal\)"):
        machine.require_fit(target("l4", monkeypatch), here)
    less = {**here.properties, "shared_memory_per_block_optin": 100000, "multi_processor_count": 200}
    machine.require_fit(msgspec.structs.replace(here, properties=less), here)
