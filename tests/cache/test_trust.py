"""Who could have written an artifact, what lies in it, and who signed it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from fxc.cache import Artifact, Cache, Trust
from fxc.cache.trust import check, check_place
from fxc.errors import CacheMissError, DamagedError, UntrustedError, UsageError

from .conftest import CODE, HASH, PIECE, make_manifest

TEXT = "rank_0_0/transformed_code.py"
OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def artifact(cache: Cache, store: Callable[..., str]) -> Artifact:
    return cache.publish(make_manifest(), "rank_0_0", {"transformed_code.py": CODE}, [store()])


def test_one_of_our_own(artifact: Artifact) -> None:
    assert check(artifact, Trust()).data == artifact.data


@pytest.mark.parametrize(
    "name", ["", "manifest.json", "rank_0_0", TEXT, "rank_0_0/inductor", f"rank_0_0/inductor/{PIECE}.so"]
)
def test_others_may_write_it(artifact: Artifact, name: str) -> None:
    path = artifact.path / name
    mode = path.stat().st_mode & 0o777
    path.chmod(mode | 0o002)
    with pytest.raises(
        UntrustedError, match=f"{path} is not trusted: others may write it, its mode is {mode | 2:04o}"
    ) as caught:
        check(artifact, Trust())
    assert caught.value.hint.startswith(f"chmod go-w {path}; ")
    assert check(artifact, Trust(owner=False)).data == artifact.data
    path.chmod(mode | 0o055)
    assert check(artifact, Trust()).data == artifact.data


@as_root
@pytest.mark.parametrize("name", ["", "manifest.json", "rank_0_0", TEXT])
def test_another_user_owns_it(artifact: Artifact, name: str) -> None:
    path = artifact.path / name
    os.chown(path, OTHER_USER, -1)
    with pytest.raises(UntrustedError, match=f"{path} is not trusted: user {OTHER_USER} owns it, expected 0 or root"):
        check(artifact, Trust())
    assert check(artifact, Trust(owner=False)).data == artifact.data


@as_root
def test_what_root_owns_is_good_for_everybody(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a layer of an image."""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    assert check(artifact, Trust()).data == artifact.data


@as_root
def test_groups(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with the number of the user is that user's own; another one is others."""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    path = artifact.path / TEXT
    os.chown(path, OTHER_USER, OTHER_USER)
    path.chmod(0o660)
    assert check(artifact, Trust()).data == artifact.data
    os.chown(path, OTHER_USER, OTHER_USER + 1)
    with pytest.raises(UntrustedError, match="others may write it, its mode is 0660"):
        check(artifact, Trust())
    path.chmod(0o640)
    assert check(artifact, Trust()).data == artifact.data


def test_a_folder_above(tmp_path: Path) -> None:
    above = tmp_path / "shared"
    above.mkdir()
    (above / "mine").mkdir()
    above.chmod(0o777)
    with pytest.raises(UntrustedError, match=f"{above} is not trusted"):
        check_place(above / "mine")
    with pytest.raises(UntrustedError):
        check_place(above / "not there yet")
    above.chmod(0o1777)
    check_place(above / "mine")
    check_place(above / "mine" / "not" / "there yet")
    check_place(Path("/tmp/fxc"))
    (above / "mine").chmod(0o1777)  # what we own ourselves, others may fill
    check_place(above / "mine")


@as_root
def test_in_a_sticky_folder_of_others(tmp_path: Path) -> None:
    above = tmp_path / "shared"
    (above / "theirs" / "mine").mkdir(parents=True)
    above.chmod(0o1777)
    os.chown(above / "theirs", OTHER_USER, -1)
    with pytest.raises(UntrustedError, match=f"theirs is not trusted: user {OTHER_USER} owns it"):
        check_place(above / "theirs" / "mine")
    (above / "link").symlink_to(tmp_path)
    check_place(above / "link")
    os.chown(above / "link", OTHER_USER, -1, follow_symlinks=False)
    with pytest.raises(UntrustedError, match="link is not trusted"):
        check_place(above / "link")


def test_links_on_the_way(tmp_path: Path) -> None:
    """What a link leads through counts, and so does the folder that it stands in."""
    (tmp_path / "open" / "mine").mkdir(parents=True)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "link").symlink_to("../open/mine")
    check_place(tmp_path / "closed" / "link")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedError, match="open is not trusted"):
        check_place(tmp_path / "closed" / "link")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed")
    with pytest.raises(UntrustedError, match="open is not trusted"):
        check_place(tmp_path / "open" / "link")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    check_place(tmp_path / "loop")


