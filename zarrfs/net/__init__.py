"""Requests to servers: HTTP, object stores, every protocol of fsspec, zip members; and what a source may reach.

request_queue.py queues requests by server and repeats those that fail (503, cut connections); outages.py has servers
that are gone; web.py and connections.py are HTTP, obstores.py buckets, bridge.py fsspec; reach.py says which server a
source may contact. Knows URLs and byte ranges. Knows neither caches nor keys.
"""
