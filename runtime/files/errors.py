"""Errors as the user sees them: one line of cause, one line of remedy, an exit status."""

from __future__ import annotations

import errno
import os
import signal
import sys
import textwrap
import threading
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from threading import current_thread, main_thread
from typing import Any, NoReturn, TextIO

# One status per kind of failure, so that scripts can tell them apart. 2 is also argparse's own (a
# malformed command line); 130 and 143 are the shell's for Ctrl-C and SIGTERM.
EXIT_STATUS = {
    "option": 2,  # an option's value, or a combination of options, is refused
    "checkpoint": 3,  # a checkpoint is missing, unreadable or incomplete
    "architecture": 4,  # the exporter cannot express this architecture
    "vocabulary": 5,  # target and draft do not share a vocabulary
    "difference": 6,  # the exported graph disagrees with the original model
    "bundle": 7,  # a bundle is missing, damaged, or of another version
    "backend": 8,  # the backend is missing, or failed
    "prompt": 9,  # the prompt is empty, too long, or not what the template expects
    "numeric": 10,  # NaN or infinity where probabilities were expected
    "memory": 11,  # not enough memory
    "disk": 12,  # not enough disk space, or a folder that cannot be written
    "certificate": 13,  # --check found a difference from the target's distribution
    "busy": 14,  # all slots are in use
}
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
PER_REQUEST_KINDS = ("prompt", "option", "numeric")  # kinds that a single request may cause


class OutriderError(Exception):
    """A failure with a known cause.

    Args:
        kind: a key of `EXIT_STATUS`.
        cause: what is wrong with what, in one line.
        remedy: what to do about it, in one line.
    """

    def __init__(self, kind: str, cause: str, remedy: str):
        super().__init__(f"{kind}: {cause.rstrip('.')}. {remedy.rstrip('.')}.")
        self.kind, self.cause, self.remedy = kind, cause, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """For copying and pickling, which by default would call the class with `args`."""
        return type(self), (self.kind, self.cause, self.remedy)

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.kind]


def refuse_first(rules: Iterable[tuple[object, str, str]], kind: str = "option") -> None:
    """Raise an OutriderError for the first (broken, cause, remedy) that is broken."""
    for broken, cause, remedy in rules:
        if broken:
            raise OutriderError(kind, cause, remedy)


def check_stdout() -> None:
    """Raise OutriderError "disk" if stdout is closed (`>&-`)."""
    refuse_first(
        [(sys.stdout is None, "stdout is closed", "Redirect it to a file or a pipe.")], "disk"
    )


def is_whole(value: object) -> bool:
    """Whether the value is an integer, Python's or NumPy's, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether the value is a real number, Python's or NumPy's, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def own_number(value: Any) -> Any:
    """Python's own number for a real number, as NumPy's may overflow; any other value itself."""
    return int(value) if is_whole(value) else float(value) if is_number(value) else value


def is_text(value: object) -> bool:
    return isinstance(value, str)


# What an option's value must be: a test, and its name.
Kind = tuple[Callable[[Any], bool], str]
ValueRule = tuple[Kind] | tuple[Kind, Callable[[Any], bool], str]  # `check_value`'s last arguments
INTEGER: Kind = is_whole, "an integer"
NUMBER: Kind = is_number, "a number"
STRING: Kind = is_text, "a string"
PATH: Kind = (lambda value: isinstance(value, str | os.PathLike)), "a path"
# By its name: NumPy is not imported here.
FLAG: Kind = (lambda value: type(value).__name__ in ("bool", "bool_")), "True or False"


def one_of(*names: str) -> Kind:
    """The kind of an option with these values."""
    return lambda x: isinstance(x, str) and x in names, f"{', '.join(names[:-1])} or {names[-1]}"


def shown_value(value: object) -> str:
    """The value for a message of one line."""
    return " ".join(repr(value).split())[:80]


def check_value(
    name: str, value: object, kind: Kind, fits: Callable[[Any], bool] | None = None, legal: str = ""
) -> Any:
    """The value of an option, a number as Python's own. Raises OutriderError "option" for a value
    of another kind, or a number out of range.

    fits: whether it is in the range, None if there is none. legal: what the range is.
    """
    is_kind, noun = kind
    if right := is_kind(value):
        own = own_number(value)
        if fits is None or fits(own):
            return own
    shown = f"{name}={shown_value(value)}"
    if right:
        raise OutriderError("option", f"{shown} is out of range", f"{name} must be {legal}.")
    cause = f"{shown} ({type(value).__name__}) is not {noun}"
    raise OutriderError("option", cause, f"Give {noun}, or leave {name} out.")


# The name under which this package is imported: outrider if installed, runtime in a checkout.
PACKAGE = __name__.partition(".")[0]


def positive_int(text: str) -> int:
    """Parse an option's value, an integer above 0."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return value


