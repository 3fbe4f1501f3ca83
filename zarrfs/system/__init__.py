"""What Linux offers: files below a directory, locks, sparse files, mounts, memory, signals, processes.

Knows the system calls and nothing of stores, keys or documents.
"""
