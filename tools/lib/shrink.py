"""Small configurations of transformers' architectures: widths, depths, vocabularies and images, cut by the names of fields.

A field is recognised by its name, in the configuration and in all that are inside it, so an architecture that nobody has
looked at is cut as well. Relations between fields hold because equal kinds get equal numbers: every width is 32, every model
has 4 heads of 8, and so on. Where that fails, a weaker cut is tried (`CUTS`), and `OVERRIDES` names what no rule can guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

VOCABULARY = 160
WINDOW_OF_STAGES = 2
"""Windows of models with stages: the last stage of a small image is as small."""
WIDTH = 32
HEADS = 4
HEAD_WIDTH = 8
INNER = 64
LAYERS = 2
MOST_LAYERS = 6
LENGTH = 64
PATCH = 8
IMAGE = 32
IMAGE_OF_STAGES = 64
"""Images of models without patches: stages halve them up to five times."""
FIRST_SPECIAL_TOKEN = 120
"""Token ids from here to the end of the vocabulary stand for images, sounds and the like; random tokens are smaller."""

CUTS = ("all", "named", "depth", "none")
"""All rules; all but the one for other widths; depth, vocabulary and lengths only; token ids only."""
WIDE = "wide"
"""A cut with widths of 256, 4 heads of 64: large enough that products take most of a step's time."""
TIMES = 8
"""How many times as wide as in other cuts."""

Rule = tuple[str, Callable[[int], int]]


def exactly(number: int) -> Callable[[int], int]:
    return lambda _: number


def at_most(number: int) -> Callable[[int], int]:
    return lambda value: min(value, number)


