"""The life of a mount: start, readiness, signals, refresh, changed settings, end."""
