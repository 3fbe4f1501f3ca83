"""python -m zarrfs: the same as the program zarrfs."""

from zarrfs.cli import main

if __name__ == "__main__":
    main(prog_name="zarrfs")