DEPTHS: list[Rule] = [
    (r"vision_feature_layer|feature_layer|insert_layer_id|spatial_vision_layer|conditional_layer|accept_hidden_layer",
     lambda value: max(min(value, 0), -LAYERS)),
    (r"(first_k_dense_replace|num_nextn_predict_layers|num_dense_layers|(attn|expert)_layer_offset|max_window_layers"
     r"|num_sparse_(encoder|decoder)_layers|num_kv_shared_layers|mlp_only_layers|moe_layer_start_index)", at_most(1)),
    (r".*(layer_period|_interval|_frequency|every_n_layers|layer_freq|sliding_window_pattern|_step|group_size)", at_most(2)),
    (r"(.*_)?(layers?|blocks|depth|num_hidden_groups|num_residual_layers)(_per_(stack|group))?", at_most(LAYERS)),
]  # fmt: skip
SIZES: list[Rule] = [
    (r"(.*_)?(type_vocab_size|vocab_size_per_layer_input)", at_most(VOCABULARY)),
    (r"(.*_)?vocab_size|.*num_hash_buckets|ngram_vocab_size_base|.*group_vocab", at_most(VOCABULARY)),
    (r"num_(character|bpe|wordpiece)_labels|num_(qa|object|attr)_labels|num_classes|num_clusters", at_most(10)),
    (r"(.*_)?max(_2d|_position|_source|_target|_text|_speech|_grid\w+|_encoder|_decoder|_seq|_ep|_relative)*_(positions?|embeddings|len|length)"
     r"|n_positions|n_ctx|max_length|(model_)?max_seq(_len|_length)?|seq_len(gth)?|task_seq_len|model_max_length|position_embedding_size"
     r"|.*max_position_embeddings|.*_n_ctx|.*context_length|max_pos_emb|max_img_size|prompt_length", at_most(LENGTH)),
    (r"max_source_positions", at_most(16)),
    (r"num_position_embeddings", at_most(16)),
    (r"pos_emb_(height|width)", at_most(8)),
    (r"(.*_)?(sliding_window|window_size|attention_window|local_attention|block_size|chunk_size|local_radius|context_size"
     r"|chunk_size_input|sliding_window_size|attention_chunk_size|attn_chunk_length|local_transformer_stride)", at_most(4)),
    (r"index_topk|.*index_topk_blocks", at_most(4)),
    (r"(pretrain_)?(image|img|input|crop|spec)_size|resolution", at_most(IMAGE)),
    (r"patch_size|patch_stride|encoder_stride", at_most(PATCH)),
    (r"num_frames|frames_per_clip|num_windows", at_most(4)),
    (r"(n_mel|num_mel|mel)_?(bins|dim)?|num_mel_bins|n_mel_bins|mel_dim|input_feat_per_channel|input_feat_size", at_most(16)),
    (r"image_seq_length|num_image_tokens|mm_tokens_per_image|vision_soft_tokens_per_image", at_most(16)),
    (r"num_queries|two_stage_num_proposals|latent_query_num|num_query_tokens|.*n(um)?_latents(_2d)?|num_landmarks", at_most(6)),
    (r"num_denoising|inference_num_steps|train_num_points", at_most(4)),
]  # fmt: skip
OF_HEADS = (
    r"(.*_)?(qk_rope_head_dim|qk_nope_head_dim|v_head_dim|head_dim|d_kv|dim_head|d_head|kv_channels|head_size"
    r"|attention_head_(dim|size)|headdim|rotary_dim)"
)
OF_INNER = (
    r"(.*_)?(intermediate_(size|dim)|ffn_dim|d_ff|dff|dim_ff|n_inner|mlp_dim|ffn_hidden_size|d_inner|dim_feedforward|feedforward_dim"
    r"|feed_forward_size|linear_units|mlp_hidden_size|feed_forward_hidden_size|intermediate_size_mlp)"
)
OF_LAYERS = (
    r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|hidden_dim|d_embed|dim|width|embedding_dim)"
)
WIDTHS: list[Rule] = [
    (r"qk_head_dim|index_head_dim", at_most(2 * HEAD_WIDTH)),
    (OF_HEADS, at_most(HEAD_WIDTH)),
    (r"(.*_)?mamba_(n|num)_heads|n_mamba_heads", lambda value: 2 * HEADS if value > 2 else value),
    (r"linear_num_key_heads", at_most(2)),
    (r"(.*_)?((num_)?(key_value|kv)(_attention)?_heads|n_kv_heads|kv_n_heads)", at_most(HEADS)),
    (r"(.*_)?(n_head|n_heads|num_heads|heads|attention_heads|n_attn_heads)", at_most(HEADS)),
    (OF_INNER, at_most(INNER)),
    (r"n_routed_experts|num_local_experts|(moe_)?num_experts|num_experts_total", at_most(HEADS)),
    (r".*num_experts_per_tok(en)?|moe_top_?k|moe_k|n_shared_experts|num_experts_per_token", at_most(2)),
    (r"n_group|num_expert_group", at_most(2)),
    (r"topk_group|expert_capacity", at_most(1)),
    (r"(mamba_)?n_?groups", at_most(1)),
    (r"num_groups|.*num_conv_pos_embedding_groups|upsample_groups", at_most(4)),
    (r"num_conv_pos_embeddings|relative_attention_max_distance", at_most(16)),
    (r"(ssm_)?state_size|mamba_d_state", at_most(HEAD_WIDTH)),
    (r"mamba_d_head", at_most(HEAD_WIDTH)),
    (r"mamba_d_ssm|lru_width", at_most(INNER)),
    (r"time_step_rank|mamba_dt_rank", at_most(4)),
    (r"(.*_)?(q|kv|o)_lora_rank|.*_rank|hc_lowrank", at_most(16)),
    (OF_LAYERS, at_most(WIDTH)),
    (r"num_codevectors_per_group|codebook_size|num_embeddings|n_codebooks|num_codebooks|quantization_dim", at_most(8)),
    (r"query_pre_attn_scalar", at_most(HEAD_WIDTH)),
]  # fmt: skip
LARGE_WIDTHS: list[Rule] = [
    (OF_HEADS, at_most(TIMES * HEAD_WIDTH)),
    (OF_INNER, at_most(TIMES * INNER)),
    (OF_LAYERS, at_most(TIMES * WIDTH)),
    (r"relative_attention_max_distance", at_most(2 * LENGTH)),
]
OTHER_WIDTHS: list[Rule] = [
    (r"qk_head_dim|index_head_dim", at_most(2 * HEAD_WIDTH)),
    (r".*(_size|_dims?|_channels?|_hidden|_units|_features|_filters|_feats|num_filters|hidden_dimension|_size_global|dim_base|d_latents)",
     at_most(WIDTH)),
]  # fmt: skip
RULES = {
    "all": [*DEPTHS, *SIZES, *WIDTHS, *OTHER_WIDTHS],
    "named": [*DEPTHS, *SIZES, *WIDTHS],
    "depth": [*DEPTHS, *SIZES],
    "none": [],
    WIDE: [*DEPTHS, *SIZES, *LARGE_WIDTHS, *WIDTHS],
}
FIXED = re.compile(
    r"id2label|label2id|.*sampling_rate|.*sample_rate|num_channels|in_channels|.*kernel_size|chunk_size_feed_forward|.*temperature"
    r"|head_ratio|.*theta|patch_length|.*ignore_.*|seed|.*_stride|context_length|prediction_length|feature_size|.*_id"
    r"|num_labels|depth_multiplier|.*divisible_by|.*num_attention_heads_per_stage|spectrogram_bins"
)
"""Fields that no rule touches. Token ids have a rule of their own."""
TOKEN = re.compile(r".*(token_id|token_index|_token_ids|lang_id|unk_index|mask_index)")
STAGE_WIDTHS = re.compile(
    r"(hidden_sizes|embed_dims?|dims|neck_hidden_sizes|conv_dim|encoder_hidden_sizes|.*_channels|out_features|tdnn_dim)"
)
STAGE_HEADS = re.compile(r"(num_heads|num_attention_heads|.*attention_heads|num_groups)")
STAGE_DEPTHS = re.compile(
    r"(depths?|layers|num_blocks|num_block_repeats|stage_num_blocks|block_sizes|blocks_per_stage)"
)


