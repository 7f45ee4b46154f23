"""Durations and numbers of bytes as people write them."""

from __future__ import annotations

import re

from fxc.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {f"{prefix}{binary}": (1024 if binary else 1000) ** power
          for power, prefix in enumerate("kMGT", 1) for binary in ("", "i")}  # fmt: skip


def seconds(text: str, option: str) -> float:
    """`90s`, `30m`, `12h`, `7d`, `4w`, `1.5d`.

    Raises:
        UsageError: names the option.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if not match:
        raise UsageError(f"{option} {text!r} is no duration", "write a number with s, m, h, d or w: 7d")
    return float(match[1]) * _SECONDS[match[2]]


def number_of_bytes(text: str, option: str) -> int:
    """`500`, `20G`, `1.5GB` (powers of 1000), `20Gi` or `20GiB` (powers of 1024).

    Raises:
        UsageError: names the option.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]i?)?B?", text.strip())
    if not match:
        raise UsageError(f"{option} {text!r} is no number of bytes", "write a number with k, M, G or T: 20G, or 20Gi")
    return int(float(match[1]) * _BYTES.get((match[2] or "").replace("K", "k"), 1))
