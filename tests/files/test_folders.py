"""Ownership of files: one copy on the disk, and editing a file never changes another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import error_line

import engines.__main__
from runtime.files import folders
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.folders import (
    check_writable,
    finalize_file,
    place_file,
    symlink_or_copy,
    write_folder,
)
from runtime.files.manifest import MANIFEST_FILE

CONTENT = b"weights" * 100


class Place:
    """A cache with one part, a graphs folder that links to it, and bundles built from that."""

    def __init__(self, root: Path):
        self.root, self.part = root, root / "cache" / "key" / "weights.bin"
        self.part.parent.mkdir(parents=True)
        self.part.write_bytes(CONTENT)
        self.graph = root / "cache" / "graphs" / "name" / "target" / "weights.bin"
        symlink_or_copy(self.part, self.graph)

    def build(self, name: str, content: bytes = CONTENT) -> Path:
        """Build a bundle as engines/bundle.py does, and return its own file."""
        out = self.root / name
        with write_folder(out, MANIFEST_FILE) as partial:
            place_file(self.graph, partial / "target" / "weights.bin", out)
            (partial / MANIFEST_FILE).write_text('{"kind": "manifest"}')
        finalize_file(self.graph, out / "target" / "weights.bin")
        made = out / "target" / "weights.bin"
        assert made.read_bytes() == content
        assert not made.is_symlink() and made.stat().st_nlink == 1
        return made

    def inodes(self) -> set[int]:
        """The inodes of all files with this content: one for each copy on the disk."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {path.stat().st_ino for path in files if path.stat().st_size == len(CONTENT)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_bundle_owns_the_only_copy(place: Place) -> None:
    made = place.build("bundle")
    inode = made.stat().st_ino
    assert place.build("bundle").stat().st_ino == inode, "another build moves nothing"
    assert len(place.inodes()) == 1
    assert place.part.is_symlink() and place.graph.read_bytes() == CONTENT
    assert not os.path.isabs(place.part.readlink()) and place.part.samefile(made)
    # The whole checkout may be moved.
    moved = place.root.rename(place.root.with_name("moved"))
    assert (moved / "cache" / "key" / "weights.bin").read_bytes() == CONTENT


def test_two_bundles_of_the_same_graphs(place: Place) -> None:
    first, second = place.build("first"), place.build("second")
    assert len(place.inodes()) == 2
    first.write_bytes(b"edited")
    assert second.read_bytes() == place.part.read_bytes() == CONTENT
    shutil.rmtree(place.root / "first")
    assert place.build("third") and place.build("second")
    for name in ("second", "third"):
        shutil.rmtree(place.root / name)
    # A dangling link, which `verify_files` treats as missing: the part is exported again.
    assert not place.graph.is_file() and not place.part.is_file()


def test_a_file_of_somebody_else_stays_his(place: Place) -> None:
    """A graphs folder that was copied contains files instead of links, and keeps them."""
    place.graph.unlink()
    place.graph.write_bytes(CONTENT)
    made = place.build("bundle")
    assert not place.graph.is_symlink()
    made.write_bytes(b"edited")
    assert place.graph.read_bytes() == CONTENT


def test_two_builds_at_the_same_time(place: Place) -> None:
    """Both place the cache's file before either is finalized: each ends with its own file."""
    outs = [place.root / name / "weights.bin" for name in ("first", "second")]
    for out in outs:
        place_file(place.graph, out, out.parent)
    for out in outs:
        finalize_file(place.graph, out)
    assert [out.stat().st_nlink for out in outs] == [1, 1]
    assert {out.read_bytes() for out in (*outs, place.part)} == {CONTENT}


def test_the_newest_bundle_owns_the_file(place: Place) -> None:
    """Fault: the cache was lost with one bundle, although another one held the same file."""
    first, second = place.build("first"), place.build("second")
    assert place.part.samefile(second)
    shutil.rmtree(place.root / "second")
    finalize_file(place.graph, first)  # as a build that finds its bundle unchanged
    assert place.part.is_symlink() and place.part.samefile(first)


def test_a_part_that_was_exported_again(place: Place) -> None:
    """Fault: the cache kept a second copy beside the bundle's forever."""
    made = place.build("bundle")
    place.part.unlink()
    place.part.write_bytes(CONTENT)
    finalize_file(place.graph, made)
    assert len(place.inodes()) == 1 and not made.is_symlink()
    shutil.rmtree(place.part.parent)
    finalize_file(place.graph, made)  # the cache was cleared: nothing is put back
    assert not place.part.parent.exists()


