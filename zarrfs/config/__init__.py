"""Options: one table of them, the parsers of their values, zarrfs.toml, and which place wins.

Pure values, no I/O but reading the configuration. Knows nothing of stores, mounts or servers.
"""
