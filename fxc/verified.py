"""The note in a manifest that its binaries have run on a device of their kind."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fxc.manifest import Binary, Manifest, Rank


def note(manifest: Manifest, ran: Mapping[str, Binary]) -> Manifest:
    """With what was found when all binaries ran in place of what a build without the device has said of them."""
    pieces = {binary.piece for binary in manifest.binaries.values()}
    return msgspec.structs.replace(
        manifest,
        binaries=dict(ran),
        proof=(
            *(line for line in manifest.proof if line.piece not in pieces),
            *(line for binary in ran.values() for line in binary.proof),
        ),
        unproved=(
            *(line for line in manifest.unproved if line.piece not in pieces),
            *(line for binary in ran.values() for line in binary.unproved),
        ),
        verified=True,
    )


def keep(old: Manifest, new: Manifest) -> Manifest:
    """`new` with the note of `old`, another manifest of the same artifact, if the binaries of both are the same."""
    if new.verified or not old.verified or _files(old) != _files(new):
        return new
    ran = {
        key: msgspec.structs.replace(new.binaries[key], checked=was.checked, proof=was.proof, unproved=was.unproved)
        for key, was in old.binaries.items()
    }
    return note(new, ran)


def merge(old: Manifest, new: Manifest, others: Mapping[str, Rank]) -> Manifest:
    """`new` with the note of `old` and `others` of its ranks. What those have under the same keys need not be the same
    bytes: then a note of `new` is not one of theirs."""
    full = keep(old, new)
    if others and not old.verified and _files(old) != _files(new):
        full = msgspec.structs.replace(full, verified=False)
    return msgspec.structs.replace(full, ranks=dict(sorted({**others, **full.ranks}.items())))


def _files(manifest: Manifest) -> set[tuple[str, str]]:
    """Names and digests of its binaries, over all ranks."""
    names = {f"{key}.{kind}" for key in manifest.binaries for kind in ("so", "json")}
    files = (item for rank in manifest.ranks.values() for item in rank.files.items())
    return {(base, file.sha256) for name, file in files if (base := name.rpartition("/")[2]) in names}