def test_leftovers_of_the_same_process_id_and_beside_a_name_with_brackets(tmp_path: Path) -> None:
    """Faults: in a container, where every process has the same id, the next build failed because
    its temporary folder existed; and the leftovers of "a[b]" were never found."""
    out = tmp_path / "a[b]"
    for process in (os.getpid(), 1 << 40):
        (tmp_path / f".a[b].partial-{process}").mkdir()
    with write_folder(out, "graph.json") as made:
        (made / "graph.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["a[b]"]


def test_leftovers_of_a_killed_process(place: Place) -> None:
    """Faults: they blocked the cache forever, and stayed in the bundle at full size."""
    made = place.build("bundle")
    (place.part.parent / "graph.json").write_text('{"kind": "graph"}')
    dead, same, living = 1 << 40, os.getpid(), os.getppid()
    for beside in (place.part, made):
        for process in (dead, living):
            beside.with_name(f".{beside.name}.partial-{process}").write_bytes(CONTENT)
    check_writable(place.part.parent, "graph.json")  # may be replaced
    finalize_file(place.graph, made)
    for beside in (place.part, made):
        left = {path.name for path in beside.parent.glob(".*")}
        assert left == {f".{beside.name}.partial-{living}"}
    place.graph.with_name(f".{place.graph.name}.partial-{same}").symlink_to("x")
    symlink_or_copy(place.part, place.graph)  # the leftover has this process's id
    (place.part.parent / ".notes.1").write_text("somebody's")
    with pytest.raises(OutriderError, match=r"it contains \.notes\.1"):
        check_writable(place.part.parent, "graph.json")


@pytest.mark.parametrize("lacks", ["hard links", "symbolic links"])
def test_file_systems_without_links(
    place: Place, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to" if lacks == "hard links" else "symlink_to", refuse)
    place.build("bundle")
    assert place.graph.read_bytes() == place.part.read_bytes() == CONTENT


def test_a_file_system_that_shares_blocks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated by a copy: the cache keeps its own file, and there are no links at all."""

    def clone(new: object, request: int, old: int) -> None:
        assert request == folders._FICLONE
        new.write(os.pread(old, 1 << 20, 0))

    monkeypatch.setattr(folders.fcntl, "ioctl", clone)
    made = place.build("bundle")
    assert not place.part.is_symlink() and place.part.stat().st_nlink == 1
    made.write_bytes(b"edited")
    assert place.part.read_bytes() == CONTENT


def test_taking_a_file_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    with pytest.raises(FileExistsError):
        place_file(tmp_path / "a", tmp_path / "b", tmp_path / "old")
    assert (tmp_path / "b").read_text() == "old"


# Where a folder may be written, and what remains there


@pytest.mark.parametrize(
    "where",
    # In the last one, not even root may write.
    ["/", "thesis", "circle", "no/../circle", "circle/out", f"{__file__}/out", "/proc/outrider"],
)
def test_out_is_refused_before_anything_is_exported(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check that `make engines` runs first."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.md").write_text("years of work")
    (tmp_path / "circle").symlink_to("circle")
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--supports", "float32", "--out", str(tmp_path / where)]
    assert engines.__main__.main(arguments) == EXIT_STATUS["disk"]
    error_line(capsys.readouterr().err, "disk")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_is_fine_is_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "deeper" / "out", MANIFEST_FILE)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutriderError, match="no folder can be created in /proc"):
        check_writable(Path("/proc/out"), MANIFEST_FILE)  # Fault: "No such file or directory"
    (tmp_path / MANIFEST_FILE).write_text("[" * 100_000)
    with pytest.raises(OutriderError, match="cannot be replaced"):
        check_writable(tmp_path, MANIFEST_FILE)
    with (
        pytest.raises(OutriderError, match="cannot be replaced"),
        write_folder(tmp_path, MANIFEST_FILE),
    ):
        pytest.fail("the block must not run")


def test_out_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "bundle")
    with write_folder(tmp_path / "link", MANIFEST_FILE) as partial:
        (partial / MANIFEST_FILE).write_text("{}")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "bundle" / MANIFEST_FILE).exists()


def test_folders_of_a_killed_process(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".out.partial-{dead.pid}").mkdir()
    (tmp_path / f".out.replaced-{dead.pid}").mkdir()
    (tmp_path / f".out.replaced-{dead.pid}" / MANIFEST_FILE).write_text('{"kind": "manifest"}')
    with pytest.raises(RuntimeError), write_folder(tmp_path / "out", MANIFEST_FILE):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # the old one is restored
    assert (tmp_path / "out" / MANIFEST_FILE).exists()
