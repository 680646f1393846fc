"""TransformerConfig: every option of the one decoder, as data; and presets. hf/configs.py reads configs from files."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from isograd.errors import ConfigError, did_you_mean
from isograd.nn.attention import AttentionConfig
from isograd.nn.rotary import RotaryScaling
from isograd.nn.routing import ExpertOptions, kinds_of, mistyped
from isograd.pipeline.split import balanced

LARGEST, MOST_LAYERS = 1 << 40, 1 << 16  # beyond any model; a file that says more is damaged or hostile
MOST_IDS = 1 << 32  # a token's number is stored in four bytes at most


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(AttentionConfig):
    """Every option of the decoder, those of its attention included. Values that contradict each other are refused."""

    vocab: int
    layers: int
    mlp: int  # inner features, in layers without experts
    norm: str = "rms"  # "rms" | "layer"
    activation: str = "silu"  # "silu" | "gelu" | "gelu_tanh" | "relu"
    gated: bool = True
    positions: str = "rotary"  # "rotary" | "learned"
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    rotary_fraction: float = 1.0  # of a head's features that turn
    max_positions: int = 2048
    mlp_bias: bool = False
    parallel_residual: bool = False
    tied: bool = False
    score: bool = False  # the head gives one number for each token in place of logits: a reward model
    pad_token: int | None = None  # a token whose lookup gives the embedding no gradient
    sliding_window: int | None = None  # how many tokens each sees, itself included
    full_layers: tuple[int, ...] = ()  # layers without the window, counted from 0
    dropout: float = 0.0
    experts: ExpertOptions | None = None  # in place of the feed-forward layer; None: in no layer

    def __post_init__(self) -> None:
        if wrong := mistyped(vars(self), kinds_of(self)):
            raise ConfigError("IG601", "invalid model config: " + "; ".join(wrong), fix="fix every point")
        counts = ("vocab", "hidden", "layers", "heads", "head_dim", "mlp", "max_positions")
        problems = [f"{n} must be positive" for n in counts if (x := getattr(self, n)) is not None and x < 1]
        every = [(part, f.name) for part in (self, self.experts) if part for f in dataclasses.fields(part)]
        sizes = {name: n for part, name in every if type(n := getattr(part, name)) is int}
        problems += [f"{name} {n} is beyond any model" for name, n in sizes.items() if not -1 <= n <= LARGEST]
        problems += [f"layers {self.layers} is beyond any model"] if MOST_LAYERS < self.layers <= LARGEST else []
        if MOST_IDS < self.vocab <= LARGEST:
            problems.append(f"vocab {self.vocab} is beyond any model: at most {MOST_IDS}, as ids have four bytes")
        problems += [
            f"{f.name} must be finite"
            for f in dataclasses.fields(self)
            if isinstance(x := getattr(self, f.name), float) and not math.isfinite(x)
        ]
        problems += [] if self.norm_eps >= 0 else [f"norm_eps must not be negative, not {self.norm_eps}"]
        if self.norm not in ("rms", "layer"):
            problems.append(f"norm is 'rms' or 'layer', not {self.norm!r}")
        if self.positions not in ("rotary", "learned"):
            problems.append(f"positions are 'rotary' or 'learned', not {self.positions!r}")
        if self.pad_token is not None and not 0 <= self.pad_token < self.vocab:
            problems.append(f"pad_token {self.pad_token} is no token of a vocabulary of {self.vocab}")
        if self.heads > 0 and self.head_dim is None and self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is no multiple of heads {self.heads}; give head_dim")
        if self.heads > 0 and self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            problems.append(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        problems += self._problems_of_layers()
        problems += [
            f"{n} must be in [0, 1)" for n in ("dropout", "attention_dropout") if not 0 <= getattr(self, n) < 1
        ]
        if self.experts is not None and not any(map(self.has_experts, range(min(self.layers, MOST_LAYERS)))):
            problems.append(
                f"no layer has experts: every {self.experts.every} after the first {self.experts.dense_first} of "
                f"{self.layers} layers"
            )
        if problems:
            raise ConfigError("IG601", "invalid model config: " + "; ".join(problems), fix="fix every point above")

    def _problems_of_layers(self) -> list[str]:
        """What is wrong with windows and positions."""
        found, numbers = [], self.full_layers
        if self.rope_theta <= 0:
            found.append(f"rope_theta must be positive, not {self.rope_theta}")
        if self.positions == "rotary" and self.heads > 0:
            share, every = self.rotary_fraction, self.features_per_head
            if not 0 < share <= 1 or self.rotary_dims < 2 or self.rotary_dims % 2:
                found.append(f"rotary positions turn pairs: not rotary_fraction {share:g} of a head's {every} features")
        if not self.init_std >= 0:
            found.append(f"init_std must be 0 or more, not {self.init_std}")
        if self.sliding_window is not None and self.sliding_window < 1:
            found.append(f"sliding_window must be at least 1, not {self.sliding_window}")
        if any(not 0 <= n < self.layers for n in numbers) or list(numbers) != sorted(set(numbers)):
            found.append(f"full_layers must be ascending numbers of layers from 0 to {self.layers - 1}, not {numbers}")
        if numbers and self.sliding_window is None:
            found.append("full_layers without a sliding_window: all layers see everything")
        if self.rope_scaling is not None:
            if self.positions != "rotary":
                found.append("rope_scaling without rotary positions")
            if self.rope_scaling.kind == "yarn" and self.rope_theta == 1:
                found.append("rope_theta 1 has no positions that yarn could scale")
            found += self.rope_scaling.problems()
        return found

    @property
    def rotary_dims(self) -> int:
        """The number of features of a head that rotary positions turn."""
        return int(self.features_per_head * self.rotary_fraction)

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token sees in this layer; None: all before it."""
        return None if layer in self.full_layers else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of this layer is made of experts."""
        return self.experts is not None and self.experts.in_layer(layer)

    def width_per_token(self, layer: int) -> int:
        """Inner features of this layer's feed-forward part that one token uses."""
        if self.experts is None or not self.experts.in_layer(layer):
            return self.mlp
        return self.experts.per_token * self.experts.width + self.experts.shared

    def with_layers(self, layers: int) -> TransformerConfig:
        """The same with this many layers, which keep a layer of each kind where they are enough."""
        full = tuple(n for n in self.full_layers if n < layers)
        full = full if full or not self.full_layers else (layers - 1,)
        if len(full) == layers < self.layers and layers > 1:
            full = tuple(range(1, layers))
        return dataclasses.replace(self, layers=layers, full_layers=full)

    @classmethod
    def from_dict(cls, values: dict[str, Any], origin: str = "config") -> TransformerConfig:
        """A config from the fields of a file; `origin` names the file in errors."""
        inner, scaling = values.get("experts"), values.get("rope_scaling")
        if isinstance(inner, dict):
            values = {**values, "experts": _made(ExpertOptions, inner, f"{origin}: experts")}
        if isinstance(scaling, dict):
            values = {**values, "rope_scaling": _made(RotaryScaling, scaling, f"{origin}: rope_scaling")}
        return _made(cls, values, origin)


