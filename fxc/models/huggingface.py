"""`model.huggingface`: a folder with config.json. The weights need not be there.

A causal language model becomes forward(input_ids, positions) -> logits over one flat sequence of tokens, an encoder
forward(input_ids, attention_mask) -> last_hidden_state over a padded batch. The module is the stock one, so that its
weights have the names that checkpoints use; only `forward` differs.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxc.convert import suggest
from fxc.errors import SpecError
from fxc.models.source import EXPECTED_OPS, ModelSource
from fxc.models.target import check_dtype, check_inputs, describe
from fxc.spec import DimSpec, InputSpec, Spec

ENCODERS = {"bert": False, "distilbert": False, "modernbert": False, "roberta": True, "xlm-roberta": True}
"""By `model_type`; True where positions are counted from the padding token's id, which costs rows of the table."""

BATCH = 64
"""Largest batch of an encoder, where `dims` does not say."""


def resolve_folder(spec: Spec, directory: Path) -> ModelSource:
    """Read config.json and choose the class; constructs nothing yet."""
    check_dtype(spec.model)
    folder = directory / str(spec.model.huggingface)
    config = _config(folder)
    cls = _causal_class(config)
    causal = cls is not None
    if cls is None:
        if config.model_type not in ENCODERS:
            architecture = ", ".join(config.architectures or ()) or config.model_type
            hint = f"causal language models (...ForCausalLM) and the encoders {', '.join(ENCODERS)} are"
            raise SpecError(f"model.huggingface: {folder}: {architecture} is not supported", hint)
        cls = _encoder_class(config)
    inputs, dims = _causal_inputs(config) if causal else _encoder_inputs(config)
    inputs, dims = _override(spec, inputs, dims)

    def make() -> nn.Module:
        return _construct(cls, config, spec.model.dtype)

    def prepare(module: nn.Module) -> None:
        from fxc.models.hf_attention import route

        setattr(module, EXPECTED_OPS, route(module, causal))
        forward = _causal_forward(cls) if causal else _encoder_forward(cls)
        module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
        check_inputs(module, inputs)

    files = (folder / "config.json", *(Path(str(sys.modules[c.__module__].__file__)) for c in (cls, type(config))))
    return ModelSource(cls.__name__, inputs, dims, make, sources=files, prepare=prepare)


def _config(folder: Path) -> Any:
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "the path is relative to model.yaml; download the model first"
        raise SpecError(f"model.huggingface: {path} cannot be read: {error.strerror}", hint) from None
    except ValueError as error:
        raise SpecError(f"model.huggingface: {path} is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise SpecError(
            f"model.huggingface: {path} has no `model_type`", "expected the config.json of a transformers model"
        )
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unknown")
        raise SpecError(f"model.huggingface: {path}: quantization_config ({method}) is not supported")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise SpecError("model.huggingface needs the package transformers", "pip install 'fxc[huggingface]'") from None
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        hint = "a newer transformers may know it; code that comes with a checkpoint is not run"
        raise SpecError(f"model.huggingface: {path}: {describe(error)}", hint) from error


def _causal_class(config: Any) -> Any | None:
    """The class that config.json names, if it is a causal language model."""
    import transformers

    for name in config.architectures or ():
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return getattr(transformers, name, None)
    if not config.architectures and config.model_type not in ENCODERS:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return None


def _encoder_class(config: Any) -> Any:
    import transformers

    return transformers.MODEL_MAPPING[type(config)]


def _construct(cls: Any, config: Any, dtype: str | None) -> nn.Module:
    from fxc.models import hf_attention, hf_experts

    hf_attention.register()
    hf_experts.register()
    if not cls._can_set_attn_implementation():
        raise SpecError(
            f"model.huggingface: {cls.__name__} has its own attention, which cannot be routed to fxc::attention"
        )
    options: dict[str, Any] = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    try:
        module: nn.Module = cls._from_config(
            copy.deepcopy(config),
            attn_implementation=hf_attention.PROBE,
            experts_implementation=hf_experts.NAME,
            **options,
        )
    except Exception as error:
        raise SpecError(f"model.huggingface: {cls.__name__} cannot be constructed: {describe(error)}") from error
    _keep_in_float32(module)
    return module


def _keep_in_float32(module: Any) -> None:
    """Cast what `from_pretrained` keeps in float32 whatever the dtype."""
    names = set(module._keep_in_fp32_modules_strict or ()) if module.dtype in (torch.float16, torch.bfloat16) else set()
    if module.dtype == torch.float16:
        names |= set(module._keep_in_fp32_modules or ())
    if not names:
        return
    pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(names)))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if pattern.search(name):
            tensor.data = tensor.data.float()


def _causal_forward(cls: Any) -> Callable[..., Tensor]:
    def forward(self: Any, input_ids: Tensor, positions: Tensor) -> Tensor:
        out = cls.forward(self, input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        logits: Tensor = out.logits
        return logits[0]

    return forward


def _encoder_forward(cls: Any) -> Callable[..., Tensor]:
    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden: Tensor = cls.forward(self, input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden

    return forward


def _causal_inputs(config: Any) -> tuple[dict[str, InputSpec], dict[str, DimSpec]]:
    most = _positions(config)
    inputs = {
        "input_ids": InputSpec(shape=("num_tokens",), dtype="int64", values=(0, config.vocab_size)),
        "positions": InputSpec(shape=("num_tokens",), dtype="int64", values=(0, most) if most else None),
    }
    return inputs, {"num_tokens": DimSpec(min=1, max=most)} if most else {}


def _encoder_inputs(config: Any) -> tuple[dict[str, InputSpec], dict[str, DimSpec]]:
    most = _positions(config)
    if ENCODERS[config.model_type]:
        most -= config.pad_token_id + 1
    inputs = {
        "input_ids": InputSpec(shape=("batch", "seq"), dtype="int64", values=(0, config.vocab_size)),
        "attention_mask": InputSpec(shape=("batch", "seq"), dtype="int64", values=(0, 2)),
    }
    return inputs, {"batch": DimSpec(min=1, max=BATCH), "seq": DimSpec(min=1, max=most)}


def _positions(config: Any) -> int:
    """How many positions the model has; 0 when its config does not say."""
    return int(getattr(config, "max_position_embeddings", None) or 0)


def _override(
    spec: Spec, inputs: dict[str, InputSpec], dims: dict[str, DimSpec]
) -> tuple[dict[str, InputSpec], dict[str, DimSpec]]:
    """What model.yaml says goes before what follows from the config; bounds alone may be given."""
    inputs = dict(spec.inputs) or inputs
    used = dict.fromkeys(part for entry in inputs.values() for part in entry.shape if isinstance(part, str))
    for name in spec.dims:
        if name not in used:
            raise SpecError(f"dims.{name}: no input has this dimension", suggest(name, used, "dimensions"))
    dims = {
        name: spec.dims[name] if name in spec.dims else dims[name] for name in used if name in {**dims, **spec.dims}
    }
    for name in used:
        if name not in dims:
            raise SpecError(
                f"dims.{name}: no bounds, and config.json has no max_position_embeddings", "add them to dims"
            )
    return inputs, dims
