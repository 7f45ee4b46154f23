"""The architectures of `configs.py`: exported without weights, run with random ones, against stock eager attention."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fxc import machine
from fxc.errors import SpecError, TraceError
from fxc.models import ModelSource, expected_ops, instantiate, resolve
from fxc.models.hf_attention import PATTERN, Pattern
from fxc.plan import make_plan
from fxc.spec import DimSpec, Spec, parse_spec
from fxc.trace import with_fake_weights
from tests.models import configs

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*:UserWarning")

TOKENS = (1, 2, 5, 13, 40)
BATCHES = ((1, 1), (2, 2), (1, 5), (3, 13), (2, 40))

FULL = Pattern(causal=True)
PATTERNS = {
    "qwen3": [Pattern(True, window=7), FULL],
    "mistral": [Pattern(True, window=6)] * 2,
    "mixtral": [Pattern(True, window=9)] * 2,
    "gemma2": [Pattern(True, window=5), FULL],
    "gemma3_text": [Pattern(True, window=5), FULL],
    "phi3": [Pattern(True, window=8)] * 2,
    "gpt_oss": [Pattern(True, window=4), FULL],
    "llama4_text": [Pattern(True, chunk=6), FULL],
    "modernbert": [Pattern(False), Pattern(False, window=6)],
}


def write(folder: Path, architecture: str, **changes: Any) -> None:
    data = {**configs.config(architecture), **changes}
    (folder / "config.json").write_text(json.dumps(data))


def spec(**changes: Any) -> Spec:
    return parse_spec({"model": {"huggingface": "."}, "device": "cpu", **changes})


def stock(folder: Path, module: nn.Module) -> Any:
    """The class as transformers has it, with eager attention and random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    cls: Any = type(module).__mro__[1]
    made = cls._from_config(config, attn_implementation="eager", experts_implementation="eager")
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
    return made.eval()


