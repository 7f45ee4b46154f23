"""What a result file says about the machine it was measured on. No names of hosts or users."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path

import torch


def machine(device: str) -> dict[str, str | int]:
    facts: dict[str, str | int] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
    }
    if device == "cuda":
        facts["cuda"] = torch.version.cuda or ""
    return facts


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
