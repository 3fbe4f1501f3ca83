"""Sources of a batch job: staged on its node, used, unstaged, and its changes saved.

Knows mounts, copies and archives, and what Slurm and Flux tell of jobs. Knows no command line.
"""
