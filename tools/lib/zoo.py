"""All architectures of transformers and timm, as small models with random weights. Nothing is downloaded.

transformers: one model for each model type that a mapping of its auto classes names, from the configuration that `shrink`
makes. timm: for each of its modules the smallest variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tools.lib import shrink

SERIES = ("time_series_transformer", "informer", "autoformer")
"""Model types of time series that no mapping of such models names."""
TASKS = (
    ("multimodal", ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING", "RETRIEVAL",
                    "ZERO_SHOT_IMAGE_CLASSIFICATION")),
    ("audio", ("SPEECH_SEQ_2_SEQ",)),
    ("seq2seq", ("SEQ_TO_SEQ_CAUSAL_LM",)),
    ("encoder", ("MASKED_LM",)),
    ("decoder", ("CAUSAL_LM",)),
    ("vision", (
        "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION",
        "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "IMAGE_TO_IMAGE", "MASK_GENERATION", "KEYPOINT_DETECTION", "IMAGE_MATTING",
        "POSE_ESTIMATION", "TEXT_RECOGNITION", "TABLE_RECOGNITION", "ZERO_SHOT_IMAGE_CLASSIFICATION",
        "ZERO_SHOT_OBJECT_DETECTION", "MASKED_IMAGE_MODELING", "CAUSAL_IMAGE_MODELING", "NORMAL_ESTIMATION",
        "POINTMAP_ESTIMATION", "IMAGE", "BACKBONE",
    )),
    ("audio", (
        "CTC", "RNNT", "TDT", "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR", "TEXT_TO_SPECTROGRAM",
        "TEXT_TO_WAVEFORM",
    )),
    ("time series", ("TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION")),
    ("encoder", ("SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "TOKEN_CLASSIFICATION", "TEXT_ENCODING")),
    ("other", ("DECISION", "PRETRAINING", "")),
)  # fmt: skip
"""What a model does, with the mappings that say so; the first mapping that names a model type chooses its class."""
GROUPS = ("decoder", "encoder", "seq2seq", "vision", "multimodal", "audio", "time series", "other", "timm")

MOST_USED = (
    "llama", "qwen3", "qwen2", "mistral", "gpt2", "bert", "gemma2", "gemma3_text", "phi3", "gpt_oss", "mixtral", "deepseek_v3",
    "qwen3_moe", "t5", "roberta", "bart", "vit", "clip", "whisper", "resnet", "mamba", "jamba", "rwkv", "deepseek_v2", "falcon",
    "opt", "bloom", "gpt_neox", "phi", "gemma", "olmo2", "qwen2_moe", "qwen3_next", "mamba2", "bamba", "falcon_h1", "zamba2",
    "granitemoehybrid", "recurrent_gemma", "falcon_mamba", "nemotron_h", "cohere2", "glm4", "glm4_moe", "gpt_neo", "gptj", "mpt",
    "codegen", "stablelm", "starcoder2", "gpt_bigcode", "olmo", "smollm3", "lfm2", "deepseek_v32", "minimax", "kimi_linear",
    "exaone4", "xlstm", "distilbert", "albert", "electra", "deberta-v2", "xlm-roberta", "modernbert", "camembert", "mpnet",
    "esm", "longformer", "big_bird", "mt5", "pegasus", "mbart", "marian", "m2m_100", "led", "prophetnet", "swin", "convnext",
    "deit", "beit", "dinov2", "segformer", "detr", "vit_mae", "dinov3_vit", "siglip", "blip", "blip-2", "llava", "qwen2_vl",
    "qwen2_5_vl", "qwen3_vl", "idefics3", "paligemma", "mllama", "gemma3", "internvl", "wav2vec2", "hubert", "wavlm",
    "speech_to_text", "audio-spectrogram-transformer", "time_series_transformer", "informer", "autoformer", "patchtst",
    "patchtsmixer", "timesfm",
)  # fmt: skip
"""Model types that are swept first."""
MOST_PARAMETERS = 40_000_000
SMALL_WORDS = (
    "test_",
    "femto",
    "atto",
    "pico",
    "nano",
    "xxs",
    "xxtiny",
    "xs",
    "xtiny",
    "tiny",
    "mini",
    "small",
    "_s",
    "_t",
    "b0",
)


class Unbuilt(Exception):
    """No small model of an architecture can be built."""


@dataclass(frozen=True)
class Architecture:
    name: str
    family: str
    group: str
    maker: str
    """transformers: the name of the model class. timm: the module whose variants these are."""

    def candidates(self, cuts: Sequence[str] = shrink.CUTS) -> Iterator[tuple[torch.nn.Module, str]]:
        """Yields small models that can be built, the smallest first, each with words for its variant; timm has no cuts."""
        return timm_models(self) if self.family == "timm" else transformers_models(self, cuts)


def architectures(families: list[str]) -> list[Architecture]:
    """Returns all architectures, the most used first."""
    found = [*(in_transformers() if "transformers" in families else []), *(in_timm() if "timm" in families else [])]
    rank = {name: i for i, name in enumerate(MOST_USED)}
    return sorted(found, key=lambda a: (rank.get(a.name, len(rank)), GROUPS.index(a.group), a.name))


@cache
def in_transformers() -> tuple[Architecture, ...]:
    """Returns one architecture for each model class, under the model type that the class is named for, if there is one."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found: dict[str, Architecture] = {}
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        for group, tasks in TASKS:
            mappings = [getattr(modeling_auto, mapping_of(task), {}) for task in tasks]
            named = next((m[model_type] for m in mappings if model_type in m), None)
            if named:
                maker = named if isinstance(named, str) else named[0]
                group = "time series" if model_type in SERIES else group
                if maker not in found or shared_name(maker, model_type) > shared_name(maker, found[maker].name):
                    found[maker] = Architecture(model_type, "transformers", group, maker)
                break
    return tuple(found.values())


