"""The parts of a config: a model of images and text has a config for its text, and one for each of its towers."""

from __future__ import annotations

from typing import Any


def parts_of(config: Any) -> dict[str, Any]:
    """{field: config} of the configs in a config."""
    names = getattr(config, "sub_configs", None) or {}
    return {name: part for name in names if hasattr(part := getattr(config, name, None), "to_dict")}


def is_text(config: Any) -> bool:
    """Whether tokens enter it: it has a vocabulary, or one of its parts has."""
    own = isinstance(getattr(config, "vocab_size", None), int) and "qformer" not in config.model_type
    return own or any(map(is_text, parts_of(config).values()))


def text_of(config: Any) -> Any:
    """The config of the layers that predict the next token."""
    parts = {name: part for name, part in parts_of(config).items() if is_text(part)}
    for name in ("text_config", "decoder"):
        if name in parts:
            return text_of(parts[name])
    return text_of(next(iter(parts.values()))) if len(parts) == 1 else config


def towers_of(config: Any) -> list[Any]:
    """The configs of parts that no text passes through, in any depth."""
    found = []
    for part in parts_of(config).values():
        found += towers_of(part) if is_text(part) else [part, *parts_of(part).values()]
    return found
