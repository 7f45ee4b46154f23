"""A cache in a temporary directory, and the smallest manifest that can be published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fxc.cache import Cache, key
from fxc.manifest import Binary, Manifest
from fxc.spec import InputSpec, ModelSpec, Spec
from fxc.target import Target

HASH = key.digest("artifact")
PIECE = key.digest("piece")
CODE = b"x = 1\n"
LIBRARY = b"\x7fELF" + bytes(range(256)) * 40


def make_manifest(hash: str = HASH) -> Manifest:
    return Manifest(
        hash=hash,
        fxc="0.1.0",
        created="2026-01-02T03:04:05+00:00",
        model="Tiny",
        spec=Spec(
            model=ModelSpec(target="tiny.py:Tiny"),
            device="cpu",
            inputs={"x": InputSpec(shape=(2,), dtype="float32")},
        ),
        target=Target(device="cpu", arch="x86_64", cpu_features=("avx2",), torch="2.13.0+cpu"),
        factors=(),
        inputs=(),
        outputs="y",
        weights=(),
        constants=(),
        programs=(),
        pieces={},
        binaries={},
    )


def make_binary(data: bytes = LIBRARY) -> Binary:
    return Binary(piece="p", range="n=1", bytes=len(data), sha256=key.sha256(data), seconds=1.5)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "cache")


@pytest.fixture
def store(cache: Cache, tmp_path: Path) -> Callable[..., str]:
    """Stores LIBRARY, or other bytes, under PIECE."""

    def put(data: bytes = LIBRARY, force: bool = False) -> str:
        source = tmp_path / "compiled.so"
        source.write_bytes(data)
        cache.store_binary(PIECE, {f"{PIECE}.so": source}, make_binary(data), force=force)
        return PIECE

    return put


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest()
