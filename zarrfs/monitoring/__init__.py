"""What is told of a running mount: its log, its counters, its memory and its tasks."""
