"""The log and the counters of a mount, and how both leave the process.

Lies below everything that it observes: it knows no store and no mount.
"""
