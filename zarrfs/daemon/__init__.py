"""The life of a mount: start, readiness, signals, refresh, changes of its options, end.

It knows the store that it serves only by its abstract class. File operations are in fuse/.
"""
