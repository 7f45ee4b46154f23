"""The `fxc` command: the verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fxc.cli import streams
from fxc.errors import FxcError, UsageError

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
OUTPUT_CLOSED = 1

VERBS = {
    "build": "Compile a model; prints the hash of the artifact.",
    "inspect": "Show what an artifact holds.",
    "warm": "Make this machine ready for an artifact, and prove it.",
    "bench": "Time a built program, next to eager and CUDA graphs.",
    "ls": "List artifacts.",
    "verify": "Check the digests of every file.",
    "why": "Say why a model is not in the cache, or what differs.",
    "prune": "Remove what is not needed any more.",
    "export": "Write an artifact into a tar file.",
    "import": "Take an exported artifact into the cache.",
    "push": "Upload an artifact to a remote cache.",
    "pull": "Fetch an artifact from a remote cache.",
    "sign": "Sign an artifact.",
    "schema": "Print the JSON schema of model.yaml.",
    "target": "Show or write records of GPUs that builds are made for.",
    "tune": "Time kernels on this GPU, for builds here and elsewhere.",
    "doctor": "Check what a build and a load need here.",
}
"""What `fxc --help` says of each; the rest of a verb is in its module, imported when it is used."""
MODULES = {"import": "take"}
"""Of verbs that are no names in Python."""
SETTINGS: dict[str, Any] = {
    "add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}  # fmt: skip


class _Verbs(TyperGroup):
    """The verbs, each made into a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*VERBS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        verb = importlib.import_module(f"fxc.cli.{MODULES.get(cmd_name, cmd_name)}")
        if hasattr(verb, "app"):  # with verbs of its own
            return typer.main.get_command(verb.app)
        alone = typer.Typer(**SETTINGS)
        alone.command(cmd_name, epilog=getattr(verb, "EPILOG", None))(verb.run)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*VERBS.items()])


app = typer.Typer(name="fxc", cls=_Verbs, **SETTINGS)


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        streams.write(f"fxc {importlib.metadata.version('fxc')}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _fxc(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compiles PyTorch models for serving, ahead of time."""
    if context.invoked_subcommand is None:
        raise UsageError("no command given", "`fxc --help` lists them")


class _Terminated(BaseException):
    """SIGTERM came: unwind, so that locks, staging directories and child processes are cleaned up."""


def main() -> NoReturn:
    """Entry point of the process."""
    if not sys.warnoptions and not _has_flag(sys.argv[1:], "v", "--verbose"):
        warnings.simplefilter("ignore")  # of libraries, to their developers
    streams.fill()
    signal.signal(signal.SIGTERM, _terminate)
    code = run(sys.argv[1:])
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    atexit._run_exitfuncs()
    # Not sys.exit: it waits for threads that a model's code may have left, and takes torch apart for a second.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Everything that goes wrong is told here."""
    try:
        code = _invoke(arguments)
        streams.write("")  # flushes what the help left in the buffer
        return code
    except FxcError as error:
        return _fail(arguments, error, error.exit_code, error.kind, error.message, error.hint)
    except (KeyboardInterrupt, typer.Abort) as error:
        return _fail(arguments, error, INTERRUPTED, "Interrupted", "interrupted")
    except _Terminated as error:
        return _fail(arguments, error, TERMINATED, "Terminated", "terminated")
    except BrokenPipeError:  # the reader left, as `head` does
        streams.drop()
        return OUTPUT_CLOSED
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # what Typer makes of it
            streams.drop()
            return OUTPUT_CLOSED
        return _fail(arguments, error, 1, "SystemExit", f"the model's code called sys.exit({error.code!r})")
    except MemoryError as error:
        return _fail(arguments, error, 1, "MemoryError", "out of memory")
    except Exception as error:
        message = f"unexpected {type(error).__name__}: {_first_line(error)}"
        hint = "" if _has_flag(arguments, "v", "--verbose") else "this is a fault of fxc; -v shows where"
        return _fail(arguments, error, 1, type(error).__name__, message, hint)
    except BaseException as error:
        message = f"the model's code raised {type(error).__name__}: {_first_line(error)}"
        return _fail(arguments, error, 1, type(error).__name__, message)


def _invoke(arguments: Sequence[str]) -> int:
    if not all(word.isascii() for word in arguments):
        from fxc.yaml_text import is_text

        for word in arguments:
            if not is_text(word):
                raise UsageError(f"argument {word!a} is not UTF-8", "paths and values have to be")
    command = typer.main.get_command(app)
    try:
        result: Any = command.main(list(arguments), prog_name="fxc", standalone_mode=False)
    except FxcError:
        raise
    except Exception as error:
        # Typer's own errors: of the click package in older versions, of a private copy of it in newer ones.
        if not hasattr(error, "format_message"):
            raise
        raise _usage_error(error) from None
    if result == INTERRUPTED:  # what Typer makes of KeyboardInterrupt; verbs return nothing
        raise KeyboardInterrupt
    return int(result or 0)


def _usage_error(error: Any) -> UsageError:
    """Typer's error in our form: the message, and the nearest right spelling or where to read as the hint."""
    message, _, near = error.format_message().partition(" Did you mean ")
    message, _, options = message.partition(" (Possible options: ")
    context = getattr(error, "ctx", None)
    if unknown := re.match(r"No such command '(.*)'", message):
        from fxc.convert import nearest

        known = context.command.list_commands(context) if context else VERBS
        near = f"{nearest(unknown[1], known)!r}?" if nearest(unknown[1], known) else ""
    command = context.command_path if context else "fxc"
    hint = f"`{command} --help` shows what there is"
    if near or options:
        hint = f"did you mean {near or ' or '.join(options.rstrip(')').split(', ')) + '?'}"
    message = message.rstrip(".?")
    return UsageError(message[:1].lower() + message[1:], hint)


def _fail(arguments: Sequence[str], error: BaseException, code: int, kind: str, message: str, hint: str = "") -> int:
    from fxc.cli import render

    if _has_flag(arguments, "v", "--verbose"):
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    if _has_flag(arguments, "", "--json"):
        with contextlib.suppress(FxcError, BrokenPipeError):
            render.json_object({"error": {"code": code, "kind": kind, "message": message, "hint": hint}})
    with contextlib.suppress(OSError):
        render.error(message, hint)
    streams.drop()
    return code


def _has_flag(arguments: Sequence[str], short: str, long: str) -> bool:
    """Whether a flag of every verb is given: known even where the rest of the line cannot be parsed."""
    own = list(arguments)
    own = own[: own.index("--")] if "--" in own else own
    return long in own or (bool(short) and any(re.fullmatch(rf"-[qv]*{short}[qv]*", word) for word in own))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