SERIES = dict(prediction_length=4, context_length=8, lags_sequence=[1, 2, 3])
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
SECTIONS = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]))
EFFICIENT = dict(
    in_channels=[32, 16, 24, 40, 80, 112, 192], out_channels=[16, 24, 40, 80, 112, 192, 320], width_coefficient=0.25,
    depth_coefficient=0.2, hidden_dim=1280 // 4,
)  # fmt: skip
GLOBAL_HEADS = dict(global_head_dim=2 * HEAD_WIDTH, num_global_key_value_heads=2)

OVERRIDES: dict[str, dict[str, Any]] = {
    "align_vision_model": EFFICIENT,
    "autoformer": SERIES,
    "blip-2": dict(image_token_index=FIRST_SPECIAL_TOKEN),
    "chameleon": dict(vocabulary_map={"<image>": FIRST_SPECIAL_TOKEN}),
    "cvt": dict(depth=[1, 2, 3]),
    "deepseek_v2": EXPERTS,
    "depth_pro": dict(patch_size=IMAGE),
    "dots1": EXPERTS,
    "efficientnet": EFFICIENT,
    "emu3": dict(vocabulary_map={"<image>": FIRST_SPECIAL_TOKEN}),
    "esm": dict(vocab_size=33, mask_token_id=32, pad_token_id=1),
    "gemma3n_text": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=[INNER] * 4, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4_text": GLOBAL_HEADS,
    "gemma4_unified_text": GLOBAL_HEADS,
    "glm46v_text": SECTIONS,
    "glm4v_text": SECTIONS,
    "glm_ocr_text": SECTIONS,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], attention_layers=["global", "local"]),
    "informer": SERIES,
    "instructblip": dict(image_token_index=FIRST_SPECIAL_TOKEN),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2, num_dense_layers=1),
    "mamba2": dict(num_heads=2 * HEADS),
    "nemotron": dict(num_key_value_heads=2, head_dim=HEAD_WIDTH),
    "nystromformer": dict(num_landmarks=4, segment_means_seq_len=8),
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_vl_text": SECTIONS,
    "time_series_transformer": SERIES,
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2),
}  # fmt: skip
"""Fields by model type that no rule can guess; they win over every rule."""


