"""Requests to servers (HTTP, object stores, all protocols of fsspec), zip members, and rules for what may be reached.

request_queue.py queues requests by server, repeats those that fail (503, cut connections), and waits for servers that
do not answer. web.py and connections.py implement HTTP, buckets.py and services.py serve buckets, threads.py calls
fsspec, and reach.py decides which servers a source may contact. Knows URLs and byte ranges, but neither caches nor
keys.
"""
