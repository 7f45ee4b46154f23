"""Tuning records: configurations of Inductor's kernels that were timed on a device, for builds anywhere.

A kernel is named by the hash of its source and size hints under which Inductor looks for it in its
`autotune_lookup_table`. An entry also names the units that the kernel was found in: what a unit takes of a record is
known before it is compiled, and is part of its key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fxc.cache import Cache, key
from fxc.convert import from_json
from fxc.errors import DamagedError, UsageError
from fxc.target import Target

if TYPE_CHECKING:
    from fxc.lower import Unit

FORMAT = 1
WARPS, STAGES = "num_warps", "num_stages"
LARGEST = {WARPS: 32, STAGES: 16}
"""Of a block's warps CUDA allows as many; more stages than so many no kernel has memory for."""

Configuration = dict[str, int]
"""Elements of a block by axis (`XBLOCK`, `R0_BLOCK`), `num_warps` and `num_stages`: as Inductor's table has it."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel that was timed."""

    name: str
    """Of the kernel, in one of the binaries that have it."""
    configuration: Configuration
    """The fastest."""
    us: float
    """Microseconds that it takes."""
    rules: Configuration
    """What Inductor's rules give: without a record builds with `--target` take that, and native ones may time some
    kernels themselves."""
    rules_us: float | None
    """None where there is no time of that: it spills registers, or takes more than a block may."""
    units: tuple[str, ...]
    """Digests of what was compiled when it was found, sorted: text of the piece after passes, and sizes."""


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record: what was timed on one kind of device with one minor version of torch."""

    format: int = FORMAT
    device: str
    """What the device calls itself."""
    compute_capability: tuple[int, int]
    torch: str
    """`2.11`"""
    kernels: dict[str, Entry] = {}
    """By hash."""

    @property
    def digest(self) -> str:
        """Of what builds take of it, which are no times; empty where that is nothing."""
        taken = {
            name: (entry.configuration, sorted(entry.units)) for name, entry in self.kernels.items() if entry.units
        }
        return key.digest(msgspec.json.encode(taken, order="deterministic")) if taken else ""

    def without(self, units: Collection[str]) -> Tuning:
        """Without what was found in these units: kernels that are in no other are gone."""
        rest = {name: tuple(unit for unit in entry.units if unit not in units) for name, entry in self.kernels.items()}
        kernels = {name: msgspec.structs.replace(self.kernels[name], units=left) for name, left in rest.items() if left}
        return msgspec.structs.replace(self, kernels=kernels)

    def merged(self, newer: Tuning) -> Tuning:
        """With what was timed later in place of what it has of the same units and kernels; these keep other units."""
        kernels = self.without({unit for entry in newer.kernels.values() for unit in entry.units}).kernels
        for name, entry in newer.kernels.items():
            units = {*entry.units, *(kernels[name].units if name in kernels else ())}
            kernels[name] = msgspec.structs.replace(entry, units=tuple(sorted(units)))
        return msgspec.structs.replace(self, kernels=kernels)

    def of(self, unit: str) -> dict[str, Configuration]:
        """What a unit takes of it, by hash."""
        return {name: entry.configuration for name, entry in self.kernels.items() if unit in entry.units}

    def apply(self, unit: Unit) -> Unit:
        """The unit, and each of its forms, with what it takes."""
        found = self.of(unit.scope)
        return dataclasses.replace(
            unit,
            tuning=msgspec.json.encode(found, order="deterministic").decode() if found else "",
            forms=tuple((left_out, self.apply(form)) for left_out, form in unit.forms),
        )

    def require_fit(self, target: Target, where: str) -> None:
        """Refuse a record for another kind of device or another torch; `where` is named in the error.

        Raises:
            UsageError: names both.
        """
        ours, theirs = _kind(self), _kind(empty(target))
        if ours != theirs:
            raise UsageError(f"the tuning record {where} is of {ours}, the build is for {theirs}", "`fxc tune` there")


def _kind(record: Tuning) -> str:
    return "{}, compute capability {}.{}, torch {}".format(record.device, *record.compute_capability, record.torch)


def empty(target: Target) -> Tuning:
    """The record of a GPU without any kernels."""
    return Tuning(
        device=str(target.properties.get("name", "")),
        compute_capability=target.compute_capability or (0, 0),
        torch=".".join(target.torch.split(".")[:2]),
    )


def file_name(target: Target) -> str:
    """Where a cache keeps the record of a GPU, `nvidia-h200-sm_90-torch-2.11.json`."""
    record = empty(target)
    words = re.sub(r"[^a-z0-9]+", "-", record.device.lower()).strip("-")
    return "{}-sm_{}{}-torch-{}.json".format(words, *record.compute_capability, record.torch)


def lock_name(target: Target) -> str:
    """What is held in a cache while kernels are timed on a GPU, with whatever torch."""
    return "tune." + file_name(target).partition("-torch-")[0]


def encode(record: Tuning) -> bytes:
    """The text of a record's file."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


