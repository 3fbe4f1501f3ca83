"""The program zarrfs, also run as python -m zarrfs."""

import signal


def program() -> None:
    """Run zarrfs. Ctrl-C ends it at once, except within system.signals.orderly_end()."""
    if callable(signal.getsignal(signal.SIGINT)):
        # a handler of Python waits for system calls, such as a read from a dead file server
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zarrfs.system.processes import use_utf8

    use_utf8()
    from zarrfs.cli import main

    main(prog_name="zarrfs")


if __name__ == "__main__":
    program()
