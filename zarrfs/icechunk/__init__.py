"""Compiler of Icechunk repositories of format 1 and 2 (branches, tags, snapshots and manifests) to an index.

This package knows the format and the index. It knows neither mounts nor how a source is detected, and does not use the
package icechunk.
"""
