"""What follows from the config.json of a Hugging Face model: whether it can be built, its inputs, their bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fxc.convert import nearest, suggest
from fxc.errors import SpecError
from fxc.models.target import describe
from fxc.shapes import dims_of
from fxc.spec import REQUESTS, TOKENS, DimSpec, InputSpec, Spec

ENCODERS = {"bert": False, "distilbert": False, "modernbert": False, "roberta": True, "xlm-roberta": True}
"""By `model_type`; True where positions are counted from the padding token's id, which costs rows of the table."""

BATCH = 64
"""Largest batch of an encoder, where `dims` does not say."""
CACHE_BLOCKS = "num_blocks"
"""The dimension of key/value caches."""
BATCHED_TOKENS, BATCHED_REQUESTS, BLOCKS = 8192, 256, 1 << 20
"""The most of a model with `kv_cache`, where `dims` does not say: new tokens and requests in a call, blocks."""


def read_config(path: Path) -> Any:
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
    if quantization := data.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise SpecError(
            f"model.huggingface: {path}: quantization_config ({method}) is not supported",
            "take a checkpoint that is not quantized",
        )
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, __version__
    except ImportError:
        raise SpecError("model.huggingface needs the package transformers", "pip install 'fxc[huggingface]'") from None
    name = data["model_type"]
    if name not in CONFIG_MAPPING:
        near = nearest(name, CONFIG_MAPPING)
        hint = "code that comes with a checkpoint (auto_map) is not run" if data.get("auto_map") else ""
        raise SpecError(
            f"model.huggingface: {path}: model_type {name!r} is unknown to transformers {__version__}",
            hint or (f"did you mean {near!r}?" if near else "a newer one may know it"),
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise SpecError(f"model.huggingface: {path}: {describe(error)}") from error
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise SpecError(f"model.huggingface: {path}: num_hidden_layers is {layers}, expected 1 or more")
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers logs errors only: advice about a config, about weights that are not loaded, would be noise here."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def inputs_of(config: Any, causal: bool, spec: Spec, path: Path) -> tuple[dict[str, InputSpec], dict[str, DimSpec]]:
    """Inputs and dims of the model; what model.yaml says goes before what follows from the config."""
    if spec.kv_cache is not None:
        if not causal:
            raise SpecError(f"kv_cache: {path} is an encoder, which keeps no keys and values", "remove kv_cache")
        found = _paged_inputs(config, spec, path)
    else:
        found = _causal_inputs(config) if causal else _encoder_inputs(config)
    inputs, dims = _override(spec, path, *found)
    if spec.kv_cache is None:
        _check_table(config, {name: dims[name].max for name in ("num_tokens", "seq") if name in dims}, path)
    elif spec.kv_cache.max_tokens:
        _check_table(config, {"kv_cache.max_tokens": spec.kv_cache.max_tokens}, path)
    return inputs, dims


def _causal_inputs(config: Any) -> tuple[dict[str, InputSpec], dict[str, DimSpec]]:
    most = _positions(config)
    inputs = {
        "input_ids": InputSpec(shape=("num_tokens",), dtype="int64", values=(0, config.vocab_size)),
        "positions": InputSpec(shape=("num_tokens",), dtype="int64", values=(0, most) if most else None),
    }
    return inputs, {"num_tokens": DimSpec(min=1, max=most)} if most else {}


def _paged_inputs(config: Any, spec: Spec, path: Path) -> tuple[dict[str, InputSpec], dict[str, DimSpec]]:
    """A flat batch of the new tokens of several requests, and what says where their keys and values are. The caches
    themselves are added when the layers are known."""
    cache = spec.kv_cache
    assert cache is not None
    if spec.inputs:
        raise SpecError("inputs: those of a model with kv_cache follow from its config", "remove inputs")
    longest = cache.max_tokens or _positions(config)
    if not longest:
        raise SpecError(f"kv_cache.max_tokens: missing, and {path} has no max_position_embeddings", "add it")
    tokens = spec.dims.get(TOKENS, DimSpec(min=1, max=BATCHED_TOKENS))
    dims = {
        TOKENS: tokens,
        REQUESTS: DimSpec(min=1, max=BATCHED_REQUESTS),
        CACHE_BLOCKS: DimSpec(min=max(2, -(-tokens.max // cache.block_size)), max=BLOCKS),
    }
    table = -(-longest // cache.block_size)
    inputs = {
        "input_ids": InputSpec(shape=(TOKENS,), dtype="int64", values=(0, config.vocab_size), pad=0),
        "positions": InputSpec(shape=(TOKENS,), dtype="int64", values=(0, longest), pad=0),
        "slot_mapping": InputSpec(shape=(TOKENS,), dtype="int64", values=(0, tokens.max), pad=-1),
        "block_table": InputSpec(shape=(REQUESTS, table), dtype="int32", pad=0),
        # Made up, no request has tokens: other numbers would have to fit together.
        "seq_lens": InputSpec(shape=(REQUESTS,), dtype="int32", values=(0, 1), pad=0),
        "query_starts": InputSpec(shape=(f"{REQUESTS} + 1",), dtype="int32", values=(0, 1), pad="last"),
    }
    return inputs, dims


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
    spec: Spec, path: Path, inputs: dict[str, InputSpec], dims: dict[str, DimSpec]
) -> tuple[dict[str, InputSpec], dict[str, DimSpec]]:
    """What model.yaml says goes before what follows from the config; bounds alone may be given."""
    inputs = dict(spec.inputs) or inputs
    used = dict.fromkeys(name for entry in inputs.values() for name in dims_of(entry.shape))
    used |= dict.fromkeys(dims.keys() & {CACHE_BLOCKS})  # no input has it before the layers are known
    for name in spec.dims:
        if name not in used:
            raise SpecError(f"dims.{name}: no input has this dimension", suggest(name, used, "dimensions"))
    dims = {
        name: spec.dims[name] if name in spec.dims else dims[name] for name in used if name in {**dims, **spec.dims}
    }
    for name in used:
        if name not in dims:
            raise SpecError(f"dims.{name}: no bounds, and {path} has no max_position_embeddings", "add them to dims")
    return inputs, dims


def _check_table(config: Any, longest: dict[str, int], path: Path) -> None:
    """No longer sequence than there are rows in a learned position table; rotary positions go on for ever."""
    most = _positions(config) - (config.pad_token_id + 1 if ENCODERS.get(config.model_type) else 0)
    if most <= 0 or getattr(config, "rope_parameters", None):
        return
    for name, tokens in longest.items():
        if tokens > most:
            where, what = (name, str(tokens)) if "." in name else (f"dims.{name}", f"max {tokens}")
            raise SpecError(
                f"{where}: {what} is above {most}, the positions that the model has",
                f"lower it: they follow from max_position_embeddings in {path}",
            )
