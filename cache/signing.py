"""Ed25519 signatures (RFC 8032) over manifest.json, whose sha256 digests cover every other file.

The signature is the file `manifest.sig`, 64 bytes, over the bytes of manifest.json as they are. Keys are PEM files:
`openssl genpkey -algorithm ed25519` makes one, `openssl pkey -pubout` its public half.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxc.errors import UntrustedError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

BYTES = 64
MISSING = "pip install 'fxc[sign]'"


def sign(data: bytes, key: Path) -> bytes:
    """64 bytes.

    Raises:
        UsageError: `key` holds no private key.
    """
    signature: bytes = _private(key).sign(data)
    return signature


def verify(data: bytes, signature: bytes, keys: Sequence[Path], path: Path) -> None:
    """Check the signature over an artifact's manifest; `path` is named in the error.

    Raises:
        UntrustedError: there is none, or it is not by one of the keys.
        UsageError: a file holds no public key.
    """
    publics = [_public(key) for key in keys]
    if not signature:
        raise UntrustedError(f"{path} is not signed", "`fxc sign HASH --key FILE` where it was built")
    from cryptography.exceptions import InvalidSignature

    for public in publics:
        try:
            public.verify(signature, data)
        except InvalidSignature:
            continue
        return
    names = ", ".join(str(key) for key in keys)
    raise UntrustedError(f"{path} is not signed with {names}", "get it from where it was signed, or check the key")


def _private(path: Path) -> Ed25519PrivateKey:
    data = _read(path)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise UsageError(
            f"{path} is protected by a passphrase", "`openssl pkey -in FILE` writes one that is not"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(
            f"{path} holds no private key", "`openssl genpkey -algorithm ed25519 -out FILE` makes one"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds a key of another kind, expected Ed25519", "openssl genpkey -algorithm ed25519")
    return key


def _public(path: Path) -> Ed25519PublicKey:
    data = _read(path)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(f"{path} holds no public key", "`openssl pkey -in KEY -pubout -out FILE` writes it") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} holds a key of another kind, expected Ed25519", "openssl genpkey -algorithm ed25519")
    return key


def _read(path: Path) -> bytes:
    """The file's bytes, once it is sure that they can be understood."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UsageError("signatures need the package cryptography, which is not installed", MISSING) from None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror}") from None
