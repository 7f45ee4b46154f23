"""Who chooses a kernel's configuration, on a stand-in for Inductor's module; tests/virtual has Inductor itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fxc import kernel_choice
from fxc.errors import CompileError, IncompatibleError
from fxc.job_errors import failure
from fxc.jobs import Reply
from fxc.kernel_choice import HEURISTICS, Choice, Choices, Stopwatch
from tests.test_lower import made


class Config:
    def __init__(self, kwargs: dict[str, int], num_warps: int = 4, num_stages: int = 1) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def inductor(table: dict[str, Config] | None = None) -> Any:
    """What `triton_heuristics` is to us: its rules choose 1024, its other candidates are 256 and 512, and it looks for
    kernels in a table by their names."""

    class CachingAutotuner:
        def __init__(self, fn: Any, *, configs: list[Config], size_hints: dict[str, int], meta: dict[str, Any]) -> None:
            self.fn, self.size_hints, self.inductor_meta = fn, dict(size_hints), dict(meta)
            found = module.lookup_autotune_config(size_hints, fn)
            self.configs = [found] if found else configs
            self.deterministic_mode = meta.get("deterministic", False)
            self.custom_kernel = False
            self.launchers: list[Any] = []
            self.times: dict[int, float] = {}
            self.coordesc_tuner = SimpleNamespace(
                lookup_in_cache=lambda config: self.times.get(config.kwargs["XBLOCK"])
            )

        def save_gpu_kernel(self, stream: int, launcher: Any) -> None:
            pass

    def heuristic(size_hints: dict[str, int], triton_meta: Any, inductor_meta: dict[str, Any], **options: Any) -> Any:
        every = inductor_meta.get("max_autotune_pointwise")
        configs = [Config({"XBLOCK": size}) for size in ((256, 512) if every else (1024,))]
        if options.get("return_configs"):
            return configs
        inductor_meta.pop("mutated_arg_names", None)
        return lambda fn: CachingAutotuner(fn, configs=configs, size_hints=size_hints, meta=inductor_meta)

    module = SimpleNamespace(
        CachingAutotuner=CachingAutotuner,
        TRITON_MAX_BLOCK={"X": 4096},
        lookup_autotune_config=lambda size_hints, fn: (table or {}).get(fn.__name__),
        generate_lookup_hash_from_source_code=lambda hints, text: f"{hints}:{text}",
        **dict.fromkeys(HEURISTICS, heuristic),
    )
    return module


FUNCTION = SimpleNamespace(__name__="poi_fused_relu", src="def poi_fused_relu(): pass")


def decorated(module: Any, function: Any = FUNCTION, **meta: Any) -> Any:
    meta = {"kernel_name": function.__name__, "mutated_arg_names": ("x",), "deterministic": True, **meta}
    decorate: Callable[[Any], Any] = module.pointwise(size_hints={"x": 64}, triton_meta={}, inductor_meta=meta)
    return decorate(function)


def chosen(module: Any, function: Any = FUNCTION, **meta: Any) -> Choice:
    choices = Choices()
    choices.watch(module)
    kernel = decorated(module, function, **meta)
    kernel.save_gpu_kernel(0, None)
    return choices.of(function.__name__)


def test_rules_a_clock_or_a_record() -> None:
    hash = "{'x': 64}:def poi_fused_relu(): pass"
    assert chosen(inductor()) == ("rules", hash)
    assert chosen(inductor(), deterministic=False, max_autotune_pointwise=True) == ("clock", hash)
    table = {"poi_fused_relu": Config({"XBLOCK": 64})}
    assert chosen(inductor(table)) == ("tuned", hash)
    assert chosen(inductor(table), deterministic=False, coordinate_descent_tuning=True) == ("tuned", hash)
    assert chosen(inductor(), SimpleNamespace(__name__="norm", src="def norm(): pass")) == ("rules", "")
    assert Choices().of("unheard") == ("unknown", "")


def test_what_a_record_says_stays_as_it_is() -> None:
    module = inductor({"poi_fused_relu": Config({"XBLOCK": 64})})
    Choices().watch(module)
    kernel = decorated(module, coordinate_descent_tuning=True)
    assert (kernel.inductor_meta["coordinate_descent_tuning"], kernel.inductor_meta["dynamic_scale_rblock"]) == (
        False,
        False,
    )


@pytest.mark.parametrize(
    ("kwargs", "meta", "message"),
    [
        ({"XBLOCK": 8192}, {}, "the tuning record has XBLOCK 8192 for kernel poi_fused_relu, expected 1 to 4096"),
        ({"XBLOCK": 8}, {"min_xblock": 16}, "has XBLOCK 8 for kernel poi_fused_relu, expected 16 to 4096"),
        ({"YBLOCK": 8}, {}, "has YBLOCK for kernel poi_fused_relu, expected XBLOCK"),
        ({}, {}, "has no block for kernel poi_fused_relu, expected XBLOCK"),
    ],
)
def test_a_configuration_that_a_kernel_was_not_written_for(
    kwargs: dict[str, int], meta: dict[str, int], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        chosen(inductor({"poi_fused_relu": Config(kwargs)}), **meta)


def timed(times: dict[int, float], best: Config, function: Any = FUNCTION) -> list[dict[str, Any]]:
    module, watch = inductor(), Stopwatch()
    watch.start(module)
    kernel = decorated(module, function)
    kernel.times, kernel.launchers = times, [SimpleNamespace(config=best)]
    return list(watch.results(module))


def test_the_fastest_and_what_rules_choose() -> None:
    (found,) = timed({256: 0.004, 512: 0.0025, 1024: 0.003}, Config({"XBLOCK": 512}, 2))
    assert found == {
        "hash": "{'x': 64}:def poi_fused_relu(): pass", "name": "poi_fused_relu",
        "configuration": {"XBLOCK": 512, "num_warps": 2, "num_stages": 1}, "us": 2.5,
        "rules": {"XBLOCK": 1024, "num_warps": 4, "num_stages": 1}, "rules_us": 3.0,
    }  # fmt: skip
    (spilling,) = timed({512: 0.0025, 1024: math.inf}, Config({"XBLOCK": 512}))
    assert spilling["rules_us"] is None


def test_what_rules_choose_is_among_the_candidates() -> None:
    """And all of them are timed, whatever the build is told."""
    module = inductor()
    Stopwatch().start(module)
    kernel = decorated(module)
    assert [config.kwargs["XBLOCK"] for config in kernel.configs] == [256, 512, 1024]
    assert (kernel.deterministic_mode, kernel.inductor_meta["coordinate_descent_tuning"]) == (False, True)
    assert [c.kwargs["XBLOCK"] for c in module.reduction({}, {}, {}, return_configs=True)] == [1024]


@pytest.mark.parametrize(
    ("times", "best", "function"),
    [
        ({1024: 0.003}, Config({"XBLOCK": 512}), FUNCTION),
        ({512: math.inf, 1024: math.inf}, Config({"XBLOCK": 512}), FUNCTION),
        ({512: 0.002, 1024: 0.003}, Config({"XBLOCK": 512, "RSPLIT": 2}), FUNCTION),
        ({512: 0.002, 1024: 0.003}, Config({"XBLOCK": 512}), SimpleNamespace(__name__="norm", src="def norm(): pass")),
    ],
    ids=["not timed", "spills", "more than blocks", "not looked for"],
)
def test_what_no_record_can_say_is_left_out(times: dict[int, float], best: Config, function: Any) -> None:
    assert timed(times, best, function) == []


def test_a_kernel_that_never_ran_is_left_out() -> None:
    module, watch = inductor(), Stopwatch()
    watch.start(module)
    decorated(module)
    assert list(watch.results(module)) == []


# A torch that lacks something


WRITER = " ".join(f'"{key}"' for key in kernel_choice.META)
"""As what writes kernels names what it says of them."""


def without(*names: str) -> Any:
    """Inductor's own module, but for some names in it."""
    from torch._inductor.runtime import triton_heuristics

    return SimpleNamespace(**{name: value for name, value in vars(triton_heuristics).items() if name not in names})


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_choice.missing(without(), WRITER) == []
    assert kernel_choice.missing(without("lookup_autotune_config", "TRITON_MAX_BLOCK"), WRITER) == [
        "TRITON_MAX_BLOCK.get", "lookup_autotune_config",
    ]  # fmt: skip
    other = without()
    other.lookup_autotune_config = lambda hints, fn: None
    other.CachingAutotuner = type("CachingAutotuner", (), {"__init__": lambda self, configs: None})
    assert kernel_choice.missing(other, WRITER) == [
        "CachingAutotuner.save_gpu_kernel",
        "lookup_autotune_config(size_hints)",
    ]

    class Renamed(other.CachingAutotuner):  # type: ignore[misc]
        def __init__(self, configs: Any) -> None:
            self.configs = self.coordesc_tuner = self.custom_kernel = self.deterministic_mode = configs
            self.fn = self.meta = self.launchers = self.size_hints = None

        def save_gpu_kernel(self, stream: Any, launcher: Any) -> None:
            pass

    other = without()
    other.CachingAutotuner = Renamed
    assert kernel_choice.missing(other, WRITER) == ["CachingAutotuner().inductor_meta"]
    monkeypatch.setattr(kernel_choice, "META", ("kernel_name", "autotune_slowly"))
    assert kernel_choice.missing(without(), WRITER) == ['inductor_meta["autotune_slowly"]']


def lacking() -> Any:
    """Inductor's module, of a torch that lacks something."""
    kernel_choice.require(without("lookup_autotune_config"), WRITER)


LACKS = "kernels cannot be tuned with torch .*: its Inductor lacks lookup_autotune_config"


def test_an_ordinary_build_goes_on() -> None:
    kernel_choice.watch(lacking, required=False)
    assert kernel_choice.choice("triton_poi_fused_relu_0") == ("unknown", "")


def test_a_build_with_a_record_does_not() -> None:
    with pytest.raises(IncompatibleError, match=LACKS) as caught:
        kernel_choice.watch(lacking, required=True)
    error = failure(made(), Reply(0, 1.0, error=f"IncompatibleError: {caught.value}"), checking=False)
    assert (type(error), error.message) == (IncompatibleError, caught.value.message)
    assert error.hint == "take another torch; with this one `--tuning none` builds"
