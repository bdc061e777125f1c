"""The features that an audio encoder reads, from the checkpoint's feature extractor."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor

from runtime.files.errors import OutriderError, first_line
from runtime.files.generation import FeatureFacts
from runtime.files.records import build


class UnsupportedFeatures(Exception):
    """The features are not log-mel spectra of a fixed length; the message is the reason."""


def read(name: str, path: Path) -> FeatureFacts:
    """Read preprocessor_config.json, with Transformers' defaults for missing fields. Raises
    OutriderError "checkpoint", UnsupportedFeatures."""
    try:
        extractor: Any = AutoFeatureExtractor.from_pretrained(  # type: ignore[no-untyped-call]
            path, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - its JSON and classes may raise any class
        raise OutriderError(
            "checkpoint",
            f"the preprocessor_config.json of {name} cannot be read: {first_line(error)}",
            "Copy the checkpoint's preprocessor_config.json beside its weights.",
        ) from None
    values = {field.name: getattr(extractor, field.name, None) for field in fields(FeatureFacts)}
    if missing := [field for field, value in values.items() if value is None]:
        raise UnsupportedFeatures(
            f"its encoder does not read log-mel spectra of a fixed length: its "
            f"{type(extractor).__name__} has no {missing[0]}"
        )
    try:
        facts: FeatureFacts = build(FeatureFacts, values, "preprocessor_config")
    except (TypeError, ValueError) as error:
        raise OutriderError(
            "checkpoint",
            f"{name}: {first_line(error)}",
            "Download the checkpoint again, or correct that field.",
        ) from None
    return facts