def small(config: Any, cut: str) -> Any:
    """Returns a smaller configuration of the same type, with those inside it cut in the same way."""
    kind = type(config)
    return kind(**changes(config, default(kind), cut))


def default(kind: Any) -> Any:
    try:
        return kind()
    except Exception:
        return None


def changes(config: Any, base: Any, cut: str) -> dict[str, Any]:
    """Returns the arguments of the constructor for a smaller `config`: the fields that differ from those of `base`."""
    values = {name: read(config, name) for name in type(config).__dataclass_fields__}
    chosen = layers_to_keep(values)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "to_dict"):
            found[name] = small(value, cut)
            continue
        new = smaller(name, value, cut, values, chosen)
        if new != read(base, name):
            found[name] = new
    found |= kept_stages(config, values, found)
    return found | OVERRIDES.get(config.model_type, {})


def read(config: Any, name: str) -> Any:
    """Returns a field's value; none where it differs between layers and cannot be read as one."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def depth_name(values: dict[str, Any]) -> str:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "decoder_layers", "encoder_layers")
    return next((name for name in names if isinstance(values.get(name), int)), "")


def depth_of(values: dict[str, Any]) -> int:
    return values.get(depth_name(values), 0)


def kept_stages(config: Any, values: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the stages that a backbone gives to the model around it, and as many layers where a layer is a stage."""
    stages, names = read(config, "out_indices"), read(config, "stage_names")
    if not stages or not names:
        return {}
    name, depth = depth_name(values), depth_of(values)
    if depth > found.get(name, depth) and len(names) == depth + 1:
        layers = max(LAYERS, len(stages))
        return {name: layers, "out_indices": list(range(layers - len(stages) + 1, layers + 1))}
    return {"out_indices": list(stages)}


def layers_to_keep(values: dict[str, Any]) -> list[int]:
    """Returns the layers that show every kind of layer that lists of the length of the depth name, at least two."""
    depth = depth_of(values)
    kept: dict[int, None] = {}
    for value in values.values():
        if depth > LAYERS and isinstance(value, (list, tuple)) and len(value) == depth:
            first: dict[str, int] = {}
            for i, kind in enumerate(value):
                first.setdefault(str(kind), i)
            if len(first) <= MOST_LAYERS:
                kept |= dict.fromkeys(first.values())
    if not kept:
        return []
    others = [i for i in range(depth) if i not in kept]
    return sorted([*kept][:MOST_LAYERS] + others[: max(LAYERS - len(kept), 0)])


def smaller(name: str, value: Any, cut: str, values: dict[str, Any], chosen: list[int]) -> Any:
    """Returns the value of one field in a small configuration."""
    if value is None and name == "head_dim" and cut not in ("depth", WIDE) and depth_of(values):
        return HEAD_WIDTH
    if isinstance(value, bool) or value is None:
        return value
    if TOKEN.fullmatch(name):
        return token(name, value)
    if FIXED.fullmatch(name):
        return value
    if isinstance(value, dict):
        return small_rope(value, cut) if name.startswith("rope") else value
    if isinstance(value, (list, tuple)) and cut != "none":
        return small_list(name, list(value), cut, values, chosen)
    if isinstance(value, int):
        return small_int(name, value, cut, values, chosen)
    return value


def token(name: str, value: Any) -> Any:
    """Returns an id inside the small vocabulary: that of a name is the same in all configurations of a model."""
    if isinstance(value, (list, tuple)):
        return [token(f"{name}{i}", one) for i, one in enumerate(value)]
    if not isinstance(value, int) or value < FIRST_SPECIAL_TOKEN:
        return value
    plain = name.replace("token_index", "token_id")
    return FIRST_SPECIAL_TOKEN + sum(ord(letter) * (i + 1) for i, letter in enumerate(plain)) % (
        VOCABULARY - FIRST_SPECIAL_TOKEN
    )


