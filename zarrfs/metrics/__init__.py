"""The log, the counters of a mount, and how both leave the process.

Lies below whatever it observes: it knows no store and no mount.
"""
