"""How a long job tells what it is doing. The library calls these; the command line draws them."""

from __future__ import annotations


class Observer:
    """Hears of progress; every method does nothing here. Calls come from one thread."""

    def phase(self, name: str) -> None:
        """A phase begins: trace, partition, compile, prove, publish; push, pull; lookup, verify, load, first_step,
        capture; or the size that is timed, `num_tokens=8`."""

    def phase_done(self, name: str, seconds: float) -> None:
        """A phase ended."""

    def transfer(self, total: int) -> None:
        """Something begins to travel to or from a remote cache: `total` bytes at most."""

    def transferred(self, count: int) -> None:
        """So many bytes of it have."""

    def note(self, text: str) -> None:
        """Something is not as it should be, and the work goes on without it."""

    def binaries(self, total: int, reused: int) -> None:
        """The build needs `total` binaries, of which `reused` were in the cache."""

    def compiling(self, label: str) -> None:
        """A binary is being compiled; `label` names piece and shape."""

    def compiled(self, label: str, seconds: float) -> None:
        """A binary is done."""
