"""The FUSE side: requests of the kernel become calls on a Store, read-only or with an upper directory.

operations.py handles reads and listings, writable.py handles changes. This package must not know where bytes come
from, nor how the daemon starts and ends.
"""
