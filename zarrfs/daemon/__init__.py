"""The life of a mount: start, readiness, signals, refresh, changes of its options, end.

Knows which store it serves only by its abstract class; what a file operation does is in fuse/.
"""