def rotary_scaling(values: dict[str, Any], origin: str) -> RotaryScaling:
    """A scaling of these values, all of the right types; a config says whether they fit."""
    return _made(RotaryScaling, values, origin)


Made = TypeVar("Made", TransformerConfig, ExpertOptions, RotaryScaling)


def _made(cls: type[Made], values: dict[str, Any], origin: str) -> Made:
    """An object of the fields of a file: unknown, missing and mistyped ones are refused, all at once."""
    kinds = kinds_of(cls)
    unknown = [f"unknown key {key!r}{did_you_mean(str(key), kinds)}" for key in values if key not in kinds]
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    missing = [f"{name!r} is missing" for name in needed if name not in values]
    if unknown or missing:
        raise ConfigError("IG602", f"{origin}: " + "; ".join(unknown + missing), expected=f"fields of {list(kinds)}")
    read: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) and "tuple" in kinds[key] else v for key, v in values.items()
    }
    read = {key: _number(value) if "float" in kinds[key] else value for key, value in read.items()}
    if wrong := mistyped(read, kinds):
        raise ConfigError("IG601", f"invalid {origin}: " + "; ".join(wrong), fix="fix every point")
    return cls(**read)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6, which has no point, as a word."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else value


PRESETS: dict[str, dict[str, Any]] = {
    "quickstart": {"vocab": 256, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 344},
    "tiny-llama": {"vocab": 101, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 4, "mlp": 40},
    "tiny-gpt2": {
        "vocab": 97, "hidden": 24, "layers": 2, "heads": 4, "mlp": 52, "norm": "layer", "norm_eps": 1e-5, "tied": True,
        "activation": "gelu_tanh", "gated": False, "positions": "learned", "max_positions": 32,
        "qkv_bias": True, "out_bias": True, "mlp_bias": True,
    },
    "tiny-qwen3": {
        "vocab": 101, "hidden": 24, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 6, "mlp": 40, "qk_norm": True,
        "tied": True,
    },
    "tiny-neox": {
        "vocab": 97, "hidden": 32, "layers": 2, "heads": 4, "mlp": 52, "norm": "layer", "norm_eps": 1e-5,
        "activation": "gelu", "gated": False, "rotary_fraction": 0.5, "parallel_residual": True,
        "qkv_bias": True, "out_bias": True, "mlp_bias": True,
    },
}  # fmt: skip


def preset(name: str) -> TransformerConfig:
    """One of the small configs in PRESETS, by its name."""
    if name not in PRESETS:
        raise ConfigError("IG603", f"no preset {name!r}{did_you_mean(name, PRESETS)}", expected=", ".join(PRESETS))
    return TransformerConfig(**PRESETS[name])


@lru_cache(maxsize=4096)
def split_by_cost(config: TransformerConfig, stages: int, ranks: int, even: bool = False) -> tuple[int, ...]:
    """A split by the cost of matrix products in blocks and head; looking up an embedding costs almost nothing. `even`:
    the head, too, counts for nothing."""
    head_dim, kv_heads = config.features_per_head, config.kv_heads or config.heads
    attention = config.hidden * head_dim * 2 * (config.heads + kv_heads)
    inner = [config.width_per_token(number) for number in range(config.layers)]
    costs = [float(attention + config.hidden * n * (3 if config.gated else 2)) for n in inner]
    return balanced(costs, stages, last=0.0 if even else float(config.hidden * config.vocab), ranks=ranks)
