"""What a user sees when something fails: one line of cause, one line of remedy, an exit status."""

from __future__ import annotations

import errno
import os
import signal
import sys
import textwrap
import threading
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from typing import Any, NoReturn, TextIO

# One status per kind of failure, so that scripts can tell them apart. 2 is argparse's own (a
# malformed command line), 130 and 143 the shell's for Ctrl-C and SIGTERM.
EXIT_STATUS = {
    "option": 2,  # an option's value, or a combination of options, is refused
    "checkpoint": 3,  # a checkpoint is missing, unreadable or incomplete
    "architecture": 4,  # the exporter cannot express this architecture
    "vocabulary": 5,  # target and draft do not share a vocabulary
    "difference": 6,  # the exported graph disagrees with the original model
    "bundle": 7,  # a bundle is missing, damaged, or of another version
    "backend": 8,  # the backend is missing, or failed
    "prompt": 9,  # the prompt is empty, too long, or not what the template expects
    "numeric": 10,  # NaN or infinity where probabilities were wanted
    "memory": 11,  # not enough memory
    "disk": 12,  # not enough disk space, or a folder that cannot be written
    "certificate": 13,  # --check found a difference from the target's distribution
    "busy": 14,  # all slots are in use
}
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
OF_ONE = ("prompt", "option", "numeric")  # kinds that a single request may be to blame for


class OutriderError(Exception):
    """A failure with a known cause.

    Args:
        kind: a key of `EXIT_STATUS`.
        cause: one line: what is wrong, naming the thing.
        remedy: one line: what to do about it.
    """

    def __init__(self, kind: str, cause: str, remedy: str):
        super().__init__(f"{kind}: {cause.rstrip('.')}. {remedy.rstrip('.')}.")
        self.kind, self.cause, self.remedy = kind, cause, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles: an exception's own way is to call the class with `args` again."""
        return type(self), (self.kind, self.cause, self.remedy)

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.kind]


def refuse_first(rules: Iterable[tuple[object, str, str]]) -> None:
    """Raises OutriderError "option" for the first (broken, cause, remedy) that is broken."""
    for broken, cause, remedy in rules:
        if broken:
            raise OutriderError("option", cause, remedy)


def out_of_range(name: str, value: object, legal: str) -> OutriderError:
    """Of kind "option"; legal: what the value must be."""
    cause = f"{name}={repr(value)[:80]} is out of range"
    return OutriderError("option", cause, f"{name} must be {legal}.")


def is_whole(value: object) -> bool:
    """Whether it is a whole number, Python's or NumPy's, and not True or False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


# This package, as it is imported: outrider once installed, runtime in a checkout.
PACKAGE = __name__.partition(".")[0]


class CommandParser(ArgumentParser):
    """argparse whose complaints are errors like all others: one line, a remedy, a status. What
    --help says before and after the options stands there as it was written."""

    _given: Sequence[str] = ()

    def __init__(self, **options: Any):
        super().__init__(formatter_class=RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        remedy = f"See {self.prog} --help."
        option = message.removeprefix("argument ").partition(":")[0]
        pairs = zip(self._given, self._given[1:], strict=False)
        dashed = [b for a, b in pairs if a in option.split("/") and b.startswith("-")]
        if "expected one argument" in message and dashed:  # it was taken for the next option
            remedy = f"Write a value that begins with - as {option}={dashed[0]}."
        raise OutriderError("option", message, remedy)


def first_line(error: BaseException) -> str:
    """The first line of a foreign error's message, without its last mark; and the second, where
    the first only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    first, *more = lines or [type(error).__name__]
    text = f"{first} {more[0]}" if more and first.endswith(":") else first
    return textwrap.shorten(text, 200, placeholder=" …").rstrip(".:,")


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """What a host application's own code raises within is a request's failure, of kind "option"."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:
        cause = f"{what} raised {type(error).__name__}: {first_line(error)}"
        raise OutriderError("option", cause, "Mend it, or leave that option out.") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether a foreign library failed for want of memory. They have no class for it."""
    words = ("bad_alloc", "allocate", "out of memory", "failed to map segment")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


class Terminated(BaseException):
    """SIGTERM. Not a KeyboardInterrupt: of a conversation that ends an answer alone."""


