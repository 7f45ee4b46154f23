"""What was built: manifest.json as frozen structs. The loader needs nothing but this and the files it lists."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal, TypeVar

import msgspec

from fxc.errors import DamagedError
from fxc.shapes import Range
from fxc.spec import Spec
from fxc.target import Target

T = TypeVar("T")

FORMAT = 1
"""Version of the artifact format. A change is a new folder in the cache, `v<FORMAT>`."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every record."""


class Tensor(_Record, frozen=True):
    """Layout of a tensor that the program takes or returns."""

    name: str
    shape: tuple[int | str, ...]
    """Integers, and expressions of dimensions such as `num_tokens` or `2*batch`."""
    dtype: str
    """`float32`, `int64`, ..."""


class Input(Tensor, frozen=True):
    """One argument of the program, in the order of `forward`."""

    values: tuple[float, float] | None = None
    """Half-open range that made-up inputs are drawn from."""
    mutated: bool = False
    """Whether the program writes into it."""
    pad: int | Literal["last"] | None = None
    """What rows of a padded size are filled with."""
    bound: bool = False
    """Whether it is handed over once, with `Program.bind_inputs`."""


class Weight(Tensor, frozen=True):
    """A parameter or persistent buffer, bound by name."""

    aliases: tuple[str, ...] = ()
    """Further names of the same tensor (tied weights, another name in checkpoints); any one of the names is enough."""
    parts: tuple[str, ...] = ()
    """Names under which checkpoints keep it in parts instead: `*` counts along the first dimension, and what several
    patterns give is concatenated along the second one."""
    buffer: bool = False
    mutated: bool = False


class Constant(Tensor, frozen=True):
    """A lifted constant or non-persistent buffer; its value is in constants.safetensors."""

    mutated: bool = False


class Piece(_Record, frozen=True):
    """A call in the stitched program."""

    name: str
    """`piece_0`, or the name of the op for an eager one."""
    kind: Literal["compiled", "eager"]
    unique: str
    """Digest of the canonical text: equal pieces share it. For an eager piece, the qualified name of the op."""
    ops: int = 1
    """Number of calls in the piece's graph."""
    dims: tuple[str, ...] = ()
    """Dimensions that a compiled piece's shapes depend on."""


class Program(_Record, frozen=True):
    """One stitched step: what serves a range or a size."""

    range: Range
    step: str
    """Name of the function in transformed_code.py that makes it."""
    binaries: tuple[str, ...]
    """Per compiled piece, in the order of the step's `pieces` argument: key into `Manifest.binaries`."""


class Proof(_Record, frozen=True):
    """A piece that was run against eager, or a program, its pieces as Python, against its graph."""

    piece: str
    """Digest of the piece, or name of the step."""
    shape: str
    """Label of the point, `num_tokens=1`."""
    max_rel_err: float
    tolerance: float
    excused: int = 0
    """Rows beyond the tolerance that were accepted, as a rounding error can change them altogether: they lie behind an
    op such as argmax, topk or a cast to float8."""
    form: Literal["", "cpu"] = ""
    """`cpu`: what passes made of the piece ran in place of the binary, as Python on the CPU, for want of the device."""


class Unproved(_Record, frozen=True):
    """A point where a piece or program was not compared with eager."""

    piece: str
    shape: str
    reason: str


class Kernel(_Record, frozen=True):
    """A GPU kernel in a binary."""

    name: str
    arch: str
    """What its machine code is for, `sm_90`."""
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of local memory of a thread: spilled registers, mostly."""
    shared: int
    """Bytes of shared memory of a block."""
    warps: int
    """Of a block."""
    chosen: Literal["rules", "tuned", "clock", "unknown"] = "rules"
    """What decided on its configuration: Inductor's rules, a tuning record, or times measured in this build; unknown
    where this torch does not let itself be watched. Kernels of fxc's ops are by rules."""
    hash: str = ""
    """What a tuning record would call it; empty for what Inductor does not look for there. Reductions that several
    blocks share have one, too, and are in no record."""


