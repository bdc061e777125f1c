"""Folders that are written whole or not at all, and files that two of them share.

A file of weights should be on the disk once. Hard links would do that, but then whoever edits one
copy edits the others, and ONNX's own tools refuse files with two names. So a file has one owner:
the newest bundle that holds it. The cache then has a symbolic link to that bundle's file, and looks
at its hash before it is used again: a part whose bundle was deleted or edited is exported again.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import OutriderError
from .manifest import (
    ENCODER_FILE,
    GRAPH_FILE,
    HOST_FILE,
    HOST_WEIGHTS_FILE,
    KINDS,
    MANIFEST_FILE,
    PAIR_FILE,
    PART_FILE,
)
from .torch_files import ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE, PROGRAM_FILE, WEIGHTS_FILE

# What our folders hold at the top; anything else in one is somebody's.
_OURS = {
    MANIFEST_FILE, PAIR_FILE, PART_FILE, GRAPH_FILE, HOST_FILE, HOST_WEIGHTS_FILE, PROGRAM_FILE,
    WEIGHTS_FILE, ENCODER_FILE, ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE, "target", "draft",
    "tokenizer",
}  # fmt: skip
# What a file system says that has no links, or not between these two places.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
_CLONE = 0x40049409  # FICLONE of linux/fs.h


@contextmanager
def write_folder(folder: Path, marker: str) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends well, and never half.

    marker: the file that tells ours apart; a folder with other contents is not replaced
    (OutriderError "disk").
    """
    folder = _through_links(folder)
    refuse_foreign(folder, marker)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (
        folder.with_name(f".{folder.name}.{what}-{os.getpid()}") for what in ("partial", "replaced")
    )
    _recover(folder)
    try:
        partial.mkdir()
        yield partial
        if folder.exists():
            folder.rename(replaced)  # not removed before the new one is in its place
        partial.rename(folder)
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def _through_links(folder: Path) -> Path:
    """What a symbolic link leads to, not the link's own place. Raises OSError where they lead in a
    circle, for which pathlib has another error, or none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        folder.stat()
    return folder.resolve()


def _recover(path: Path) -> None:
    """Clear up after processes that were killed while they wrote this folder or file."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*-*"):
        what, _, process = leftover.name.removeprefix(f".{path.name}.").partition("-")
        if what not in ("partial", "replaced") or not process.isdecimal() or _lives(int(process)):
            continue
        if what == "replaced" and not path.exists():
            leftover.rename(path)
        elif leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    """Whether what it left may still be written. Of this one's number it is a predecessor's: in a
    container each has the same."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def check_place(folder: Path, marker: str) -> None:
    """Find out, before any work, whether `write_folder` will be allowed to write this folder.

    Raises OutriderError "disk" for a folder that is not ours, and OSError where nothing can be
    written.
    """
    folder = _through_links(folder)
    refuse_foreign(folder, marker)
    above = folder.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".outrider-", dir=above))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(above)) from None


def refuse_foreign(folder: Path, marker: str) -> None:
    """Raises OutriderError "disk" where `write_folder` would have to replace what is not ours."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        ours = json.loads((folder / marker).read_text(encoding="utf-8"))["kind"] in KINDS
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        ours = False
    strangers = sorted(path.name for path in folder.iterdir() if not _is_ours(path.name))
    if ours and not strangers:
        return
    why = f"it holds {strangers[0]}" if ours else f"it has no {marker} of ours"
    raise OutriderError(
        "disk",
        f"{folder} cannot be replaced: {why}",
        "Choose another OUT, or move it away yourself.",
    )


def _is_ours(name: str) -> bool:
    """Also what a process left that was killed in `replacing`."""
    return re.sub(r"^\.(.+)\.partial-\d+$", r"\1", name) in _OURS


# Sharing files


def point_to(source: Path, link: Path, *, clone: bool = False) -> None:
    """Make `link` a relative symbolic link to the file `source`, in place of what it was; a copy
    where the file system has no such links. clone: rather share the blocks, where it does that."""
    link.parent.mkdir(parents=True, exist_ok=True)
    with replacing(link) as new:
        if clone and _clone(source, new):
            return
        try:
            new.symlink_to(os.path.relpath(_own_path(source), link.parent.resolve()))
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copyfile(source, new)


def take_file(source: Path, destination: Path, old: Path) -> None:
    """Put the file `source` into a folder that is being written, without a second copy on the disk
    where that can be. `settle_file` has to follow when the folder has its name.

    old: the folder that the new one replaces. A clone where the file system shares blocks. Else a
    second name for what the cache owns, which `source` is a link to, or for what `old` holds. Else
    (another bundle owns it, or `source` is no link) a copy.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    if _clone(source, destination):
        return
    real = source.resolve()
    if _cached(source) == real or real.is_relative_to(old.resolve()):
        try:
            destination.hardlink_to(real)
            return
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
    shutil.copyfile(source, destination)


def settle_file(source: Path, owner: Path) -> None:
    """Make `owner`, which `take_file` made of `source`, a file that nobody else has a name for, and
    have the cache point to it. Whoever calls knows that both have the same content."""
    cached = _cached(source)
    if cached and os.path.lexists(cached):  # not where the cache was cleared
        _recover(cached)
        if not (cached.is_symlink() and cached.exists() and cached.samefile(owner)):
            point_to(owner, cached, clone=True)
    _recover(owner)
    if owner.stat().st_nlink > 1:  # another build took it at the same time
        with replacing(owner) as new:
            shutil.copyfile(owner, new)


def _cached(source: Path) -> Path | None:
    """The cache's file that a graphs folder's link names; itself a link where a bundle owns it."""
    return _own_path(source.parent / source.readlink()) if source.is_symlink() else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of the file `path`, in one step and if all went well."""
    new = path.with_name(f".{path.name}.partial-{os.getpid()}")
    new.unlink(missing_ok=True)  # of a killed process that had the same number
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _own_path(path: Path) -> Path:
    """The path without links and dots, but for the last step."""
    return path.parent.resolve() / path.name


def _clone(source: Path, destination: Path) -> bool:
    """A copy that shares its blocks until one of both is written to; False where there is none."""
    with source.open("rb") as old, destination.open("xb") as new:
        try:
            fcntl.ioctl(new, _CLONE, old.fileno())
        except OSError:
            destination.unlink()
            return False
    return True
