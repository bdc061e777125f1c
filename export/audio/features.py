"""What an encoder of sound reads, as the checkpoint's feature extractor says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor

from runtime.files.audio import FeatureFacts
from runtime.files.errors import OutriderError, first_line

_FIELDS = ("sampling_rate", "feature_size", "n_fft", "hop_length", "n_samples")


class OtherFeatures(Exception):
    """No log-mel spectra of a fixed length; the text is the reason."""


def read(name: str, path: Path) -> FeatureFacts:
    """Of preprocessor_config.json, missing fields as Transformers has them. Raises OutriderError
    "checkpoint", OtherFeatures."""
    try:
        extractor: Any = AutoFeatureExtractor.from_pretrained(  # type: ignore[no-untyped-call]
            path, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - Transformers raises what its JSON and classes do
        raise OutriderError(
            "checkpoint",
            f"the preprocessor_config.json of {name} cannot be read: {first_line(error)}",
            "Copy the checkpoint's preprocessor_config.json beside its weights.",
        ) from None
    found: dict[str, Any] = {field: getattr(extractor, field, None) for field in _FIELDS}
    for field, value in found.items():
        if value is None:
            raise OtherFeatures(
                f"its encoder reads something else than log-mel spectra of a fixed length: its "
                f"{type(extractor).__name__} has no {field}"
            )
        if type(value) is not int or not 0 < value < 1 << 31:
            raise OutriderError(
                "checkpoint",
                f"the preprocessor_config.json of {name} has {field} = {repr(value)[:60]}",
                "Download the checkpoint again, or mend that line.",
            )
    return FeatureFacts(**found)
