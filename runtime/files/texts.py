"""Reads text files that the user names, such as a corpus or the text of a quality test."""

from __future__ import annotations

from pathlib import Path

from .errors import OutriderError, first_line


def read_text(path: Path, named: str) -> str:
    """The contents of a UTF-8 file, without a byte-order mark.

    named: its name in messages. Raises OutriderError "option".
    """
    try:
        if path.is_char_device():  # /dev/zero has no end; a pipe has one
            raise OSError(f"{path} is a device")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # not UTF-8, or a zero byte in the name
        cause = f"cannot read {named}: {getattr(error, 'strerror', None) or first_line(error)}"
        raise OutriderError("option", cause, "Give a readable UTF-8 text file.") from None
