"""Options: their one table, the parsers of their values, zarrfs.toml, and the precedence of files and command line.

The only I/O is reading configuration files and files that options name. Knows nothing of stores, mounts or servers.
"""
