"""Tiny random configs of the architectures that are checked, windows and chunks shorter than 40."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
TIED = {"tie_word_embeddings": True}
SLIDING = ["sliding_attention", "full_attention"]

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "layer_types": SLIDING, **TIED},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"head_dim": 16, "num_experts": 6, **MOE}),
    "mistral": ("MistralForCausalLM", {"head_dim": 8, "sliding_window": 6}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 20},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 5, "layer_types": SLIDING, "query_pre_attn_scalar": 20},
    ),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 8, "tie_word_embeddings": False}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": SLIDING},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **MOE,
        },
    ),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            "head_dim": 8, "attention_chunk_size": 6, "intermediate_size_mlp": 40, "num_local_experts": 3,
            "num_experts_per_tok": 1, "no_rope_layers": [1, 0],
        },
    ),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "olmo2": ("Olmo2ForCausalLM", {}),
}  # fmt: skip

ENCODER: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "distilbert": ("DistilBertModel", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "modernbert": (
        "ModernBertModel",
        {"local_attention": 10, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1}),
}


def config(model_type: str) -> dict[str, Any]:
    """Contents of a config.json."""
    architecture, own = {**CAUSAL, **ENCODER}[model_type]
    return {"model_type": model_type, "architectures": [architecture], **COMMON, **own}
