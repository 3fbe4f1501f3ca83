"""File archives, written: what `zarrfs archive create`, `zarrfs commit` and `zarrfs stage-out` share."""
