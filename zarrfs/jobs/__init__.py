"""Sources of a batch job: stage them on the node of the job, unstage them, and save the changes that the job made.

stagein.py mounts a source, staged_copy.py copies it; keeper.py waits until the processes that use it have ended, and
then runs `zarrfs unstage` (unstage.py), as the epilogs in scripts/ do; stageout.py and upload.py save changes. Depends
on mounts, copies and archives, and on the job information of Slurm and Flux, but not on the command line.
"""
