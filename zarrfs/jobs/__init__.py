"""Sources at a job: staged on its node, used, taken away, and what the job wrote kept."""
