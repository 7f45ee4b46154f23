"""`model.huggingface`: a folder with config.json. The weights need not be there.

A causal language model becomes forward(input_ids, positions) -> logits over one flat sequence of tokens, an encoder
forward(input_ids, attention_mask) -> last_hidden_state over a padded batch. The module is the stock one, so that its
weights have the names that checkpoints use; only `forward` differs.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from fxc.errors import SpecError
from fxc.models import hf_attention
from fxc.models.hf_attention import KeyValue, Paged
from fxc.models.hf_config import CACHE_BLOCKS, ENCODERS, inputs_of, quiet, read_config
from fxc.models.source import CACHE_INPUTS, EXPECTED_OPS, STORED_NAMES, ModelSource
from fxc.models.target import check_dtype, check_inputs, describe
from fxc.spec import InputSpec, Spec, check_spec


def resolve_folder(spec: Spec, directory: Path) -> ModelSource:
    """Read config.json and choose the class; constructs nothing yet."""
    check_dtype(spec.model)
    if spec.model.args:
        raise SpecError("model.args: a Hugging Face folder takes none", "change its config.json")
    path = directory / str(spec.model.huggingface) / "config.json"
    config = read_config(path)
    cls = _causal_class(config)
    causal = cls is not None
    if cls is None:
        if config.model_type not in ENCODERS:
            architecture = ", ".join(config.architectures or ()) or config.model_type
            hint = f"causal language models (...ForCausalLM) and the encoders {', '.join(ENCODERS)} are"
            raise SpecError(f"model.huggingface: {path}: {architecture} is not supported", hint)
        cls = _encoder_class(config)
    inputs, dims = inputs_of(config, causal, spec, path)
    blocks = dims.pop(CACHE_BLOCKS, None)
    check_spec(msgspec.structs.replace(spec, inputs=inputs, dims=dims), f"model.huggingface: {path}")

    def make() -> nn.Module:
        return _construct(cls, config, spec.model.dtype, path)

    def prepare(module: nn.Module) -> None:
        from fxc.models.hf_checkpoint import stored_names

        layers = hf_attention.route(module, causal, paged=blocks is not None)
        setattr(module, EXPECTED_OPS, {"fxc::attention": len(layers)})
        setattr(module, STORED_NAMES, stored_names(module))
        caches: dict[str, InputSpec] = {}
        if blocks is not None and spec.kv_cache is not None:
            caches = _caches(layers, spec.kv_cache.block_size)
            setattr(module, CACHE_INPUTS, (caches, {CACHE_BLOCKS: blocks}))
            forward = _paged_forward(cls, [*inputs, *caches])
        else:
            forward = _causal_forward(cls) if causal else _encoder_forward(cls)
        module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
        check_inputs(module, {**inputs, **caches})

    files = (path, *(Path(str(sys.modules[c.__module__].__file__)) for c in (cls, type(config))))
    return ModelSource(cls.__name__, inputs, dims, make, sources=files, prepare=prepare)


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


def _construct(cls: Any, config: Any, dtype: str | None, path: Path) -> nn.Module:
    from fxc.models import hf_experts

    hf_attention.register()
    hf_experts.register()
    if not cls._can_set_attn_implementation():
        raise SpecError(
            f"model.huggingface: {path}: {cls.__name__} has its own attention, which cannot be routed to fxc::attention"
        )
    options: dict[str, Any] = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    try:
        with quiet():
            module: nn.Module = cls._from_config(
                copy.deepcopy(config),
                attn_implementation=hf_attention.PROBE,
                experts_implementation=hf_experts.NAME,
                **options,
            )
    except Exception as error:
        raise SpecError(
            f"model.huggingface: {path}: {cls.__name__} cannot be constructed: {describe(error)}"
        ) from error
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


def _caches(layers: Sequence[KeyValue], block_size: int) -> dict[str, InputSpec]:
    """Key and value cache of each layer, handed over once."""
    made = {}
    for index, layer in enumerate(layers):
        for name, width in ((f"k_cache_{index}", layer.width), (f"v_cache_{index}", layer.value_width)):
            shape = (CACHE_BLOCKS, block_size, layer.heads, width)
            made[name] = InputSpec(shape=shape, dtype=layer.dtype, bound=True)  # type: ignore[arg-type]
    return made


def _paged_forward(cls: Any, names: Sequence[str]) -> Callable[..., Tensor]:
    """forward of the inputs `names`, the last of which are the caches of all layers."""

    def forward(self: Any, **inputs: Tensor) -> Tensor:
        input_ids, positions, slots, table, lengths, starts = (inputs[name] for name in names[:6])
        caches = [inputs[name] for name in names[6:]]
        with hf_attention.paged(Paged(slots, table, lengths, starts, caches[::2], caches[1::2])):
            out = cls.forward(self, input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        logits: Tensor = out.logits
        return logits[0]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


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
