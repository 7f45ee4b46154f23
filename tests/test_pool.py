"""What the compile workers see of a build's environment, and what they say of a compiler's output."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fxc._worker import _message, _plain
from fxc.pool import environment


@pytest.mark.parametrize(
    "name",
    [
        "TORCHINDUCTOR_CPP_WRAPPER", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TORCHDYNAMO_REPRO_AFTER",
        "TORCH_COMPILE_DEBUG", "TORCH_LOGS", "AOT_INDUCTOR_ENABLE_LTO", "AOTI_RUNTIME_CHECK_INPUTS",
        "INDUCTOR_POST_FUSION_SVG", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "KMP_AFFINITY", "TRITON_INTERPRET",
        "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_CUOBJDUMP_PATH", "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE",
        "ENABLE_PERSISTENT_TMA_MATMUL",
    ],
)  # fmt: skip
def test_what_would_change_a_binary_is_kept_from_the_workers(name: str) -> None:
    assert name not in environment({name: "1"})


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "CXX", "CPLUS_INCLUDE_PATH", "TRITON_LIBCUDA_PATH", "MY_FLAG", "OMPI"]
)
def test_the_rest_is_passed_on(name: str) -> None:
    assert environment({name: "1"})[name] == "1"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "C++ compile error\n\nOutput:\n/tmp/a.cpp:1:2: fatal error: x.h: No such file",
            "fatal error: x.h: No such file",
        ),
        ("first\nan Error here", "an Error here"),
        ("first\nsecond", "first"),
        ("", ""),
    ],
)
def test_message_of_a_failed_job(text: str, line: str) -> None:
    assert _message(RuntimeError(text)) == f"RuntimeError: {line}"


def test_directories_that_command_lines_do_not_survive_get_another_path(tmp_path: Path) -> None:
    assert _plain(str(tmp_path)) == str(tmp_path)
    odd = tmp_path / "with space"
    odd.mkdir()
    (odd / "file").touch()
    plain = _plain(str(odd))
    assert shlex.quote(plain) == plain
    assert [path.name for path in Path(plain).iterdir()] == ["file"]