class Timed(_Record, frozen=True):
    """A fusion that was timed against the graph without it, on the machine that built it."""

    fusion: str
    """Name of the pass."""
    shape: str
    """Label of the point, `num_tokens=8`."""
    fused_us: float
    """Microseconds of a call of the piece."""
    apart_us: float
    """The same without the fusion."""
    kept: bool


class Binary(_Record, frozen=True):
    """A compiled piece: `<key>.so`, and `<key>.json` where custom ops are called from inside."""

    piece: str
    """`Piece.unique` of what it was compiled from."""
    range: str
    """Label of the range or size."""
    bytes: int
    sha256: str
    seconds: float
    """Time that compiling it took, whenever that was."""
    needs: dict[str, str] = {}
    """Versions of the C and C++ libraries that it asks for: `{"GLIBC": "2.14", "GLIBCXX": "3.4.21"}`."""
    checked: bool = False
    """Whether it was run at every point that it has to be proved at."""
    proof: tuple[Proof, ...] = ()
    """Where it was compared with eager."""
    unproved: tuple[Unproved, ...] = ()
    """Where it could not be compared."""
    assumptions: tuple[str, ...] = ()
    """What the compiler took for granted about sizes; the proof is what says that it does not matter."""
    kernels: tuple[Kernel, ...] = ()
    """Those that the compiler made; none for a CPU."""
    timed: tuple[Timed, ...] = ()
    """Fusions of the piece that were timed."""


class File(_Record, frozen=True):
    """A file of a rank's directory."""

    bytes: int
    sha256: str


class Rank(_Record, frozen=True):
    """One `rank_<r>_<d>` directory."""

    rank: int
    data_parallel_rank: int
    world_size: int
    files: dict[str, File]
    """By path relative to the artifact, `rank_0_0/transformed_code.py`."""
    direct: tuple[Factor, ...] = ()
    """What the direct key digests under which this rank was built: with `Manifest.sources` an entry of the index can be
    made again on another machine. Empty where other sources than those have given it."""


class Factor(_Record, frozen=True):
    """A named part of the content key."""

    name: str
    value: str
    """The value itself where it is short, else its digest."""


class NearMiss(_Record, frozen=True):
    """A place that looks like one for a pass, and what is different there."""

    node: str
    """Name in the piece, as the pass saw it."""
    reason: str


class PassSite(_Record, frozen=True):
    """What a pass found in a piece for a range or size."""

    piece: str
    """`piece_1`."""
    shape: str
    """Label of the range or size."""
    matches: tuple[str, ...] = ()
    """Nodes that it replaced."""
    near_misses: tuple[NearMiss, ...] = ()
    timed: tuple[Timed, ...] = ()
    """At level 3. A fusion that was not kept is among the matches, too."""


class PassReport(_Record, frozen=True):
    """A graph pass that ran."""

    name: str
    matches: int
    """In the unique pieces of the general program."""
    missed: bool = False
    """Whether it found nothing anywhere, although there were places to look at closely."""
    sites: tuple[PassSite, ...] = ()
    """Pieces where there were."""


class CustomOp(_Record, frozen=True):
    """An op outside aten that the program calls."""

    name: str
    """`namespace::op`."""
    module: str
    """What registers it: a dotted module, or `FILE.py` relative to model.yaml."""


class Source(_Record, frozen=True):
    """A source file that the trace read, or a variable of the environment that the model's code asked for."""

    file: str
    """Relative to model.yaml's directory, `module:<dotted name>`, or `env:<NAME>`."""
    digest: str


