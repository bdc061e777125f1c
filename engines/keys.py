"""The content address of an engine: a hash of everything it is made from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from runtime.files.records import digest_json


def engine_key(**made_from: Any) -> str:
    """SHA-256 of these JSON values and of this package's source, since a change of the code may
    change the engine."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return digest_json({**made_from, "builder": code.hexdigest()})