def cases(module: Any, causal: bool) -> Iterable[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Arguments of the exported program, and what stock eager answers."""
    torch.manual_seed(1)
    with torch.no_grad():
        for count in TOKENS if causal else ():
            ids, positions = torch.randint(3, 97, (count,)), torch.arange(count)
            yield (ids, positions), module(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        for batch, seq in () if causal else BATCHES:
            ids, mask = torch.randint(3, 97, (batch, seq)), torch.ones(batch, seq, dtype=torch.int64)
            mask[0, 2:] = torch.arange(seq)[2:] % 3 > 0
            yield (ids, mask), module(input_ids=ids, attention_mask=mask).last_hidden_state


def export(source: ModelSource, module: nn.Module, how: str) -> torch.export.ExportedProgram:
    dims = {name: torch.export.Dim(name, min=dim.min, max=dim.max) for name, dim in source.dims.items()}
    shapes = {name: {i: dims[str(part)] for i, part in enumerate(entry.shape)} for name, entry in source.inputs.items()}
    example = {"num_tokens": 23, "batch": 3, "seq": 23}
    args = tuple(
        torch.ones([example[str(d)] for d in entry.shape], dtype=torch.int64) for entry in source.inputs.values()
    )
    with_fake_weights(module, "cpu")
    with torch.no_grad():
        return torch.export.export(
            module, args, dynamic_shapes=shapes, strict=how == "strict",
            prefer_deferred_runtime_asserts_over_guards=how == "deferred",
        )  # fmt: skip


def run(program: torch.export.ExportedProgram, values: dict[str, Tensor], args: tuple[Tensor, ...]) -> Tensor:
    """The exported graph, weights taken from `values` by name."""
    rest = iter(args)
    known = {**program.constants, **values}
    full = [known[s.target] if s.target is not None else next(rest) for s in program.graph_signature.input_specs]
    with torch.no_grad():
        out: Tensor = torch.fx.Interpreter(program.graph_module).run(*full)[0]
    return out


HOWS = [("llama", "deferred"), ("llama", "strict"), ("gpt_oss", "strict"), ("modernbert", "strict")]
HOWS += [("llama4_text", "deferred")]  # the plain way fixes its number of tokens


@pytest.mark.parametrize("model_type", [*configs.CAUSAL, *configs.ENCODER])
def test_who_sees_whom(tmp_path: Path, model_type: str) -> None:
    write(tmp_path, model_type)
    source = resolve(spec(), tmp_path)
    module = instantiate(source)
    assert module.state_dict().keys() == stock(tmp_path, module).state_dict().keys()
    patterns = [getattr(layer, PATTERN) for layer in module.modules() if hasattr(layer, PATTERN)]
    assert patterns == PATTERNS.get(model_type, [Pattern("positions" in source.inputs)] * 2)


@pytest.mark.parametrize(("model_type", "how"), HOWS, ids=str)
def test_exported_equals_stock_eager(tmp_path: Path, model_type: str, how: str) -> None:
    write(tmp_path, model_type)
    source = resolve(spec(), tmp_path)
    module = instantiate(source)
    causal = "positions" in source.inputs
    reference = stock(tmp_path, module)
    program = export(source, module, how)
    calls = [node for node in program.graph.nodes if node.target is torch.ops.fxc.attention.default]
    assert expected_ops(module) == {"fxc::attention": len(calls)} == {"fxc::attention": 2}
    values = {**dict(reference.named_buffers()), **reference.state_dict()}
    for args, expected in cases(reference, causal):
        assert expected.isfinite().all()
        torch.testing.assert_close(run(program, values, args), expected, rtol=1e-4, atol=1e-4)


def test_inputs_follow_from_the_config(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    source = resolve(spec(), tmp_path)
    assert source.name == "LlamaForCausalLM"
    assert source.dims == {"num_tokens": DimSpec(min=1, max=128)}
    assert {name: (i.shape, i.dtype, i.values) for name, i in source.inputs.items()} == {
        "input_ids": (("num_tokens",), "int64", (0, 97)),
        "positions": (("num_tokens",), "int64", (0, 128)),
    }
    assert [path.name for path in source.sources] == ["config.json", "modeling_llama.py", "configuration_llama.py"]


@pytest.mark.parametrize(("model_type", "longest"), [("bert", 128), ("roberta", 126)])
def test_inputs_of_an_encoder(tmp_path: Path, model_type: str, longest: int) -> None:
    write(tmp_path, model_type)
    source = resolve(spec(), tmp_path)
    assert source.dims == {"batch": DimSpec(min=1, max=64), "seq": DimSpec(min=1, max=longest)}
    assert list(source.inputs) == ["input_ids", "attention_mask"]
    assert source.inputs["attention_mask"].values == (0, 2)


def test_spec_goes_before_the_config(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    assert resolve(spec(dims={"num_tokens": {"min": 1, "max": 32}}), tmp_path).dims["num_tokens"].max == 32
    inputs = {name: {"shape": ["n"], "dtype": "int32"} for name in ("input_ids", "positions")}
    source = resolve(spec(inputs=inputs, dims={"n": {"min": 1, "max": 8}}), tmp_path)
    assert source.dims == {"n": DimSpec(min=1, max=8)}
    assert source.inputs["positions"].dtype == "int32"
    with pytest.raises(SpecError, match=r"dims.tokens: no input has this dimension") as caught:
        resolve(spec(dims={"tokens": {"min": 1, "max": 32}}), tmp_path)
    assert "num_tokens" in caught.value.hint


def test_dtype_is_that_of_the_config_unless_given(tmp_path: Path) -> None:
    write(tmp_path, "deepseek_v3", torch_dtype="bfloat16")
    module = instantiate(resolve(spec(), tmp_path))
    dtypes = {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    assert dtypes["model.embed_tokens.weight"] == torch.bfloat16
    assert dtypes["model.rotary_emb.inv_freq"] == torch.float32
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32  # as from_pretrained keeps it
    module = instantiate(resolve(spec(model={"huggingface": ".", "dtype": "float16"}), tmp_path))
    assert module.get_parameter("model.embed_tokens.weight").dtype == torch.float16


def test_parameters_are_on_the_meta_device_and_tied_ones_stay_so(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    module = instantiate(resolve(spec(), tmp_path))
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in module.parameters())
    assert module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")
    assert not module.get_buffer("model.rotary_emb.inv_freq").is_meta
    assert not module.training


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "no_such_model"}, "model_type 'no_such_model' is unknown to transformers"),
    ({"model_type": None}, "has no `model_type`"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\) is not supported"),
    ({"quantization_config": "gptq"}, r"quantization_config \(gptq\) is not supported"),
    (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "T5ForConditionalGeneration is not supported",
    ),
    ({"num_attention_heads": 0}, "config.json: ZeroDivisionError"),
    ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0, expected 1 or more"),
    ({"max_position_embeddings": 2**62}, r"inputs.input_ids.shape: \['num_tokens'\] is up to 4611686018427387904 elem"),
    ({"max_position_embeddings": -1}, r"config.json: inputs.positions.values: \[0, -1\] holds no values"),
    ({"hidden_act": "no_such"}, "LlamaForCausalLM cannot be constructed: KeyError"),
    ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "BloomForCausalLM has its own attention"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, "llama", **changes)
    with pytest.raises(SpecError, match=message) as caught:
        instantiate(resolve(spec(), tmp_path))
    assert str(tmp_path / "config.json") in caught.value.message


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    write(tmp_path, "llama", model_type="theirs", auto_map=auto_map, trust_remote_code=True)
    with pytest.raises(SpecError, match="model_type 'theirs' is unknown") as caught:
        resolve(spec(), tmp_path)
    assert caught.value.hint == "code that comes with a checkpoint (auto_map) is not run"
    write(tmp_path, "llama", architectures=["TheirsForCausalLM"], auto_map=auto_map)
    with pytest.raises(SpecError, match="TheirsForCausalLM is not supported"):
        resolve(spec(), tmp_path)
    write(tmp_path, "llama", auto_map=auto_map)
    assert resolve(spec(), tmp_path).name == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SpecError, match="needs the package transformers") as caught:
        resolve(spec(), tmp_path)
    assert caught.value.hint == "pip install 'fxc[huggingface]'"


def test_positions_beyond_a_learned_table(tmp_path: Path) -> None:
    write(tmp_path, "roberta")
    dims = {"batch": {"min": 1, "max": 2}, "seq": {"min": 1, "max": 127}}
    with pytest.raises(SpecError, match=r"dims.seq: max 127 is above 126, the positions that the model has") as caught:
        resolve(spec(dims=dims), tmp_path)
    assert caught.value.hint == f"lower it: they follow from max_position_embeddings in {tmp_path / 'config.json'}"
    write(tmp_path, "llama")  # rotary: there is no table
    assert resolve(spec(dims={"num_tokens": {"min": 1, "max": 4096}}), tmp_path).dims["num_tokens"].max == 4096


def test_args_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    with pytest.raises(SpecError, match=r"model.args: a Hugging Face folder takes none"):
        resolve(spec(model={"huggingface": ".", "args": {"num_hidden_layers": 1}}), tmp_path)


@pytest.mark.parametrize(("compile_", "message"), [
    ({"sizes": [1, 129]}, "config.json: compile.sizes: 129 is outside the bounds of num_tokens, 1 to 128"),
    ({"ranges": [500]}, "compile.ranges: 500 is outside the bounds of num_tokens, 1 to 128"),
    ({"sizes": [{"tokens": 1}]}, "compile.sizes: unknown dimension 'tokens'"),
])  # fmt: skip
def test_sizes_are_checked_against_the_bounds_that_follow(
    tmp_path: Path, compile_: dict[str, Any], message: str
) -> None:
    write(tmp_path, "llama")
    with pytest.raises(SpecError, match=message):
        make_plan(spec(compile=compile_), tmp_path, machine.probe("cpu"))


def test_advice_of_transformers_is_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "gpt_oss")  # its rope parameters do not fit 128 positions
    instantiate(resolve(spec(), tmp_path))
    assert capfd.readouterr() == ("", "")


def test_refuses_classes_that_never_attend(tmp_path: Path) -> None:
    data = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**data, "vocab_size": 50, "state_size": 4}))
    with pytest.raises(SpecError, match=r"config.json has no max_position_embeddings"):
        resolve(spec(), tmp_path)
    with pytest.raises(TraceError, match="MambaForCausalLM has its own attention"):
        instantiate(resolve(spec(dims={"num_tokens": {"min": 1, "max": 64}}), tmp_path))


def test_refuses_an_encoder_that_is_not_causal(tmp_path: Path) -> None:
    write(tmp_path, "bert", architectures=["BertLMHeadModel"])
    with pytest.raises(TraceError, match="BertSelfAttention is not causal"):
        instantiate(resolve(spec(), tmp_path))


def test_refuses_a_layer_with_attention_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside layers that go through the interface, one that does not: nothing else would tell."""
    modeling: Any = transformers.models.llama.modeling_llama

    class OwnAttention(modeling.LlamaAttention):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            return self.o_proj(self.q_proj(hidden_states)), None

    def init(self: Any, config: Any, layer_idx: int) -> None:
        original(self, config, layer_idx)
        if layer_idx == 1:
            self.self_attn = OwnAttention(config, layer_idx)

    original = modeling.LlamaDecoderLayer.__init__
    monkeypatch.setattr(modeling.LlamaDecoderLayer, "__init__", init)
    write(tmp_path, "llama")
    with pytest.raises(TraceError, match="OwnAttention has its own attention"):
        instantiate(resolve(spec(), tmp_path))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"position_bias": torch.zeros(3)},
            "LlamaAttention attends with position_bias, which fxc::attention",
        ),
        ({"temperature": 0.5}, "attends with temperature"),
    ],
    ids=str,
)
def test_refuses_keyword_arguments_that_would_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], message: str
) -> None:
    modeling: Any = transformers.models.llama.modeling_llama
    forward = modeling.LlamaAttention.forward
    monkeypatch.setattr(modeling.LlamaAttention, "forward", lambda self, *a, **k: forward(self, *a, **k, **extra))
    write(tmp_path, "llama")
    with pytest.raises(TraceError, match=message):
        instantiate(resolve(spec(), tmp_path))


def test_missing_folder_and_broken_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config.json cannot be read: No such file"):
        resolve(spec(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match=r"config.json is not JSON"):
        resolve(spec(), tmp_path)


def test_inputs_that_forward_does_not_take(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    inputs = {name: {"shape": ["n"], "dtype": "int64"} for name in ("input_ids", "position")}
    with pytest.raises(SpecError, match=r"inputs.position: forward of LlamaForCausalLM does not take it") as caught:
        instantiate(resolve(spec(inputs=inputs, dims={"n": {"min": 1, "max": 8}}), tmp_path))
    assert caught.value.hint == "did you mean 'positions'?"
