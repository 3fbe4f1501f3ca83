"""Linux system interfaces: confined lookups, sparse files, mounts, memory, signals, processes.

Knows the system calls and nothing of stores, keys or documents.
"""
