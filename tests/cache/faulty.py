"""A file system that fails, stalls and cuts off, as asked: `faulty://` over local folders."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Faults:
    """What goes wrong next, and what was asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.planned: dict[str, list[Any]] = {}
        self.calls: Counter[str] = Counter()
        self.written: list[str] = []
        self.open = threading.Event()

    def plan(self, call: str, *faults: Any) -> None:
        """Next calls of `pipe_file`, `info`, `ls`, `cat_file` (`blob` for contents): an exception to raise, "stall", "cut"."""
        self.planned[call] = [*faults]

    def next(self, call: str) -> Any:
        with self.lock:
            self.calls[call] += 1
            planned = self.planned.get(call, [])
            fault = planned.pop(0) if planned else None
        if isinstance(fault, BaseException):
            raise fault
        if fault == "stall":
            self.open.wait(20)
            raise OSError("too late")
        return fault


FAULTS = Faults()


class FaultyFileSystem(LocalFileSystem):
    protocol = "faulty"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def info(self, path: str, **options: Any) -> Any:
        FAULTS.next("info")
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        FAULTS.next("ls")
        return super().ls(path, detail=detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        fault = FAULTS.next("blob" if "/blobs/" in path or "/packs/" in path else "cat_file")
        with open(self._strip_protocol(path), "rb") as file:
            data = file.read()[start:end]
        return data[: len(data) // 2] if fault == "cut" else data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        fault = FAULTS.next("pipe_file")
        with open(self._strip_protocol(path), "wb") as file:
            file.write(value[: len(value) // 2] if fault == "cut" else value)
        FAULTS.written.append(str(path))
        if fault == "cut and fail":
            raise ConnectionError("reset by peer")


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
