"""The FUSE side: requests of the kernel become calls on a Store, read-only or with an upper directory.

operations.py reads and lists; writable.py writes; worker.py and workerloop.py answer one mount with several processes,
which daemon/workers.py starts. Must not know where bytes come from, nor how the daemon starts and ends.
"""