def test_a_cache_that_others_may_write(tmp_path: Path) -> None:
    root = tmp_path / "cache" / "v1"
    for name in ("", "artifacts", "binaries", "index"):
        (root / name).mkdir(parents=True)
        (root / name).chmod(0o777)
        with pytest.raises(UntrustedError, match=f"{root / name} is not trusted"):
            Cache.open(tmp_path / "cache", {})
        with pytest.raises(UntrustedError, match=f"{root / name} is not trusted"):
            Cache.open(tmp_path / "own", {"FXC_CACHE_PATH": str(tmp_path / "cache")})
        Cache.open(tmp_path / "cache", {"FXC_TRUST": "any"})
        (root / name).chmod(0o700)
    Cache.open(tmp_path / "cache", {})


@pytest.mark.parametrize(
    "name", ["x.py", "rank_0_0/x.so", f"rank_0_0/inductor/{PIECE}.json", "rank_1_0/transformed_code.py", ".x"]
)
def test_what_the_manifest_does_not_list(artifact: Artifact, name: str) -> None:
    path = artifact.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    for trust in (Trust(), Trust(owner=False)):
        with pytest.raises(UntrustedError, match="its manifest does not list it"):
            check(artifact, trust)


def test_an_empty_folder_counts(artifact: Artifact) -> None:
    (artifact.path / "rank_0_0" / "more").mkdir()
    with pytest.raises(UntrustedError, match="more is not trusted"):
        check(artifact, Trust())


def test_links_in_an_artifact(artifact: Artifact, tmp_path: Path) -> None:
    path = artifact.path / TEXT
    shutil.copy(path, tmp_path / "outside")
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(UntrustedError, match=f"it is a link out of the artifact to {tmp_path}/outside"):
        check(artifact, Trust(owner=False))
    path.unlink()
    path.symlink_to("inductor")
    with pytest.raises(UntrustedError, match="does not list it"):  # a folder in place of a file
        check(artifact, Trust())
    path.unlink()
    shutil.rmtree(artifact.path / "rank_0_0/inductor")
    (artifact.path / "rank_0_0/inductor").symlink_to(tmp_path)
    with pytest.raises(UntrustedError, match="link out of the artifact"):
        check(artifact, Trust())


def test_one_that_was_replaced_meanwhile(cache: Cache, artifact: Artifact) -> None:
    now = cache.publish(make_manifest(), "rank_1_0", {"more.py": CODE}, [], world_size=2)
    assert check(artifact, Trust()).data == now.data


def test_words() -> None:
    assert Trust.of({}) == Trust.of({"FXC_TRUST": "owner"}) == Trust()
    assert Trust.of({"FXC_VERIFY_KEY": "/key"}) == Trust()
    assert Trust.of({"FXC_TRUST": "any"}) == Trust(owner=False)
    assert Trust.of({"FXC_TRUST": "signed", "FXC_VERIFY_KEY": "/a:/b"}) == Trust(keys=(Path("/a"), Path("/b")))
    assert Trust.of({"FXC_TRUST": "any"}, Path("/k")) == Trust(owner=False, keys=(Path("/k"),))
    assert Trust.unsigned({"FXC_TRUST": "signed"}) == Trust()
    with pytest.raises(UsageError, match="FXC_TRUST is 'sign', expected owner, signed or any") as caught:
        Trust.of({"FXC_TRUST": "sign"})
    assert caught.value.hint == "did you mean 'signed'?"
    with pytest.raises(UsageError, match="FXC_TRUST=signed, and no key"):
        Trust.of({"FXC_TRUST": "signed"})


# Signatures


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Private and public."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "key")


