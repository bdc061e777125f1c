"""The features that an audio encoder reads, from the checkpoint's feature extractor."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor

from runtime.files.errors import convert_errors
from runtime.files.generation import FeatureFacts
from runtime.files.records import build


class UnsupportedFeatures(Exception):
    """The features are not log-mel spectra of a fixed length; the message is the reason."""


def read(name: str, path: Path) -> FeatureFacts:
    """Read preprocessor_config.json, with Transformers' defaults for missing fields. Raises
    OutriderError "checkpoint", UnsupportedFeatures."""
    what = f"the preprocessor_config.json of {name} cannot be read"
    remedy = "Copy the checkpoint's preprocessor_config.json beside its weights."
    with convert_errors("checkpoint", what, remedy):
        extractor: Any = AutoFeatureExtractor.from_pretrained(  # type: ignore[no-untyped-call]
            path, trust_remote_code=False
        )
    values = {field.name: getattr(extractor, field.name, None) for field in fields(FeatureFacts)}
    if missing := [field for field, value in values.items() if value is None]:
        raise UnsupportedFeatures(
            f"its encoder does not read log-mel spectra of a fixed length: its "
            f"{type(extractor).__name__} has no {missing[0]}"
        )
    remedy = "Download the checkpoint again, or correct that field."
    with convert_errors("checkpoint", name, remedy):
        facts: FeatureFacts = build(FeatureFacts, values, "preprocessor_config")
    return facts
