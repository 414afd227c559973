"""Example inputs of any model, by the names of its arguments.

What a model takes is guessed in several ways (`candidates`); the first on which it runs is used. Inputs depend on a seed
and on two sizes: batch, and length of a sequence. So the axes that vary are those whose extent differs between sizes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tools.lib import shrink

Tensors = dict[str, torch.Tensor]
FIRST_TOKEN = 3
SECOND = 1600
"""Samples of a sound."""


@dataclass(frozen=True)
class Sizes:
    batch: int
    seq: int


class Maker:
    """Makes inputs for one model."""

    def __init__(self, model: torch.nn.Module, sizes: Sizes, group: str) -> None:
        self.model, self.sizes, self.group = model, sizes, group
        self.config = getattr(model, "config", None)
        self.configs = inside(self.config)
        parameters = inspect.signature(model.forward).parameters
        self.names = list(parameters)
        self.required = [n for n, p in parameters.items() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
        self.generator = torch.Generator().manual_seed(7)

    def field(self, *names: str, default: Any = None) -> Any:
        """Returns the first of these fields that the configuration, or one inside it, has."""
        for name in names:
            for config in self.configs:
                value = shrink.read(config, name)
                if value is not None:
                    return value
        return default

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def ints(self, limit: int, *shape: int, first: int = 0) -> torch.Tensor:
        return torch.randint(first, max(limit, first + 1), shape, generator=self.generator)

    def tokens(self, length: int) -> torch.Tensor:
        vocabulary = min(
            self.field("vocab_size", "text_vocab_size", "src_vocab_size", default=shrink.VOCABULARY),
            shrink.FIRST_SPECIAL_TOKEN,
        )
        return self.ints(vocabulary, self.sizes.batch, length, first=min(FIRST_TOKEN, vocabulary - 1))

    def mask(self, length: int) -> torch.Tensor:
        """Returns a mask of ones whose last row ends in padding."""
        mask = torch.ones(self.sizes.batch, length, dtype=torch.int64)
        mask[-1, length - 2 :] = 0
        return mask

    def candidates(self) -> Iterator[Tensors]:
        """Yields sets of inputs, the fullest first."""
        if "input_ids" in self.names:
            for others in [*self.other_modes(), {}]:
                yield from self.with_text(others)
        for main in self.main_inputs():
            yield from self.completed(main)
        books = self.field("num_codebooks", "num_quantizers")
        if "input_ids" in self.names and isinstance(books, int):
            batch, seq = self.sizes.batch, self.sizes.seq
            for shape in ((batch * books, seq), (batch, books, seq), (batch, seq, books)):
                yield from self.completed({"input_ids": self.ints(8, *shape)})

    def with_text(self, others: Tensors) -> Iterator[Tensors]:
        counts: list[int] = [0]
        if others:
            counts = [*feature_counts(self.model, others), 0, 1, 4, 16]
        for count in dict.fromkeys(counts):
            ids = self.tokens(self.sizes.seq + count)
            special = (
                self.field("image_token_id", "image_token_index")
                if "pixel_values" in others
                else self.field("audio_token_id", "audio_token_index")
            )
            if count and special is None:
                continue
            if count:
                ids[:, 1 : 1 + count] = special
            text = {"input_ids": ids} | others
            if "mm_token_type_ids" in self.names and count:
                text["mm_token_type_ids"] = (ids == special).long()
            if "pixel_values" in others and "image_embeds_position_mask" in self.names:
                place = torch.zeros_like(ids)
                place[:, 1 : 1 + self.field("latent_query_num", default=count)] = 1
                text["image_embeds_position_mask"] = place
            if "pixel_values" in others and "image_attention_mask" in self.names:
                text["image_attention_mask"] = torch.ones(
                    *ids.shape, others["pixel_values"].shape[1], dtype=torch.int64
                )
            yield from self.completed(text)

    def completed(self, main: Tensors) -> Iterator[Tensors]:
        """Yields a set of inputs with what else the model needs: first with masks, for models that read whole sequences."""
        length = main["input_ids"].shape[1] if "input_ids" in main else self.sizes.seq
        extra: Tensors = {}
        if "decoder_input_ids" in self.names:
            extra["decoder_input_ids"] = self.tokens(self.sizes.seq)
        elif "decoder_input_values" in self.names and "labels" in self.names:
            extra["decoder_input_values"] = self.floats(
                self.sizes.batch, self.sizes.seq, self.field("num_mel_bins", default=16)
            )
        for name in self.required:
            if name not in main and name not in extra:
                made = self.named(name, length)
                if made is not None:
                    extra[name] = made
        if "visual_feats" in self.names:
            extra["visual_feats"] = self.floats(
                self.sizes.batch, 6, self.field("visual_feat_dim", default=shrink.WIDTH)
            )
            extra["visual_pos"] = self.floats(self.sizes.batch, 6, 4)
        if "bbox" in self.names:
            extra["bbox"] = self.boxes(length)
        if (
            "attention_mask" in self.names
            and "input_ids" in main
            and self.group in ("encoder", "seq2seq")
            and len(main) == 1
        ):
            yield main | extra | {"attention_mask": self.mask(length)}
        yield main | extra
        if "attention_mask" in self.names and "input_ids" in main:
            yield main | extra | {"attention_mask": torch.ones(self.sizes.batch, length, dtype=torch.int64)}

    def boxes(self, length: int) -> torch.Tensor:
        corners = self.ints(30, self.sizes.batch, length, 2)
        return torch.cat([corners, corners + self.ints(30, self.sizes.batch, length, 2)], -1)

    def named(self, name: str, length: int) -> torch.Tensor | None:
        """Returns a guess at an argument that has no default."""
        batch = self.sizes.batch
        width = self.field("hidden_size", "d_model", default=shrink.WIDTH)
        match name:
            case "decoder_input_ids":
                return self.tokens(self.sizes.seq)
            case "attention_mask" | "padding_mask" | "pixel_mask":
                return self.mask(length)
            case "pixel_values":
                return next(self.images())
            case "input_ids" | "qformer_input_ids":
                return self.tokens(length)
            case "encoder_hidden_states" | "inputs_embeds" | "hidden_states":
                return self.floats(batch, length, width)
            case "position_ids":
                return torch.arange(length).expand(batch, length).clone()
            case "input_features" | "input_values":
                return next(iter(self.sounds()))
        return None

    def other_modes(self) -> Iterator[Tensors]:
        """Yields images or sounds for a model that reads text with them."""
        if "pixel_values" in self.names:
            if "image_grid_thw" in self.names or "grid_thw" in self.names:
                grid = "image_grid_thw" if "image_grid_thw" in self.names else "grid_thw"
                patch = self.field("patch_size", default=shrink.PATCH)
                area = patch * patch if isinstance(patch, int) else patch[0] * patch[1]
                for depth in (self.field("temporal_patch_size", default=1), 1):
                    values = self.floats(
                        self.sizes.batch * 16, self.field("num_channels", "in_channels", default=3) * depth * area
                    )
                    yield {"pixel_values": values, grid: torch.tensor([[1, 4, 4]] * self.sizes.batch)}
            for image in self.images():
                yield {"pixel_values": image}
                if "image_sizes" in self.names:
                    side = list(image.shape[-2:])
                    yield {"pixel_values": image, "image_sizes": torch.tensor([side] * self.sizes.batch)}
        for name in ("input_features", "input_values", "audio_values"):
            if name in self.names:
                for sound in self.sounds():
                    yield {name: sound}
                    mask = "feature_attention_mask" if "feature_attention_mask" in self.names else f"{name}_mask"
                    if mask in self.names:
                        yield {name: sound, mask: torch.ones(sound.shape[0], sound.shape[-1], dtype=torch.int64)}

    def images(self) -> Iterator[torch.Tensor]:
        batch, channels = self.sizes.batch, self.field("num_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        frames = self.field("num_frames", "frames_per_clip", default=2)
        for height, width in self.image_sizes():
            yield self.floats(batch, channels, height, width)
            yield self.floats(batch, frames if isinstance(frames, int) else 2, channels, height, width)
            yield self.floats(batch, 1, channels, height, width)

    def image_sizes(self) -> list[tuple[int, int]]:
        given = self.field("image_size", "img_size", "crop_size", default=None)
        sides = []
        if isinstance(given, int) and given > 1:
            sides.append((given, given))
        elif isinstance(given, (list, tuple)) and given:
            sides.append((given[0], given[-1]))
        elif isinstance(given, dict):
            sides.append((given.get("height", 64), given.get("width", 64)))
        return list(dict.fromkeys([*sides, (64, 64), (32, 32), (128, 128), (224, 224)]))

    def sounds(self) -> Iterator[torch.Tensor]:
        batch = self.sizes.batch
        bins = self.field("num_mel_bins", "n_mels", "input_feat_size", "feature_size", "input_dim", "feature_projection_input_dim",
                          "input_feat_per_channel", "mel_bins", default=16)  # fmt: skip
        frames = 2 * self.field("max_source_positions", default=16)
        longest = self.field("max_length", "spec_size", default=shrink.LENGTH)
        yield self.floats(batch, bins, frames)
        yield self.floats(batch, longest, bins)
        yield self.floats(batch, frames, bins)
        yield self.floats(batch, SECOND + 40 * self.sizes.seq)
        yield self.floats(batch, 1, SECOND + 40 * self.sizes.seq)
        yield self.floats(batch, 1, longest, bins)
        yield self.floats(batch, SECOND * 10)

    def main_inputs(self) -> Iterator[Tensors]:
        """Yields what a model without text takes."""
        if self.config is None or not hasattr(self.model, "main_input_name"):
            yield from self.plain_images()
            return
        main = self.model.main_input_name
        if "past_values" in self.names:
            yield from self.series()
        if "input_ids" in self.names and main == "input_ids":
            return
        if "states" in self.names and "returns_to_go" in self.names:
            batch, seq = self.sizes.batch, self.sizes.seq
            yield {"states": self.floats(batch, seq, self.config.state_dim), "actions": self.floats(batch, seq, self.config.act_dim),
                   "returns_to_go": self.floats(batch, seq, 1), "rewards": self.floats(batch, seq, 1),
                   "timesteps": torch.arange(seq).expand(batch, seq).clone(),
                   "attention_mask": torch.ones(batch, seq, dtype=torch.int64)}  # fmt: skip
        for name in dict.fromkeys([main, *self.names]):
            if name in self.names and re.fullmatch(r".*pixel_values.*", name):
                for image in self.images():
                    yield {name: image}
            elif name in ("input_features", "input_values", "audio_values", "spectrogram", "waveform"):
                for sound in self.sounds():
                    yield {name: sound}
            elif name in ("audio_codes", "codes"):
                yield {
                    name: self.ints(
                        8, self.sizes.batch, self.field("num_codebooks", "num_quantizers", default=4), self.sizes.seq
                    )
                }
            elif name in ("hidden_states", "inputs_embeds"):
                yield {
                    name: self.floats(self.sizes.batch, self.sizes.seq, self.field("hidden_size", default=shrink.WIDTH))
                }
            elif name == "inputs":
                yield {name: self.tokens(self.sizes.seq)}

    def plain_images(self) -> Iterator[Tensors]:
        """Yields images for a model that is no transformers model: timm's."""
        own = (getattr(self.model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
        first = self.names[0]
        for side in (64, own[-1]):
            yield {first: self.floats(self.sizes.batch, own[0], side, side)}

    def series(self) -> Iterator[Tensors]:
        """Yields a time series with its future, and a plain one."""
        batch = self.sizes.batch
        config: Any = self.config
        past = (
            config.context_length + max(getattr(config, "lags_sequence", None) or [0])
            if hasattr(config, "context_length")
            else shrink.LENGTH
        )
        channels = getattr(config, "num_input_channels", 0) or (
            getattr(config, "input_size", 1) if getattr(config, "input_size", 1) > 1 else 0
        )
        shape = (batch, past, channels) if channels else (batch, past)
        future = getattr(config, "prediction_length", None) or 4
        times = getattr(config, "num_time_features", 0)
        full = {
            "past_values": self.floats(*shape),
            "past_time_features": self.floats(batch, past, times),
            "past_observed_mask": torch.ones(shape),
            "future_values": self.floats(batch, future, *shape[2:]),
            "future_time_features": self.floats(batch, future, times),
        }
        given = {name: value for name, value in full.items() if name in self.names}
        yield given
        yield {name: value for name, value in given.items() if not name.startswith("future")}
        yield {"past_values": full["past_values"]}


def inside(config: Any) -> list[Any]:
    """Returns a configuration and all inside it."""
    if config is None:
        return []
    found = [config]
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            found += inside(value)
    return found


def feature_counts(model: torch.nn.Module, others: Tensors) -> list[int]:
    """Returns guesses at how many tokens stand for one image or sound, from what the model makes of it."""
    owners = [
        model,
        *(part for part in (getattr(model, "model", None), getattr(model, "thinker", None)) if part is not None),
    ]
    counts = []
    for owner in owners:
        for name in ("get_image_features", "get_audio_features"):
            method = getattr(owner, name, None)
            if method is None or ("image" in name) != ("pixel_values" in others):
                continue
            try:
                with torch.no_grad():
                    made = method(**others)
            except Exception:
                continue
            made = getattr(made, "pooler_output", None) if hasattr(made, "pooler_output") else made
            parts = list(made) if isinstance(made, (list, tuple)) else [made]
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            batch = (
                next(iter(others.values())).shape[0]
                if "image_grid_thw" not in others
                else others["image_grid_thw"].shape[0]
            )
            if tensors:
                total = sum(t.numel() // t.shape[-1] for t in tensors)
                counts += [total // batch, total]
    return counts
