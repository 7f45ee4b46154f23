"""Every error that fxc raises on purpose.

FxcError                    1
├── BuildError              1  the work failed
│   ├── TraceError             a model that torch.export cannot capture
│   ├── PassError              a graph pass that fails, or finds another number of places than was asked for
│   ├── CompileError           a piece that the compiler refuses
│   └── ProofError             a piece whose binary does not equal eager
├── RunError                1  a call that a loaded program refuses
│   ├── InputError             an input with a wrong name, dtype, device, shape or size
│   └── WeightError            a weight that is missing, superfluous, or of a wrong shape, dtype or device
├── UsageError              2  wrong command line
│   └── SpecError              a model.yaml that says something impossible
├── CacheMissError          3  not in the cache
├── IncompatibleError       4  the artifact does not fit this machine
├── DamagedError            5  the artifact is damaged or not trusted
│   └── UntrustedError         others could have written it, or it is not signed
└── CacheIOError            1  the cache directory cannot be read or written

The number is `exit_code`, what `fxc` exits with. Each carries a `message` (one line that names the thing, what came
and what was expected) and a `hint` (what to do; may be empty).
"""

from __future__ import annotations


class FxcError(Exception):
    """Base of all errors of fxc."""

    exit_code: int = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def kind(self) -> str:
        """Name of the class, as `--json` shows it."""
        return type(self).__name__


class BuildError(FxcError):
    """A build failed."""


class TraceError(BuildError):
    """The model cannot be captured as one graph for all promised shapes."""


class PassError(BuildError):
    """A graph pass failed, left a graph that is not valid, or did not match as often as `passes.NAME.expect` says."""


class CompileError(BuildError):
    """The compiler refused a piece, or its binary does not load."""


class ProofError(BuildError):
    """A compiled piece does not equal the eager piece at a promised shape."""


class RunError(FxcError):
    """A loaded program refused a call."""


class InputError(RunError):
    """An input of a call is not what the program was built for."""


class WeightError(RunError):
    """A weight handed to `Program.bind` is not what the program was built for."""


class UsageError(FxcError):
    """The command line or an argument makes no sense."""

    exit_code = 2


class SpecError(UsageError):
    """model.yaml has an unknown key, a wrong type or an impossible value."""


class CacheMissError(FxcError):
    """No such artifact in the cache."""

    exit_code = 3


class IncompatibleError(FxcError):
    """The artifact was built for another kind of machine or another torch."""

    exit_code = 4


class DamagedError(FxcError):
    """A file of an artifact is missing, altered or not trusted."""

    exit_code = 5


class UntrustedError(DamagedError):
    """Somebody else could have written an artifact or a cache directory, or a signature is not there."""


class CacheIOError(FxcError):
    """The cache directory cannot be read or written: full, read-only, not permitted."""
