"""Linux system interfaces: confined lookups, sparse files, mounts, memory, signals, processes.

This package knows the system calls, but no stores, keys or documents.
"""