class _Interrupts:
    """What Ctrl-C and SIGTERM do to a command: raise KeyboardInterrupt or Terminated, at once or a
    little later.

    Both leave nothing half-written. Native modules make an ImportError of an interrupt during their
    import, or print it and go on; so there it waits.
    """

    held, waiting = False, 0  # the signal

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.held, self.waiting = False, 0
        signal.signal(signal.SIGTERM, self._arrived)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
            signal.signal(signal.SIGINT, self._arrived)

    def _arrived(self, number: int, _: object) -> None:
        if not self.held:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        self.waiting = number

    @contextmanager
    def hold(self) -> Iterator[None]:
        before, self.held = self.held, True
        try:
            yield
        finally:
            self.held = before
            if self.waiting and not before:
                number, self.waiting = self.waiting, 0
                self._arrived(number, None)


_interrupts = _Interrupts()
interrupts_wait = _interrupts.hold  # around imports; does nothing but in a command


@contextmanager
def importing(library: str, remedy: str, name: str | None = None) -> Iterator[None]:
    """Around the import of a library that not everybody has.

    library: as it is imported. remedy: how to install it. name: for people. Raises
    OutriderError("backend"): not installed, or broken.
    """
    name = name or library
    try:
        with interrupts_wait():
            yield
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{library}.".startswith(f"{missing}."):
            raise OutriderError("backend", f"{name} is not installed", remedy) from None
        if out_of_memory(error):
            raise MemoryError from None
        cause = f"{name} is installed and cannot be imported: {first_line(error)}"
        raise OutriderError("backend", cause, "Install it anew, or use another backend.") from None


def run_command(command: Callable[[], int]) -> int:
    """Run a command line's work; every foreseeable failure becomes one line and an exit status."""
    try:
        return _flushed(_run(command))
    except SystemExit as ended:  # argparse's, after --help, --version or a mistake
        status = ended.code if isinstance(ended.code, int) else 0
        raise SystemExit(_flushed(status) or ended.code) from None


def _run(command: Callable[[], int]) -> int:
    try:
        _interrupts.install()
        return command()
    except OutriderError as error:
        show_origin(error)
        failure = error
    except (KeyboardInterrupt, Terminated) as stopped:
        _say("\ninterrupted")
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout)  # whose reader left (`| head`)
        return 0
    except MemoryError:
        failure = OutriderError(
            "memory", "not enough memory", "Use a smaller checkpoint, MAX_LEN or SLOTS."
        )
    except OSError as error:
        if error.errno not in _DISK:
            raise
        name = error.filename2 or error.filename
        where = f" ({name})" if name else ""
        failure = OutriderError("disk", f"{error.strerror}{where}", _DISK[error.errno])
    return _told(failure)


def _told(failure: OutriderError) -> int:
    _say("error: " + " ".join(str(failure).splitlines()))  # names of files may have several
    return failure.exit_status


def _flushed(status: int) -> int:
    """The status, once what print left in stdout's buffer is written; a full disk's in place of 0.
    When the interpreter exits, it would be two lines of its own and status 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        if not status:
            return _told(OutriderError("disk", f"stdout: {error.strerror}", "Free some space."))
    except (ValueError, AttributeError):
        pass  # closed, or nothing that has a buffer
    return status


def discard(stream: TextIO) -> None:
    """What is buffered would fail again when the interpreter exits, with a traceback."""
    with suppress(AttributeError, OSError, ValueError):  # nothing with a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_origin(error: BaseException, *, always: bool = False) -> None:
    """Print the tracebacks of an error and of all that led to it, first things first; also of what
    `from None` keeps from a user. always: also where OUTRIDER_TRACEBACK is not set."""
    if not always and not os.environ.get("OUTRIDER_TRACEBACK"):
        return
    import traceback

    led_to: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in led_to:
        led_to.append(found)
        found = found.__cause__ or found.__context__
    for each in reversed(led_to):
        _say("".join(traceback.format_exception(each, chain=False)))


def _say(line: str) -> None:
    if sys.stderr is not None:  # closed (`2>&-`), print would fall back to stdout
        print(line, file=sys.stderr)


_DISK = {
    errno.ENOSPC: "Free some space, or write to another disk.",
    errno.EDQUOT: "Free some of your quota, or write to another disk.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or write to another disk.",
    errno.ENOTDIR: "Choose another folder: a file has that name.",
    errno.EEXIST: "Choose another folder: a file has that name.",
    errno.EACCES: "Choose a folder that you may write to.",
    errno.EPERM: "Choose a folder that you may write to.",
    errno.EROFS: "Choose a folder that you may write to.",
    errno.ENOENT: "Choose a folder that can be made.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ELOOP: "Choose a path without a loop of links.",
}
