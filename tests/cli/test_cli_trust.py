"""What the verbs and `fxc.load` refuse with exit 5, and `fxc sign`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import fxc as package
from fxc.cache import Artifact
from fxc.errors import UntrustedError

HASH = "abcd" + "0" * 28


@pytest.fixture
def keys(fxc: Any) -> None:
    """key.pem and key.pub in the current folder."""
    key = Ed25519PrivateKey.generate()
    plain = serialization.NoEncryption()
    Path("key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    Path("key.pub").write_bytes(public)


def refused(told: Any, what: str) -> bool:
    error = told.json["error"]
    return (told.code, error["kind"]) == (5, "UntrustedError") and what in error["message"]


@pytest.mark.parametrize(
    "verb", [("inspect", "abcd"), ("warm", "abcd"), ("verify", "abcd"), ("verify",), ("export", "abcd", "x.tar")]
)
def test_an_artifact_that_others_may_write(fxc: Any, artifact: Artifact, verb: tuple[str, ...]) -> None:
    (artifact.path / "rank_0_0").chmod(0o777)
    assert refused(fxc(*verb, "--json"), "rank_0_0 is not trusted: others may write it, its mode is 0777")
    with pytest.raises(UntrustedError):
        package.load(HASH)


@pytest.mark.parametrize("verb", ["ls", "prune", "verify"])
def test_a_cache_that_others_may_write(
    fxc: Any, artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    (tmp_path / "cache").chmod(0o777)
    assert refused(fxc(verb, "--json"), f"{tmp_path}/cache is not trusted")
    monkeypatch.setenv("FXC_TRUST", "any")
    assert fxc(verb, "--json").code == 0


def test_a_moved_artifact(fxc: Any, artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    shutil.copytree(artifact.path, tmp_path / "open" / "copy")
    (tmp_path / "open").chmod(0o777)
    assert refused(fxc("warm", "open/copy", "--json"), "open is not trusted")
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "open/copy/rank_0_0/inductor/x.so").write_text("x")
    assert refused(fxc("warm", "open/copy", "--json"), "x.so is not trusted: its manifest does not list it")


def test_sign(fxc: Any, artifact: Artifact, keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in (("warm", "abcd"), ("verify",), ("verify", "abcd")):
        assert refused(fxc(*verb, "--verify-key", "key.pub", "--json"), "is not signed")
    told = fxc("sign", "abcd", "--key", "key.pem")
    assert (told.code, told.out, told.err) == (0, HASH + "\n", f"signed {artifact.path}\n")
    told = fxc("sign", "abcd", "--key", "key.pem", "--json", "-q").json
    assert told["signature"] == (artifact.path / "manifest.sig").read_bytes().hex()
    for verb in (("warm", "abcd"), ("verify",), ("verify", "abcd")):
        assert fxc(*verb, "--verify-key", "key.pub").code == 0
    assert package.load(HASH, verify_key="key.pub").manifest.hash == HASH
    monkeypatch.setenv("FXC_TRUST", "signed")
    assert fxc("warm", "abcd", "--verify-key", "key.pub").code == 0
    told = fxc("warm", "abcd", "--json")
    assert (told.code, told.json["error"]["kind"]) == (2, "UsageError")
    monkeypatch.setenv("FXC_VERIFY_KEY", str(Path("key.pub").absolute()))
    assert fxc("warm", "abcd").code == 0
    (artifact.path / "manifest.sig").unlink()
    for name in ("warm", "inspect", "verify"):
        assert refused(fxc(name, "abcd", "--json"), "is not signed")
    with pytest.raises(UntrustedError):
        package.load(HASH)
    assert fxc("sign", "abcd", "--key", "key.pem").code == 0


def test_a_damaged_one_is_not_signed(fxc: Any, artifact: Artifact, keys: None) -> None:
    (artifact.path / "rank_0_0/transformed_code.py").write_text("x")
    assert fxc("sign", "abcd", "--key", "key.pem").code == 5
    assert not (artifact.path / "manifest.sig").exists()


def test_what_is_built_here_is_not_signed(fxc: Any, artifact: Artifact, found: dict[str, str], keys: None) -> None:
    told = fxc("warm", "model.yaml", "--verify-key", "key.pub", "--json")
    assert (told.code, told.json["error"]["kind"]) == (3, "CacheMissError")


def test_usage(fxc: Any, artifact: Artifact, keys: None) -> None:
    assert fxc("sign", "abcd").code == 2
    assert fxc("sign", "abcd", "--key", "key.pub").code == 2
    assert fxc("sign", "dddd", "--key", "key.pem").code == 3
