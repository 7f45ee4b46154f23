"""A GPU that is not there, as far as it can be looked at without a torch built for one."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest
import torch

from fxc import inductor_options, pipeline, records, target_build
from fxc._torch_build import on_device, value
from fxc.errors import FxcError, IncompatibleError, ProofError, UsageError
from fxc.progress import Observer
from fxc.target import Target
from fxc.virtual import Properties

RECORD = records.find("h200")
H200 = Target("cuda", "x86_64", (), "2.11.0+cu130", compute_capability=(9, 0))
EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny_llama.yaml"


def test_properties() -> None:
    known = frozenset({"name", "major", "multi_processor_count", "pinned_bytes"})
    found = Properties(RECORD, known)
    assert (found.name, found.gcnArchName, found.major, found.minor) == ("NVIDIA H200", "NVIDIA H200", 9, 0)
    assert found.multi_processor_count == 132
    with pytest.raises(UsageError, match="the target record of NVIDIA H200 has no pinned_bytes, which torch asks for"):
        getattr(found, "pinned_bytes", None)  # a default does not hide it
    assert getattr(found, "of_another_vendor", None) is None
    with pytest.raises(TypeError, match="do not travel"):
        pickle.dumps(found)


def test_nothing_is_pretended_here() -> None:
    tensor = torch.ones(3)
    assert on_device(tensor, "cpu") is tensor
    assert value(tensor) is tensor


def test_without_a_clock_rules_choose() -> None:
    timed, ruled = inductor_options.options(3, True, H200), inductor_options.options(3, True, H200, clock=False)
    assert timed["max_autotune"]
    assert timed["coordinate_descent_tuning"]
    assert ruled["deterministic"]
    assert not ruled["max_autotune"]
    assert not ruled["coordinate_descent_tuning"]


def test_the_model_has_to_be_for_a_gpu() -> None:
    with pytest.raises(FxcError, match="--target NVIDIA H200: the model is for device cpu") as caught:
        target_build.build(RECORD, pipeline.Order(str(EXAMPLE)), Observer())
    assert (type(caught.value), caught.value.hint) == (UsageError, "--set device=cuda")


def test_files_are_named_by_paths_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(records.encode(RECORD))
    with pytest.raises(UsageError, match="--target NVIDIA H200: the model is for device cpu"):
        pipeline.build(EXAMPLE, target=file, tuning=tmp_path / "tuning.json", cache_dir=tmp_path)


@pytest.mark.skipif(torch.version.cuda is not None, reason="tests/virtual builds with such a torch")
def test_a_torch_without_cuda(tmp_path: Path) -> None:
    """The child's error is the parent's, with its class and hint."""
    with pytest.raises(IncompatibleError, match="is built without CUDA, which a build for a GPU needs"):
        pipeline.build(EXAMPLE, target="h200", overrides=["device=cuda"], cache_dir=tmp_path)


def test_errors_travel() -> None:
    sent = target_build.Failure("ProofError", "piece_1 is wrong", "cut it", ("piece:\n...",))
    found = msgspec.json.decode(msgspec.json.encode(sent), type=target_build.Failure).error()
    assert (type(found), found.message, found.hint) == (ProofError, "piece_1 is wrong", "cut it")
    assert found.__notes__ == ["piece:\n..."]


def test_passes_from_python_do_not_travel() -> None:
    with pytest.raises(UsageError, match="passes from Python do not reach a build for a target"):
        pipeline.build(EXAMPLE, target="h200", passes=[object()])  # type: ignore[list-item]
