"""Folders that are written completely or not at all, and files that two of them share.

A weights file should be on the disk only once. Hard links would achieve that, but then editing one
copy would edit the others, and ONNX's own tools refuse files with two names. So each file has one
owner: the newest bundle that contains it. The cache has a symbolic link to that bundle's file and
checks its hash before reuse: a part whose bundle was deleted or edited is exported again.
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
from .graphs import (
    ENCODER_FILE,
    GRAPH_FILE,
    HOST_FILE,
    HOST_WEIGHTS_FILE,
    KINDS,
    PAIR_FILE,
    PART_FILE,
)
from .manifest import MANIFEST_FILE
from .torch_files import ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE, PROGRAM_FILE, WEIGHTS_FILE

# The top-level names in our folders; anything else belongs to somebody else.
_OUR_NAMES = {
    MANIFEST_FILE, PAIR_FILE, PART_FILE, GRAPH_FILE, HOST_FILE, HOST_WEIGHTS_FILE, PROGRAM_FILE,
    WEIGHTS_FILE, ENCODER_FILE, ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE, "target", "draft",
    "tokenizer",
}  # fmt: skip
# Errors of file systems that do not support links, or not between these two places.
_LINK_UNSUPPORTED = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
_FICLONE = 0x40049409  # FICLONE of linux/fs.h


@contextmanager
def write_folder(folder: Path, marker: str) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` as a whole if the block succeeds.

    marker: the file that identifies our folders; a folder with other contents is not replaced
    (OutriderError "disk").
    """
    folder = resolve_links(folder)
    refuse_foreign(folder, marker)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    _recover(folder)
    try:
        partial.mkdir()
        yield partial
        if folder.exists():
            folder.rename(replaced)  # removed only when the new one is in its place
        partial.rename(folder)
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def resolve_links(folder: Path) -> Path:
    """The folder with symbolic links resolved. Raises OSError for a cycle of links, for which
    pathlib raises another error, or none."""
    resolved = Path(os.path.realpath(folder))
    with suppress(FileNotFoundError, NotADirectoryError):
        resolved.stat()
    return resolved


def _recover(path: Path) -> None:
    """Clean up after processes that were killed while they wrote this folder or file."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*-*"):
        what, _, process = leftover.name.removeprefix(f".{path.name}.").partition("-")
        ours = what in ("partial", "replaced") and process.isdecimal()
        if not ours or _is_running(int(process)):
            continue
        if what == "replaced" and not path.exists():
            leftover.rename(path)
        elif leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Whether this process may still be writing. Files with our own process number are left over
    from an earlier process: in a container, each may get the same number."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def check_writable(folder: Path, marker: str) -> None:
    """Check, before any work, that `write_folder` will be able to write this folder.

    Raises OutriderError "disk" for a folder that is not ours, and for a file system without new
    folders; OSError if nothing can be written there for another reason.
    """
    folder = resolve_links(folder)
    refuse_foreign(folder, marker)
    above = folder.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".outrider-", dir=above))
    except FileNotFoundError:  # `above` exists: a special file system, such as /proc
        cause = f"no folder can be created in {above}"
        raise OutriderError("disk", cause, "Choose another OUT.") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(above)) from None


def refuse_foreign(folder: Path, marker: str) -> None:
    """Raise OutriderError "disk" if `write_folder` would have to replace files not ours."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        ours = json.loads((folder / marker).read_text(encoding="utf-8"))["kind"] in KINDS
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        ours = False
    foreign = sorted(path.name for path in folder.iterdir() if not _is_ours(path.name))
    if ours and not foreign:
        return
    why = f"it contains {foreign[0]}" if ours else f"it has no {marker} of Outrider"
    cause = f"{folder} cannot be replaced: {why}"
    raise OutriderError("disk", cause, "Choose another OUT, or move this folder away yourself.")


def _is_ours(name: str) -> bool:
    """Whether a file is ours, including one left by a process killed in `replacing`."""
    return re.sub(r"^\.(.+)\.partial-\d+$", r"\1", name) in _OUR_NAMES


# Sharing files


def symlink_or_copy(source: Path, link: Path, *, clone: bool = False) -> None:
    """Make `link` a relative symbolic link to the file `source`, replacing what it was; a copy if
    the file system does not support links. clone: prefer a copy that shares blocks, if the file
    system supports it."""
    link.parent.mkdir(parents=True, exist_ok=True)
    with replacing(link) as new:
        if clone and _clone(source, new):
            return
        try:
            new.symlink_to(os.path.relpath(_resolve_parent(source), link.parent.resolve()))
        except OSError as error:
            if error.errno not in _LINK_UNSUPPORTED:
                raise
            shutil.copyfile(source, new)


def place_file(source: Path, destination: Path, old: Path) -> None:
    """Put the file `source` into a folder that is being written, if possible without a second copy
    on the disk. `finalize_file` must be called when the folder has its final name.

    old: the folder that the new one replaces. The result is a clone if the file system shares
    blocks; otherwise a hard link, if `source` is a link to a file that the cache or `old` owns;
    otherwise (another bundle owns it, or `source` is not a link) a copy.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    if _clone(source, destination):
        return
    real = source.resolve()
    if _cache_file(source) == real or real.is_relative_to(old.resolve()):
        try:
            destination.hardlink_to(real)
            return
        except OSError as error:
            if error.errno not in _LINK_UNSUPPORTED:
                raise
    shutil.copyfile(source, destination)


def finalize_file(source: Path, owner: Path) -> None:
    """Make `owner`, which `place_file` made from `source`, a file without other hard links, and
    make the cache point to it. The caller guarantees that both have the same content."""
    cache_file = _cache_file(source)
    if cache_file and os.path.lexists(cache_file):  # not if the cache was cleared
        _recover(cache_file)
        if not (cache_file.is_symlink() and cache_file.exists() and cache_file.samefile(owner)):
            symlink_or_copy(owner, cache_file, clone=True)
    _recover(owner)
    if owner.stat().st_nlink > 1:  # another build has linked it at the same time
        with replacing(owner) as new:
            shutil.copyfile(owner, new)


def _cache_file(source: Path) -> Path | None:
    """The cache's file that a graphs folder's link points to; itself a link if a bundle owns the
    file."""
    return _resolve_parent(source.parent / source.readlink()) if source.is_symlink() else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write; if the block succeeds, it replaces the file `path` in one step."""
    new = path.with_name(f".{path.name}.partial-{os.getpid()}")
    new.unlink(missing_ok=True)  # left by a killed process with the same number
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _resolve_parent(path: Path) -> Path:
    """The path with links and dots resolved, except in its last part."""
    return path.parent.resolve() / path.name


def _clone(source: Path, destination: Path) -> bool:
    """Make a copy that shares its blocks until either file is written to. Returns False if the file
    system does not support it."""
    with source.open("rb") as old, destination.open("xb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            destination.unlink()
            return False
    return True
