"""Operations on a whole Store: copy it into a directory, check it, compare it, or commit it as a new source.

Depends on Store and Value, not on mounts or jobs.
"""
