"""Records of GPUs: what a build reads of the device it builds for, from a file. Imports torch only to make one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from fxc import machine
from fxc.convert import from_json, shown, suggest
from fxc.errors import IncompatibleError, UsageError
from fxc.target import Target

SUFFIX = ".json"
NEEDED = (*machine.PROPERTIES, "total_memory")
"""What Inductor, Triton and the check at load read of a device, in any release that fxc is tested with: a part of each
key, but for the memory. Clocks are in kHz, memory in bytes, the bus in bits."""
UNTOLD = ("L2_cache_size", "clock_rate", "memory_clock_rate", "memory_bus_width")
"""Of these, what some devices tell as 0."""
LARGEST = 2**63 - 1
LONGEST = 200
"""Characters of a name: files of a cache are called by it."""
HINT = "`fxc target dump FILE` writes one"
PLACE = ("uuid", "pci_bus_id", "pci_device_id", "pci_domain_id", "major", "minor", "gcnArchName")
"""Attributes of torch's device properties that a record leaves out: which device it is rather than of what kind."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of GPU."""

    compute_capability: tuple[int, int]
    """(major, minor)"""
    properties: dict[str, int | str]
    """As `torch.cuda.get_device_properties` names them."""
    source: str
    """Where the numbers come from."""
    tested: str = ""
    """What of ours has run on such a device; empty where nothing has."""

    @property
    def name(self) -> str:
        """What the device calls itself."""
        return str(self.properties["name"])

    @property
    def arch(self) -> str:
        """`sm_90`, as cubins say it."""
        return "sm_{}{}".format(*self.compute_capability)


def shipped() -> dict[str, Record]:
    """The records that come with fxc, by the name that `--target` takes."""
    folder = resources.files("fxc") / "targets"
    files = sorted((file.name.removesuffix(SUFFIX), file) for file in folder.iterdir() if file.name.endswith(SUFFIX))
    return {name: decode(file.read_bytes(), name) for name, file in files}


def find(name: str) -> Record:
    """A shipped record, or that in a file.

    Raises:
        UsageError: there is none of this name, or something is wrong with the file; names the field.
    """
    path = Path(name)
    if path.suffix == SUFFIX or "/" in name:
        try:
            return decode(path.read_bytes(), name)
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror}", HINT) from None
    known = shipped()
    if name.lower() not in known:
        raise UsageError(f"there is no target {name!r}", f"{suggest(name, known, 'targets')}; or give a FILE.json")
    return known[name.lower()]


def decode(data: bytes, where: str) -> Record:
    """Read a record; `where` is named in the error.

    Raises:
        UsageError: it is not one, lacks a property that every build needs, or has one that no device has.
    """
    record = from_json(data, Record, f"{where} is not a target record", HINT)
    missing = [field for field in NEEDED if field not in record.properties]
    if missing:
        raise UsageError(
            f"target record {where} has no {', '.join(missing)}", "`fxc target dump FILE` on such a device writes all"
        )
    if wrong := next(_faults(record), ""):
        raise UsageError(f"target record {where}: {wrong}", "`fxc target show NAME --json` has the form")
    return record


def _faults(record: Record) -> Iterator[str]:
    """What no device tells of itself."""
    major, minor = record.compute_capability
    if not (1 <= major <= 99 and 0 <= minor <= 9):
        yield f"compute_capability is [{major}, {minor}], expected 1 to 99 and 0 to 9"
    for field in NEEDED:
        value = record.properties[field]
        if field == "name":
            if not (isinstance(value, str) and value.isprintable() and value.strip() and len(value) <= LONGEST):
                yield f"name is {shown(value)}, expected 1 to {LONGEST} printable characters"
        elif not isinstance(value, int):
            yield f"{field} is {shown(value)}, expected an integer"
        elif not (least := int(field not in UNTOLD)) <= value <= LARGEST:
            yield f"{field} is {shown(value)}, expected {least} to {LARGEST}"


def encode(record: Record) -> bytes:
    """The text of a record's file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def probe(device: str = "cuda") -> Record:
    """The record of a device of this machine: everything that torch tells of it.

    Raises:
        IncompatibleError: there is no such device.
    """
    import torch

    capability = machine.probe(device, compiler=False).compute_capability or (0, 0)
    found: Any = torch.cuda.get_device_properties(torch.device(device))
    names = [name for name in dir(found) if not name.startswith("_") and name not in PLACE]
    values = {name: getattr(found, name) for name in names}
    properties = {name: value if isinstance(value, str) else int(value) for name, value in values.items()}
    source = f"torch.cuda.get_device_properties, torch {torch.__version__}, on {found.name}"
    return Record(capability, properties, source, "made on the device itself")


def mend(version: str) -> str:
    """How to get that version of torch with CUDA."""
    return f"pip install torch=={version.partition('+')[0]} --index-url https://download.pytorch.org/whl/cu130"


def target(record: Record) -> Target:
    """What a build for such a device is for, with the torch and the compiler of this machine.

    Raises:
        IncompatibleError: this torch is built without CUDA.
    """
    version, cuda = machine.torch_version()
    if not cuda:
        raise IncompatibleError(f"torch {version} is built without CUDA, which a build for a GPU needs", mend(version))
    properties = {name: record.properties[name] for name in machine.PROPERTIES}
    return machine.cuda_target(record.compute_capability, properties, machine.compiler_version())
