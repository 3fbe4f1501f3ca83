"""Sources of a batch job: staged on its node, used, unstaged, and its changes saved.

stagein.py mounts or copies them; keeper.py waits for the end of the processes that use them, and then runs `zarrfs
unstage` (unstage.py), as the epilogs of scripts/ do; stageout.py saves changes. Knows mounts, copies and archives, and
what Slurm and Flux tell of jobs. Knows no command line.
"""