def test_signed(cache: Cache, artifact: Artifact, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    _, other = write_keys(tmp_path, "other")
    with pytest.raises(UntrustedError, match=f"{artifact.path} is not signed"):
        check(artifact, Trust(keys=(public,)))
    signed = cache.sign(artifact, private)
    assert len(signed.signature) == 64
    assert cache.artifact(HASH) == signed
    assert check(signed, Trust(keys=(other, public))).signature == signed.signature
    assert check(artifact, Trust(keys=(public,))).signature == signed.signature  # opened before it was signed
    with pytest.raises(UntrustedError, match=f"is not signed with {other}"):
        check(signed, Trust(keys=(other,)))
    assert cache.sign(signed, private) == signed
    assert signed.verify() == 2


def test_signed_as_openssl_understands_it(cache: Cache, artifact: Artifact, keys: tuple[Path, Path]) -> None:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    private, public = keys
    path = cache.sign(artifact, private).path
    command = [
        "openssl",
        "pkeyutl",
        "-verify",
        "-pubin",
        "-inkey",
        public,
        "-rawin",
        "-in",
        path / "manifest.json",
        "-sigfile",
        path / "manifest.sig",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Verified Successfully" in done.stdout, done.stderr


@pytest.mark.parametrize("damage", [b"", b"short", bytes(64)])
def test_a_bad_signature(cache: Cache, artifact: Artifact, keys: tuple[Path, Path], damage: bytes) -> None:
    signed = cache.sign(artifact, keys[0])
    (signed.path / "manifest.sig").write_bytes(damage)
    with pytest.raises(UntrustedError, match="is not signed"):
        check(cache.artifact(HASH), Trust(keys=(keys[1],)))


def test_another_rank_takes_the_signature_away(cache: Cache, artifact: Artifact, keys: tuple[Path, Path]) -> None:
    cache.sign(artifact, keys[0])
    now = cache.publish(make_manifest(), "rank_1_0", {"more.py": CODE}, [], world_size=2)
    assert not (now.path / "manifest.sig").exists()
    with pytest.raises(UntrustedError, match="is not signed"):
        check(now, Trust(keys=(keys[1],)))


def test_archives_keep_signatures(cache: Cache, artifact: Artifact, keys: tuple[Path, Path], tmp_path: Path) -> None:
    other, trust = Cache.open(tmp_path / "other", {}), Trust(keys=(keys[1],))
    cache.export(artifact, tmp_path / "unsigned.tar")
    with pytest.raises(UntrustedError, match="is not signed"):
        other.import_file(tmp_path / "unsigned.tar", trust)
    assert other.list() == []
    signed = cache.sign(artifact, keys[0])
    cache.export(signed, tmp_path / "signed.tar")
    other.publish(make_manifest(), "rank_1_0", {"more.py": CODE}, [], world_size=2)
    taken = other.import_file(tmp_path / "signed.tar", trust)
    assert (taken.data, taken.signature) == (signed.data, signed.signature)
    assert check(other.artifact(HASH), trust) == taken
    other.import_file(tmp_path / "unsigned.tar", Trust())
    assert check(other.artifact(HASH), trust) == taken, "the same manifest is signed as well as before"


def test_keys_that_are_none(cache: Cache, artifact: Artifact, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    rsa = generate_private_key(65537, 2048)
    encrypted = serialization.BestAvailableEncryption(b"secret")
    for name, made, how in (
        ("rsa", rsa, serialization.NoEncryption()),
        ("locked", Ed25519PrivateKey.generate(), encrypted),
    ):
        form = serialization.PrivateFormat.PKCS8
        (tmp_path / name).write_bytes(made.private_bytes(serialization.Encoding.PEM, form, how))
    (tmp_path / "nonsense").write_text("nonsense")
    for path, message in (
        (public, "holds no private key"),
        (tmp_path / "nonsense", "holds no private key"),
        (tmp_path / "rsa", "holds a key of another kind, expected Ed25519"),
        (tmp_path / "locked", "is protected by a passphrase"),
        (tmp_path / "absent", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(UsageError, match=message):
            cache.sign(artifact, path)
    assert not (artifact.path / "manifest.sig").exists()
    for path in (private, tmp_path / "nonsense"):
        with pytest.raises(UsageError, match="holds no public key"):
            check(artifact, Trust(keys=(path,)))


def test_only_in_the_cache(cache: Cache, artifact: Artifact, keys: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(artifact.path, tmp_path / "copy")
    with pytest.raises(UsageError, match="copy is not in the cache"):
        cache.sign(Artifact.open(tmp_path / "copy"), keys[0])
    cache.publish(make_manifest(), "rank_1_0", {"more.py": CODE}, [], world_size=2)
    with pytest.raises(DamagedError, match="was replaced while it was checked"):
        cache.sign(artifact, keys[0])


def test_replaced_by_something_unsigned(cache: Cache, artifact: Artifact, keys: tuple[Path, Path]) -> None:
    """Between the check and the use: what is read then has to be signed as well."""
    private, public = keys
    checked = check(cache.sign(artifact, private), Trust(owner=False, keys=(public,)))
    assert checked.read("rank_0_0/transformed_code.py") == CODE
    cache.publish(checked.manifest, "rank_0_0", {"transformed_code.py": b"import evil"}, [])
    with pytest.raises(UntrustedError, match="is not signed"):
        checked.read("rank_0_0/transformed_code.py")
    with pytest.raises(UntrustedError, match="is not signed"):
        checked.verify()


def test_removed_while_it_is_looked_at(
    cache: Cache, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    artifact.path.rename(tmp_path / "removed")
    with pytest.raises(CacheMissError, match="is not an artifact"):
        check(artifact, Trust())
    (tmp_path / "removed").rename(artifact.path)
    (artifact.path / "rank_0_0" / "transformed_code.py").unlink()
    (artifact.path / "rank_0_0" / "transformed_code.py").symlink_to(artifact.path / "rank_0_0" / "nothing")
    with pytest.raises(DamagedError, match="nothing is missing|transformed_code.py is missing"):
        check(artifact, Trust())
