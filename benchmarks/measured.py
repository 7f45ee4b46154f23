"""What is measured, one mode per process: `python measured.py MODE JSON` prints one JSON object.

Every mode makes the same model with random weights on the device first, then starts its clock, gets every size and one
other number of tokens ready, and runs each once. Times are seconds.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import json  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

IMPORTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

Step = Callable[[Tensor, Tensor], Tensor]
OTHER = 37
"""A number of tokens that is no size: the general program serves it."""


def main() -> None:
    mode, config = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    with torch.no_grad():
        result = MODES[mode](config)
    result["import_torch"] = IMPORTED - START
    result["process"] = time.perf_counter() - START
    print(json.dumps(result))


def decoder(config: Mapping[str, Any]) -> nn.Module:
    from tiny_llama import TinyLlama

    with torch.device(config["device"]):
        model = TinyLlama(**config["args"])
    return model.to(getattr(torch, config["dtype"])).eval()


def tokens(config: Mapping[str, Any], count: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, config["args"]["vocab"], (count,), device=config["device"])
    return ids, torch.arange(count, device=config["device"])


def finish(config: Mapping[str, Any]) -> float:
    if config["device"] == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def per_call(config: Mapping[str, Any], call: Callable[[], object], repeats: int, calls: int) -> float:
    """Median over `repeats` of the mean of `calls` calls, after a warm-up."""
    times = []
    for _ in range(repeats + 2):
        start = finish(config)
        for _ in range(calls):
            call()
        times.append((finish(config) - start) / calls)
    return statistics.median(times[2:])


def checked(config: Mapping[str, Any], model: nn.Module, steps: Mapping[int, Step]) -> dict[str, Any]:
    """Largest relative error against eager, and the time of a step, at each number of tokens; outside the clock."""
    errors, seconds = {}, {}
    for count, step in steps.items():
        ids, positions = tokens(config, count)
        expected, found = model(ids, positions).float(), step(ids, positions).float()
        errors[str(count)] = ((found - expected).norm() / expected.norm()).item()
        seconds[str(count)] = per_call(config, partial(step, ids, positions), 5, 5)
    return {"error": errors, "step": seconds}


def run_each(config: Mapping[str, Any], step_for: Callable[[int], Step]) -> tuple[dict[int, Step], dict[str, float]]:
    """Get every number of tokens ready and run it once; the seconds that each took."""
    steps, seconds = {}, {}
    for count in (*config["sizes"], OTHER):
        ids, positions = tokens(config, count)
        start = finish(config)
        steps[count] = step_for(count)
        steps[count](ids, positions)
        seconds[str(count)] = finish(config) - start
    return steps, seconds


def loaded(config: Mapping[str, Any]) -> dict[str, Any]:
    """fxc.load of a built artifact."""
    import fxc

    model = decoder(config)
    begin = finish(config)
    load = fxc.load  # imports fxc.runtime
    after_import = finish(config)
    program = load(config["hash"], cache_dir=Path(config["cache"]))
    after_load = finish(config)
    program.bind(model)
    after_bind = finish(config)
    steps, first = run_each(config, lambda _: program)
    ready = finish(config) - begin
    phases = {"import": after_import - begin, "load": after_load - after_import, "bind": after_bind - after_load}
    from fxc.runtime import compilers_imported

    found = {"first": first, "ready": ready, "imported": compilers_imported()}
    return phases | found | checked(config, model, steps)


def compiled(config: Mapping[str, Any]) -> dict[str, Any]:
    """torch.compile: every size compiled for itself, and one program for the rest, or (`general`) only that one."""
    model = decoder(config)
    begin = finish(config)
    options = {} if config.get("mode") is None else {"mode": config["mode"]}
    general = torch.compile(model, dynamic=True, **options)
    exact = general if config.get("general") else torch.compile(model, dynamic=False, **options)
    steps, first = run_each(config, lambda count: general if count == OTHER else exact)
    return {"first": first, "ready": finish(config) - begin} | checked(config, model, steps)


def saved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Compile the whole model for each size with standalone_compile and save a CompiledArtifact of each."""
    from torch._inductor import standalone_compile

    model = decoder(config)
    begin = finish(config)
    for count in config["sizes"]:
        program = torch.export.export(model, tokens(config, count))
        names = [spec.target or "" for spec in program.graph_signature.input_specs]
        inputs = flat_inputs(config, model, names, count)
        artifact = standalone_compile(program.graph_module, [*inputs], dynamic_shapes="from_example_inputs")
        artifact.save(path=str(Path(config["cache"], f"{count}.bin")))
        Path(config["cache"], f"{count}.json").write_text(json.dumps(names))
    return {"ready": finish(config) - begin}


def flat_inputs(config: Mapping[str, Any], model: nn.Module, names: list[str], count: int) -> list[Tensor]:
    """Weights by name, then the tokens: the inputs of an exported graph."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return [*(tensors[name].detach() for name in names if name), *tokens(config, count)]


def artifacts(config: Mapping[str, Any]) -> dict[str, Any]:
    """CompiledArtifact.load of what `saved` saved."""
    model = decoder(config)
    begin = finish(config)
    from torch._inductor.standalone_compile import CompiledArtifact

    first = {}
    for count in config["sizes"]:
        start = finish(config)
        artifact = CompiledArtifact.load(path=str(Path(config["cache"], f"{count}.bin")))
        names = json.loads(Path(config["cache"], f"{count}.json").read_text())
        artifact(*flat_inputs(config, model, names, count))
        first[str(count)] = finish(config) - start
    return {"first": first, "ready": finish(config) - begin}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of one call of `Small`, the way `config["how"]` says."""
    from small import Small

    model = Small().to(config["device"]).eval()
    x = torch.randn(8, 16, device=config["device"])
    call: Callable[[], Any]
    if config["how"] == "eager":
        call = lambda: model(x)  # noqa: E731
    elif config["how"] == "torch.compile":
        compiled_model = torch.compile(model)
        call = lambda: compiled_model(x)  # noqa: E731
    else:
        import fxc

        program = fxc.load(config["hash"], cache_dir=Path(config["cache"]))
        program.bind(model)
        call = lambda: program(x=x)  # noqa: E731
    torch.testing.assert_close(call(), model(x))
    return {"call": per_call(config, call, 15, 1000)}


MODES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "loaded": loaded, "compiled": compiled, "saved": saved, "artifacts": artifacts, "small": small,
}  # fmt: skip

if __name__ == "__main__":
    main()