class Manifest(_Record, frozen=True, kw_only=True):
    """manifest.json."""

    format: int = FORMAT
    hash: str
    """Content key: the name of the artifact."""
    fxc: str
    """Version of fxc."""
    created: str
    """ISO 8601, UTC."""
    model: str
    """A name for people: the target's class, or the Hugging Face architecture."""
    spec: Spec
    target: Target
    factors: tuple[Factor, ...]
    inputs: tuple[Input, ...]
    outputs: str
    """The output's structure as Python source, `(logits, {"hidden": h})`, for people."""
    results: tuple[Tensor, ...] = ()
    """The tensors in it, in that order; none where graphs for several ranges describe them differently."""
    weights: tuple[Weight, ...]
    constants: tuple[Constant, ...]
    unused_weights: tuple[str, ...] = ()
    """Parameters and buffers that the model has and the program does not read: ignored when bound."""
    programs: tuple[Program, ...]
    pieces: dict[str, tuple[Piece, ...]]
    """Per step function, its calls in order."""
    binaries: dict[str, Binary]
    passes: tuple[PassReport, ...] = ()
    custom_ops: tuple[CustomOp, ...] = ()
    backends: dict[str, str] = {}
    """What computes an attention op that the program calls: `{"fxc.attention.paged": "triton"}`."""
    sources: tuple[Source, ...] = ()
    tuning: str = ""
    """Digest of the tuning record that the build had; empty where it had none."""
    proof: tuple[Proof, ...] = ()
    unproved: tuple[Unproved, ...] = ()
    proved: bool = True
    """Whether all binaries and programs were run against eager; `unproved` lists where nothing could be compared."""
    verified: bool = True
    """Whether the binaries have run on a device of their kind: false for what was built without one, until
    `fxc verify --run`."""
    tolerances: dict[str, float] = {}
    """Largest relative error accepted per dtype."""
    seconds: dict[str, float] = {}
    """Phases of the build that made it, before it was published: trace, partition, compile, prove, total."""
    ranks: dict[str, Rank] = {}
    """By directory name, `rank_0_0`."""

    @property
    def sizes(self) -> list[int | dict[str, int]]:
        """Sizes with a program of their own, spelled as in model.yaml: 8, or {batch: 1, tokens: 128}."""
        ranges = [program.range for program in self.programs]
        free = {name for box in ranges for name, low, high in box.bounds if low < high}
        found = {
            tuple((name, low) for name, low, high in box.bounds if low == high and (name in free or box.is_size)): None
            for box in ranges
        }
        return [size[0][1] if len(ranges[0].bounds) == 1 else dict(size) for size in found if size]


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    return seal(msgspec.json.encode(manifest))


def decode(data: bytes, where: str) -> Manifest:
    """Read manifest.json; `where` is named in the error.

    Raises:
        DamagedError: not a manifest of this format, or altered.
    """
    return decode_sealed(data, Manifest, where, "run `fxc build` again: it mends the artifact")


def decode_sealed(data: bytes, kind: type[T], where: str, hint: str) -> T:
    """What `seal` was given, as a `kind`; `where` is named in the error.

    Raises:
        DamagedError: altered, or another kind of thing.
    """
    try:
        return msgspec.json.decode(unseal(data, where), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedError(f"{where} is damaged: {one_line(error)}", hint) from None
    except RecursionError:
        raise DamagedError(f"{where} is damaged: it is nested too deeply", hint) from None


def one_line(error: BaseException) -> str:
    """What an error says, on one line: it may quote a name with line breaks."""
    return " ".join(str(error).split())


def seal(data: bytes) -> bytes:
    """A JSON object laid out for people, its first key the sha256 of the rest, so that any altered byte is noticed."""
    text = msgspec.json.format(data, indent=1) + b"\n"
    return b'{\n "sha256": "%s",' % hashlib.sha256(text).hexdigest().encode() + text[1:]


def unseal(data: bytes, where: str) -> bytes:
    """Undo `seal`; `where` is named in the error.

    Raises:
        DamagedError: the text is not what was sealed.
    """
    match = _SEAL.match(data)
    text = b"{" + data[match.end() :] if match else b""
    if not match or hashlib.sha256(text).hexdigest().encode() != match[1]:
        raise DamagedError(f"{where} is damaged: it is not the text that was written", "run `fxc build` again")
    return text


_SEAL = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})",')


def to_data(manifest: Manifest) -> dict[str, Any]:
    """Plain data for `inspect --json`."""
    data: dict[str, Any] = msgspec.to_builtins(manifest)
    return data