class CommandParser(ArgumentParser):
    """An ArgumentParser that raises its errors as OutriderError, with a remedy. The description and
    epilog of --help are not rewrapped."""

    _arguments: Sequence[str] = ()

    def __init__(self, **options: Any):
        super().__init__(formatter_class=RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._arguments = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        remedy = f"See {self.prog} --help."
        option = message.removeprefix("argument ").partition(":")[0]
        pairs = zip(self._arguments, self._arguments[1:], strict=False)
        dashed = [b for a, b in pairs if a in option.split("/") and b.startswith("-")]
        if "expected one argument" in message and dashed:  # argparse takes it for an option
            remedy = f"Write a value that begins with - as {option}={dashed[0]}."
        raise OutriderError("option", message, remedy)


def first_line(error: BaseException) -> str:
    """The first line of a third-party error's message, without final punctuation; with the second
    line if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    first, *more = lines or [type(error).__name__]
    text = f"{first} {more[0]}" if more and first.endswith(":") else first
    return textwrap.shorten(text, 200, placeholder=" …").rstrip(".:,")


@contextmanager
def convert_errors(kind: str, what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises in the block into an OutriderError: `what`, and the library's
    reason. OutriderErrors and a lack of memory pass."""
    try:
        yield
    except (OutriderError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - libraries raise anything
        raise OutriderError(kind, f"{what}: {first_line(error)}", remedy) from None


@contextmanager
def attribute_errors_to(what: str) -> Iterator[None]:
    """Turn errors of a host application's own code into OutriderError "option". what: the code that
    is to blame."""
    try:
        yield
    except OutriderError:
        raise
    except (Exception, SystemExit) as error:
        # An exit in a thread may be another request's; in the main one, a signal handler's.
        if isinstance(error, SystemExit) and current_thread() is main_thread():
            raise
        cause = f"{what} raised {type(error).__name__}: {first_line(error)}"
        raise OutriderError("option", cause, "Fix it, or leave that option out.") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a third-party library ran out of memory, for which they have no exception class."""
    words = ("bad_alloc", "allocate", "out of memory", "failed to map segment")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


class Terminated(BaseException):
    """SIGTERM. Not a KeyboardInterrupt, which in a conversation only ends the answer."""


class _Interrupts:
    """Handles Ctrl-C and SIGTERM in a command: raises KeyboardInterrupt or Terminated, at once or
    at the end of `hold`.

    Both leave nothing half-written. Signals are held during imports, because native modules turn an
    interrupt into an ImportError, or print it and continue.
    """

    # pending: the number of a signal that arrived while held; raised: of the last one that was not.
    held, pending, raised = False, 0, 0

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.held, self.pending, self.raised = False, 0, 0
        signal.signal(signal.SIGTERM, self._handle_signal)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
            signal.signal(signal.SIGINT, self._handle_signal)

    def _handle_signal(self, number: int, _: object) -> None:
        if not self.held:
            self.raised = number
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        self.pending = number

    def raise_again(self) -> None:
        """Raise the interrupt that was raised before, if any: native code may have turned it into
        another error."""
        if self.raised:
            self._handle_signal(self.raised, None)

    @contextmanager
    def hold(self) -> Iterator[None]:
        before, self.held = self.held, True
        try:
            yield
        finally:
            self.held = before
            if self.pending and not before:
                number, self.pending = self.pending, 0
                self._handle_signal(number, None)


_interrupts = _Interrupts()
defer_interrupts = _interrupts.hold  # used around imports; has an effect only in a command
raise_interrupt_again = _interrupts.raise_again


@contextmanager
def importing(library: str, remedy: str, name: str | None = None) -> Iterator[None]:
    """Import an optional library in the block.

    library: its import name. remedy: how to install it. name: its name in messages. Raises
    OutriderError("backend") if it is not installed, or broken.
    """
    name = name or library
    try:
        with defer_interrupts():
            yield
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{library}.".startswith(f"{missing}."):
            raise OutriderError("backend", f"{name} is not installed", remedy) from None
        if is_out_of_memory(error):
            raise MemoryError from None
        cause = f"{name} is installed but cannot be imported: {first_line(error)}"
        raise OutriderError("backend", cause, "Reinstall it, or use another backend.") from None


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; every foreseeable failure prints one line."""
    try:
        return _flush_stdout(_run(command))
    except SystemExit as ended:  # argparse's, after --help, --version or a mistake
        status = ended.code if isinstance(ended.code, int) else 0
        raise SystemExit(_flush_stdout(status) or ended.code) from None
    finally:
        _interrupts.raised = 0  # what this process does next was not interrupted


def _run(command: Callable[[], int]) -> int:
    try:
        _interrupts.install()
        return command()
    except OutriderError as error:
        print_tracebacks(error)
        failure = error
    except (KeyboardInterrupt, Terminated) as stopped:
        _print_stderr("\ninterrupted")
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout)  # its reader has exited (`| head`)
        return 0
    except MemoryError:
        failure = OutriderError(
            "memory", "not enough memory", "Use a smaller checkpoint, MAX_LEN or SLOTS."
        )
    except ModuleNotFoundError as error:
        print_tracebacks(error)
        remedy = "Install it; in a checkout, source .venv/bin/activate, which make demo creates."
        failure = OutriderError("backend", f"{error.name or error} is not installed", remedy)
    except OSError as error:
        if error.errno not in _DISK_REMEDIES:
            raise
        name = error.filename2 or error.filename
        where = f" ({name})" if name else ""
        failure = OutriderError("disk", f"{error.strerror}{where}", _DISK_REMEDIES[error.errno])
    return _report_failure(failure)


def _report_failure(failure: OutriderError) -> int:
    line = " ".join(str(failure).splitlines())  # file names may contain newlines
    _print_stderr(f"error: {line}")
    return failure.exit_status


def _flush_stdout(status: int) -> int:
    """Flush stdout and return the status, or that of "disk" instead of 0 if the disk is full. If
    the interpreter did it on exit, it would print two lines of its own and exit with 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        if not status:
            return _report_failure(
                OutriderError("disk", f"stdout: {error.strerror}", "Free some space.")
            )
    except (ValueError, AttributeError):
        pass  # closed, or without a buffer
    return status


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: its buffered data would fail again, with a traceback, when
    the interpreter exits."""
    with suppress(AttributeError, OSError, ValueError):  # it has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_tracebacks(error: BaseException, *, always: bool = False) -> None:
    """Print the tracebacks of an error and of those that led to it, oldest first, including those
    that `from None` hides. always: also if OUTRIDER_TRACEBACK is not set."""
    if not always and not os.environ.get("OUTRIDER_TRACEBACK"):
        return
    import traceback

    led_to: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in led_to:
        led_to.append(found)
        found = found.__cause__ or found.__context__
    for each in reversed(led_to):
        _print_stderr("".join(traceback.format_exception(each, chain=False)))


def _print_stderr(line: str) -> None:
    if sys.stderr is not None:  # closed (`2>&-`), print would fall back to stdout
        print(line, file=sys.stderr)


_DISK_REMEDIES = {
    errno.ENOSPC: "Free some space, or write to another disk.",
    errno.EDQUOT: "Free some of your quota, or write to another disk.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or write to another disk.",
    errno.ENOTDIR: "Choose another folder: this is the name of a file.",
    errno.EEXIST: "Choose another folder: this is the name of a file.",
    errno.EACCES: "Choose a folder that you may write to.",
    errno.EPERM: "Choose a folder that you may write to.",
    errno.EROFS: "Choose a folder that you may write to.",
    errno.ENOENT: "Choose a folder that can be created.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ELOOP: "Choose a path without a loop of symbolic links.",
}
