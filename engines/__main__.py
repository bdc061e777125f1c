"""python -m engines: build a bundle for one backend from a folder of graphs."""

from __future__ import annotations

from runtime.files.errors import defer_interrupts, run_command


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def command() -> int:
        with defer_interrupts():
            from .command import run  # imported here so that Ctrl-C ends it with one line
        return run(argv)

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
