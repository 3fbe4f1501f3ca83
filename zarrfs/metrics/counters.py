"""The table of a mount's counters: the name for Prometheus, path in user.zarrfs.stats and help text of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


def value_at(counters: dict[str, Any], path: Iterable[str]) -> float | None:
    """Return the counter at this path of nested dicts; None if there is no number."""
    found: Any = counters
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int | float) else None


class Metric(NamedTuple):
    """A metric and the path of its value. If its name ends in _total, it is a counter, which never decreases."""

    name: str
    path: tuple[str, ...]
    help: str


_CACHE, _DISK, _PREFETCH = ("remote", "cache"), ("remote", "disk"), ("remote", "prefetch")
_PROCESS = ("process",)

METRICS = (
    Metric("zarrfs_lookups_total", ("lookup",), "Names that the kernel looked up."),
    Metric("zarrfs_readdirs_total", ("readdir",), "Pieces of directory listings that were sent to the kernel."),
    Metric("zarrfs_opens_total", ("open",), "Files that were opened."),
    Metric("zarrfs_reads_total", ("read",), "Reads that were answered."),
    Metric("zarrfs_read_bytes_total", ("bytes",), "Bytes served to the kernel."),
    Metric("zarrfs_log_lines_lost_total", ("log", "lost"), "Lines of the log that could not be written."),
    Metric("zarrfs_log_lines_waiting", ("log", "waiting"), "Lines of the log that are not written yet."),
    Metric("zarrfs_inodes", ("inodes",), "Files and directories that the kernel knows."),
    Metric("zarrfs_open_files", ("open_files",), "Files and directories that are open."),
    Metric("zarrfs_process_cpu_seconds_total", (*_PROCESS, "cpu_seconds"), "Processor time of the daemon."),
    Metric("zarrfs_process_start_time_seconds", (*_PROCESS, "started"), "When the daemon began, since 1970."),
    Metric("zarrfs_process_resident_memory_bytes", (*_PROCESS, "resident"), "Memory that the daemon has."),
    Metric("zarrfs_process_virtual_memory_bytes", (*_PROCESS, "virtual"), "Addresses that the daemon has."),
    Metric("zarrfs_process_open_fds", (*_PROCESS, "descriptors"), "Descriptors that the daemon has open."),
    Metric("zarrfs_process_max_fds", (*_PROCESS, "descriptors_limit"), "Descriptors that it may have open."),
    Metric("zarrfs_requests_total", ("remote", "requests"), "Requests to servers, repetitions included."),
    Metric("zarrfs_requests_repeated_total", ("remote", "repeated"), "Requests that repeated a failed one."),
    Metric("zarrfs_requests_failed_total", ("remote", "failed"), "Requests that failed, after all retries."),
    Metric("zarrfs_outages_total", ("remote", "outages"), "Outages of servers that lasted for a second or longer."),
    Metric("zarrfs_ranges_merged_total", ("remote", "merged"), "Ranges that were coalesced with another one."),
    Metric("zarrfs_network_bytes_total", ("remote", "bytes"), "Bytes fetched from servers."),
    Metric("zarrfs_requests_in_flight", ("remote", "in_flight"), "Requests that wait for their answer."),
    Metric("zarrfs_in_flight_bytes", ("remote", "in_flight_bytes"), "Bytes requested that have not arrived yet."),
    Metric("zarrfs_requests_waiting", ("remote", "waiting"), "Requests that wait to be sent."),
    Metric("zarrfs_memory_hits_total", (*_CACHE, "hits"), "Blocks that were in memory."),
    Metric("zarrfs_memory_misses_total", (*_CACHE, "misses"), "Blocks that were not in memory."),
    Metric("zarrfs_memory_joins_total", (*_CACHE, "joins"), "Blocks that were on their way already."),
    Metric("zarrfs_memory_hit_bytes_total", (*_CACHE, "hit_bytes"), "Bytes read out of blocks that were in memory."),
    Metric("zarrfs_memory_blocks", (*_CACHE, "blocks"), "Blocks in memory."),
    Metric("zarrfs_memory_kept_bytes", (*_CACHE, "kept"), "Bytes of blocks in memory."),
    Metric("zarrfs_memory_expected_bytes", (*_CACHE, "expected"), "Bytes in memory that are set aside for blocks."),
    Metric("zarrfs_memory_limit_bytes", (*_CACHE, "limit"), "Bytes of blocks that memory may hold."),
    Metric("zarrfs_disk_hits_total", (*_DISK, "hits"), "Blocks that were in cache_dir."),
    Metric("zarrfs_disk_misses_total", (*_DISK, "misses"), "Blocks that were not in cache_dir."),
    Metric("zarrfs_disk_read_bytes_total", (*_DISK, "bytes_read"), "Bytes read from cache_dir."),
    Metric("zarrfs_disk_writes_total", (*_DISK, "writes"), "Blocks written to cache_dir."),
    Metric("zarrfs_disk_written_bytes_total", (*_DISK, "bytes_written"), "Bytes written to cache_dir."),
    Metric("zarrfs_disk_dropped_total", (*_DISK, "dropped"), "Blocks that were not written to cache_dir."),
    Metric("zarrfs_disk_errors_total", (*_DISK, "errors"), "Failures of cache_dir."),
    Metric("zarrfs_disk_evicted_total", (*_DISK, "evicted"), "Files removed from cache_dir to make room for blocks."),
    Metric("zarrfs_prefetch_started_total", (*_PREFETCH, "started"), "Blocks that were fetched ahead."),
    Metric("zarrfs_prefetch_used_total", (*_PREFETCH, "used"), "Blocks fetched ahead that were read."),
    Metric("zarrfs_prefetch_dropped_total", (*_PREFETCH, "dropped"), "Blocks fetched ahead and never read."),
    Metric("zarrfs_local_opens_total", ("local", "opens"), "Local targets that were opened."),
    Metric("zarrfs_local_reads_total", ("local", "reads"), "Reads of local targets."),
    Metric("zarrfs_local_open_files", ("local", "open"), "Local targets that are held open."),
    Metric("zarrfs_blob_reads_total", ("blob_reads",), "Reads of blobs."),
    Metric("zarrfs_blobs_verified_total", ("blobs_verified",), "Blobs that were compared with their hash."),
    Metric("zarrfs_blob_verified_bytes_total", ("blob_bytes_verified",), "Bytes that were hashed for that."),
    Metric("zarrfs_blobs_held", ("blobs_held",), "Blobs in memory."),
    Metric("zarrfs_blob_held_bytes", ("blob_bytes_held",), "Bytes of blobs in memory."),
    Metric("zarrfs_record_files_total", ("record_files",), "Record files of a Parquet set that were read."),
    Metric("zarrfs_chunks_decoded_total", ("arrays", "decoded"), "Chunks decoded, with a view."),
    Metric("zarrfs_decoded_hits_total", ("arrays", "hits"), "Uses of chunks that were cached decoded."),
    Metric("zarrfs_decoded_kept_bytes", ("arrays", "kept"), "Bytes of decoded chunks in memory."),
    Metric("zarrfs_decoded_limit_bytes", ("arrays", "budget"), "Bytes of decoded chunks to keep at most."),
)
HOST_METRICS = (
    Metric("zarrfs_host_requests_total", ("requests",), "Requests to one server."),
    Metric("zarrfs_host_requests_in_flight", ("in_flight",), "Requests to one server that wait for their answer."),
    Metric("zarrfs_host_outage_seconds", ("outage", "seconds"), "For how long a server has been out."),
    Metric("zarrfs_host_outage_waiting", ("outage", "waiting"), "Requests of readers that wait for such a server."),
)
# the values at these paths are dicts by kind of blob source: url, flux
PLACE_METRICS = (
    Metric("zarrfs_blobs_fetched_total", ("blobs_fetched",), "Blobs fetched, by kind of place; not of directories."),
    Metric("zarrfs_blob_fetched_bytes_total", ("blob_bytes_fetched",), "Bytes of them."),
)
# the value at this path is a dict by the name of the errno
ERROR_METRICS = (Metric("zarrfs_errors_total", ("errors",), "Requests of the kernel that failed, by their errno."),)
LATENCY, LATENCY_HELP = "zarrfs_request_duration_seconds", "How long requests took, each repetition by itself."
# always 1, because the information is in the labels
BUILD, BUILD_HELP = "zarrfs_build_info", "The version of the daemon; always 1."
MOUNT, MOUNT_HELP = "zarrfs_mount_info", "The kind of the source; always 1."
UP, UP_HELP = "zarrfs_up", "Whether the mount reports its counters."

TEXTS = {
    **{metric.name: metric.help for metric in (*METRICS, *ERROR_METRICS, *HOST_METRICS, *PLACE_METRICS)},
    LATENCY: f"{LATENCY_HELP} A histogram.",
    BUILD: BUILD_HELP, MOUNT: MOUNT_HELP, UP: UP_HELP,
}  # fmt: skip
