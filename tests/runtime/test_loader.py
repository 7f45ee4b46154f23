from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from handmade import LINEAR, span

from fxc import machine
from fxc.cache import Artifact, Cache
from fxc.errors import CacheMissError, DamagedError, IncompatibleError, UsageError
from fxc.manifest import Program, Rank
from fxc.runtime import load
from fxc.shapes import Range

Make = Callable[..., Path]

WEIGHT = torch.arange(16.0).reshape(4, 4)
BIAS = torch.tensor([1.0, 2.0, 3.0, 4.0])

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers")
NO_HEAVY = f"""
import sys
bad = sorted(m for m in sys.modules if m.startswith({HEAVY!r}))
assert not bad, bad
"""


def child(code: str, *args: str) -> str:
    """Run code with an empty environment: no PATH, no HOME."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env={}, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT.t() * scale + BIAS


def test_compiled_pieces_run_at_sizes_and_range(compiled: Path) -> None:
    program = load(compiled).bind({"linear.weight": WEIGHT})
    for n in (1, 2, 7, 8, 9, 64):
        x, scale = torch.randn(n, 4), torch.randn(n, 1)
        torch.testing.assert_close(program(x=x, scale=scale), expected(x, scale))


def test_loads_without_environment_read_only_and_moved(compiled: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(compiled, moved)
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    code = f"""
import sys, torch, fxc.runtime
program = fxc.runtime.load(sys.argv[1])
program.bind({{"head.weight": torch.eye(4)}})
print(program(torch.ones(3, 4), torch.ones(3, 1)).tolist()[2], program(torch.ones(8, 4), torch.ones(8, 1)).tolist()[7])
{NO_HEAVY}
"""
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert child(code, str(moved)) == "[2.0, 3.0, 4.0, 5.0] [2.0, 3.0, 4.0, 5.0]\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_keeps_working_when_the_artifact_is_deleted(compiled: Path, tmp_path: Path) -> None:
    code = """
import shutil, sys, torch, fxc.runtime
program = fxc.runtime.load(sys.argv[1]).bind({"linear.weight": torch.eye(4)})
shutil.rmtree(sys.argv[1])
print([program(torch.ones(n, 4), torch.ones(n, 1)).sum().item() for n in (1, 8, 9)])
"""
    assert child(code, str(shutil.copytree(compiled, tmp_path / "copy"))) == "[14.0, 112.0, 126.0]\n"


def test_two_threads_get_their_own_results(compiled: Path) -> None:
    program = load(compiled).bind({"linear.weight": WEIGHT})
    wrong: list[int] = []

    def work(seed: int) -> None:
        x, scale = torch.full((9, 4), float(seed)), torch.ones(9, 1)
        right = expected(x, scale)
        wrong.extend(seed for _ in range(300) if not torch.equal(program(x=x, scale=scale), right))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_level_0_runs_the_pieces_of_its_text(artifact: Make) -> None:
    program = load(artifact()).bind({"linear.weight": WEIGHT})
    x, scale = torch.randn(5, 4), torch.randn(5, 1)
    torch.testing.assert_close(program(x, scale), expected(x, scale))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("transformed_code.py", lambda data: data + b"\n", "transformed_code.py"),
        ("constants.safetensors", lambda data: data[:-1], "constants.safetensors"),
        ("constants.safetensors", lambda data: None, "constants.safetensors is missing"),
        ("inductor/general.so", lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], "inductor/general.so"),
    ],
)
def test_a_damaged_file_is_named(
    compiled: Path, tmp_path: Path, name: str, damage: Callable[[bytes], bytes | None], message: str
) -> None:
    copy = Path(shutil.copytree(compiled, tmp_path / "copy"))
    file = copy / "rank_0_0" / name
    data = damage(file.read_bytes())
    file.unlink() if data is None else file.write_bytes(data)
    with pytest.raises(DamagedError, match=message):
        load(copy)


def test_a_library_that_the_linker_refuses_is_an_error(artifact: Make, tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"not a library")
    where = artifact(
        code=LINEAR,
        libraries={"bad": tmp_path / "bad.so"},
        programs=(Program(range=span(1, 64), step="step_0", binaries=("bad",)),),
    )
    with pytest.raises(IncompatibleError, match=r"inductor/bad\.so cannot be loaded with torch"):
        load(where)


def test_another_machine_is_refused(artifact: Make) -> None:
    with pytest.raises(IncompatibleError, match="sparc"):
        load(artifact(target=msgspec.structs.replace(machine.probe("cpu"), arch="sparc")))


def test_ranks_from_arguments_and_environment(artifact: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Rank(rank=rank, data_parallel_rank=0, world_size=2, files={}) for rank in (0, 1)]
    where = artifact(ranks=two)
    assert load(where, rank=1, world_size=2).manifest.ranks.keys() == {"rank_0_0", "rank_1_0"}
    with pytest.raises(CacheMissError, match=r"has no rank_2_0; its ranks are: rank_0_0, rank_1_0"):
        load(where, rank=2)
    with pytest.raises(CacheMissError, match=r"has no rank_0_1"):
        load(where, dp_rank=1)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(CacheMissError, match=r"has no rank_3_0"):
        load(where)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CacheMissError, match=r"rank_1_0 of artifact .* was built for a world of 2, not of 4") as info:
        load(where)
    assert info.value.hint == "build it with --rank 1 --world-size 4, or load with world_size=2"
    monkeypatch.setenv("WORLD_SIZE", "2")
    load(where)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(UsageError, match=r"RANK is 'one', expected a number"):
        load(where)


def test_references_that_lead_nowhere(artifact: Make, tmp_path: Path) -> None:
    with pytest.raises(CacheMissError, match=r"nowhere is not an artifact: it has no manifest\.json"):
        load(tmp_path / "nowhere")
    with pytest.raises(CacheMissError, match=r"is not an artifact: it has no manifest\.json"):
        load(tmp_path)
    with pytest.raises(CacheMissError, match="abcd"):
        load("abcd1234", cache_dir=tmp_path / "cache")
    with pytest.raises(UsageError, match="'gpu' is not a device"):
        load(artifact(), "gpu")


def test_loads_by_a_prefix_of_the_hash(artifact: Make, tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    made = artifact()
    name = Artifact.open(made).manifest.hash
    (cache.root / "artifacts").mkdir(parents=True)
    made.rename(cache.root / "artifacts" / name)
    assert load(name[:8], cache_dir=tmp_path / "cache").manifest.hash == name


def test_constants_belong_to_the_program(artifact: Make) -> None:
    code = """
WEIGHTS = ("state",)
def step_0(pieces, weights):
    (state,) = weights
    def step():
        state.add_(1)
        return state.clone()
    return step
PIECES = {"step_0": ()}
"""
    where = artifact(
        code=code,
        inputs=(),
        weights=(),
        constants={"state": torch.zeros(2)},
        programs=(Program(range=Range(()), step="step_0", binaries=()),),
    )
    first, second = load(where), load(where)
    assert [first().tolist(), first().tolist(), second().tolist()] == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
