"""Icechunk repositories of format 1 and 2: branches, tags, snapshots and manifests, compiled to an index.

Knows the format and the index. Knows neither mounts nor how a source is detected, and needs no icechunk package.
"""
