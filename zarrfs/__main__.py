"""The program zarrfs, also run as python -m zarrfs."""

import os


def program() -> None:
    """Run zarrfs. Ctrl-C while its modules are imported ends it with status 130, without a traceback."""
    try:
        from zarrfs.system.processes import use_utf8

        use_utf8()
        from zarrfs.cli import main

        main(prog_name="zarrfs")
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    program()