def shared_name(maker: str, model_type: str) -> int:
    """Returns how many letters of the class's name are the model type; 0 if the class is not named for it."""
    words = model_type.replace("-", "").replace("_", "").lower()
    return len(words) if maker.lower().startswith(words) else 0


def mapping_of(task: str) -> str:
    return f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"


@cache
def in_timm() -> tuple[Architecture, ...]:
    import timm

    modules = sorted(timm.models._registry._module_to_models)
    return tuple(Architecture(f"timm/{m}", "timm", "timm", m) for m in modules if timm.list_models(module=m))


def transformers_models(architecture: Architecture, cuts: Sequence[str]) -> Iterator[tuple[torch.nn.Module, str]]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, architecture.maker, None)
    if model_class is None:
        raise Unbuilt(f"transformers has no {architecture.maker}")
    reasons = []
    for cut in cuts:
        try:
            config = shrink.small((model_class.config_class or CONFIG_MAPPING[architecture.name])(), cut)
            without_cache(config)
            with torch.device("meta"):
                count = shrink.parameters_of(model_class(config).parameters())
            if count > MOST_PARAMETERS:
                reasons.append(f"{count} parameters")
                continue
            torch.manual_seed(0)
            model = model_class(config)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        yield prepared(model), f"{architecture.maker}, cut {cut}"
    if len(reasons) == len(cuts):
        raise Unbuilt(reasons[0])


def without_cache(config: Any) -> None:
    """Turns caches off, in all configurations inside it as well."""
    for value in [config, *vars(config).values()]:
        if hasattr(value, "to_dict") and hasattr(value, "use_cache"):
            value.use_cache = False
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            without_cache(value)


def timm_models(architecture: Architecture) -> Iterator[tuple[torch.nn.Module, str]]:
    import timm

    variants = timm.list_models(module=architecture.maker)
    small = sorted(
        variants, key=lambda v: (min((i for i, w in enumerate(SMALL_WORDS) if w in v), default=99), len(v), v)
    )[:4]
    counts = {}
    for variant in small:
        with torch.device("meta"):
            counts[variant] = shrink.parameters_of(timm.create_model(variant).parameters())
    variant = min(small, key=lambda v: counts[v])
    for options in ({"img_size": 64}, {}):
        try:
            torch.manual_seed(0)
            model = timm.create_model(variant, num_classes=10, **options)
        except Exception:
            if options:
                continue
            raise
        yield prepared(model), variant


def prepared(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model in evaluation mode, with no two parameters of equal contents: exporters would merge them."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.flatten()
            if parameter.is_floating_point() and (
                parameter.dim() <= 1 or (flat.numel() and bool((flat == flat[0]).all()))
            ):
                parameter.add_(0.02 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.mul_(0.8 + 0.4 * torch.rand_like(buffer))
    return model.eval()
