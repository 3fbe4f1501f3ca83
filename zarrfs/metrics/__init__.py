"""The log and the counters of a mount, and their export: to files, the journal, syslog, or Prometheus.

This package is below everything that it observes: it imports neither stores nor the FUSE daemon.
"""
