"""The FUSE side: requests of the kernel become calls on a Store, read-only or with an upper directory.

operations.py handles reads and listings, writable.py handles changes. worker.py and workerloop.py let several
processes, which daemon/workers.py starts, answer one mount. This package must not know where bytes come from, nor how
the daemon starts and ends.
"""
