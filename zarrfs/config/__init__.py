"""Options: their one table, the parsers of their values, zarrfs.toml, and the precedence of files and command line.

Pure values, no I/O but reading the configuration. Knows nothing of stores, mounts or servers.
"""
