"""Any token, each as likely: what speculation costs where nothing is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.engine import Logits
from ..sequence import ActiveSequence
from .draft import Draft, Sources


class RandomDraft(Draft):
    help = "any token"

    def __init__(self, sources: Sources):
        super().__init__(sources)
        self._nothing: Logits = np.zeros(sources.width, np.float32)

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        return self._nothing