def small_int(name: str, value: int, cut: str, values: dict[str, Any], chosen: list[int]) -> int:
    if name == "window_size" and isinstance(values.get("depths"), (list, tuple)) and cut != "none":
        return min(value, WINDOW_OF_STAGES)
    stages = isinstance(values.get("depths"), (list, tuple)) or not isinstance(values.get("patch_size"), int)
    if name in ("image_size", "img_size", "input_size") and stages and cut != "none":
        return min(value, IMAGE_OF_STAGES)
    for pattern, rule in RULES[cut]:
        if re.fullmatch(pattern, name):
            new = rule(value)
            if chosen and new == LAYERS and value == depth_of(values):
                return len(chosen)
            if "head" in name and new == HEADS and re.search(r"key_value|kv", name):
                return HEADS // 2 if value < max_heads(values) else HEADS
            return new
    return value


def max_heads(values: dict[str, Any]) -> int:
    names = [n for n in values if re.fullmatch(r"(.*_)?(n_heads?|num_heads|attention_heads)", n)]
    return max((values[n] for n in names if isinstance(values[n], int)), default=0)


def small_list(name: str, value: list, cut: str, values: dict[str, Any], chosen: list[int]) -> list:
    numbers = bool(value) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if chosen and len(value) == depth_of(values):
        kept = [value[i] for i in chosen]
        return [smaller(name, v, cut, values, chosen) for v in kept] if numbers else kept
    if not numbers:
        return value
    if name in ("image_size", "img_size", "input_size"):
        return [min(v, IMAGE_OF_STAGES) for v in value]
    if STAGE_DEPTHS.fullmatch(name):
        return [min(v, LAYERS) for v in value]
    if re.search(r"(indices|indexes|index|_ids|_idx|block_indexes)$", name):
        return value if max(value) < LAYERS else [LAYERS - 1]
    if cut == "depth":
        return value
    if STAGE_WIDTHS.fullmatch(name):
        return stage_widths(value)
    if STAGE_HEADS.fullmatch(name):
        widths = next(
            (v for n, v in values.items() if re.fullmatch(r"hidden_sizes|embed_dims?", n) and isinstance(v, list)), None
        )
        if widths and len(widths) == len(value):
            return [max(1, w // HEAD_WIDTH) for w in stage_widths(widths)]
        return [HEADS * v // value[0] for v in value]
    return value


def stage_widths(widths: list[int]) -> list[int]:
    """Returns widths of at most 64 in the same proportions, each a multiple of 8."""
    return [
        max(HEAD_WIDTH, round(w * INNER / max(widths) / HEAD_WIDTH) * HEAD_WIDTH) if w > HEAD_WIDTH else w
        for w in widths
    ]


def small_rope(parameters: dict, cut: str) -> dict:
    """Returns the parameters of a rotary embedding; sections of a head are cut as heads are."""
    made = dict(parameters)
    if not any(isinstance(value, dict) for value in parameters.values()) and made.get("rope_theta") is None:
        made["rope_theta"] = 10000.0
    for key, value in parameters.items():
        if isinstance(value, dict):
            made[key] = small_rope(value, cut)
        elif key.endswith("section") and isinstance(value, (list, tuple)) and cut != "depth":
            made[key] = shared_out(HEAD_WIDTH // 2, len(value))
        elif key == "original_max_position_embeddings":
            made[key] = LENGTH // 2
    return made


def shared_out(total: int, parts: int) -> list[int]:
    """Returns `parts` numbers of at least 1 where that is possible, whose sum is `total`."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def parameters_of(modules: Iterable[Any]) -> int:
    return sum(math.prod(parameter.shape) for parameter in modules)