def decode(data: bytes, where: str) -> Tuning:
    """Read a record; `where` is named in the error.

    Raises:
        UsageError: it is not one, or one of its configurations is none.
    """
    try:
        made = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format")
        if made is not None and bytes(made) != str(FORMAT).encode():
            raise UsageError(f"{where} is a tuning record of format {bytes(made).decode()}, expected {FORMAT}", HINT)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where} is not a tuning record: {' '.join(str(error).split())}", HINT) from None
    record = from_json(data, Tuning, f"{where} is not a tuning record", HINT)
    for name, entry in record.kernels.items():
        for configuration in (entry.configuration, entry.rules):
            if wrong := _fault(configuration):
                raise UsageError(f"{where}: kernel {name} ({entry.name}): {wrong}", HINT)
    return record


HINT = "`fxc tune` writes one"


def _fault(configuration: Mapping[str, int]) -> str:
    """What is wrong with a configuration; nothing if empty."""
    for name in (WARPS, STAGES):
        if name not in configuration:
            return f"there is no {name}"
    for name, value in configuration.items():
        if name not in LARGEST and "BLOCK" not in name:
            return f"{name} is no size of a block"
        if name != STAGES and (value < 1 or value & (value - 1)):
            return f"{name} is {value}, expected a power of two"
        if not 0 < value <= LARGEST.get(name, value):
            return f"{name} is {value}, expected 1 to {LARGEST[name]}"
    return ""


def find(choice: str, cache: Cache, target: Target) -> tuple[Tuning | None, str | None]:
    """The record that a build takes, and the digest of the one that an artifact must have been built with to be found
    without a trace: empty for none, None where any will do.

    Args:
        choice: `auto` for what the cache has, if it does; `none`; or the path of a file.

    Raises:
        UsageError: the file is no record, or one for another device.
        DamagedError: one in the cache is damaged.
        CacheIOError: it cannot be read.
    """
    if choice == "none":
        return None, ""
    if choice != "auto":
        if target.device != "cuda":
            raise UsageError(f"--tuning {choice}: the model is for device {target.device}", "only GPUs are tuned for")
        try:
            record = decode(Path(choice).read_bytes(), choice)
        except OSError as error:
            raise UsageError(f"{choice} cannot be read: {error.strerror}", HINT) from None
        record.require_fit(target, choice)
        return record, record.digest
    record = stored(cache, target) if target.device == "cuda" else empty(target)
    return (record, record.digest) if record.kernels else (None, None)


def stored(cache: Cache, target: Target) -> Tuning:
    """What the cache's records for a GPU say together, its own over those of read-only places.

    Raises:
        DamagedError: one is damaged; names its path.
        CacheIOError: one cannot be read.
    """
    record = empty(target)
    for path, data in reversed(cache.tuning(file_name(target))):
        record = record.merged(of_cache(path, data, cache, target))
    return record


def of_cache(path: Path, data: bytes, cache: Cache, target: Target) -> Tuning:
    """One of them from its text.

    Raises:
        DamagedError: it is damaged.
    """
    try:
        record = decode(data, str(path))
        record.require_fit(target, str(path))
    except UsageError as error:
        if path.parent == cache.layout.tuning:
            raise DamagedError(error.message, f"remove {path}; `fxc tune` writes it anew") from None
        raise DamagedError(error.message, "take its place out of FXC_CACHE_PATH, or remove it") from None
    return record
