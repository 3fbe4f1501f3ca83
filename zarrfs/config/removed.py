"""Options and commands of version 0.1 that no longer exist, and what to do instead.

The error for such a name says so. This table can go in a later version.
"""

from __future__ import annotations

from collections.abc import Mapping

# the name, with "_", and what to do instead, without a full stop: "set cache_dir= and read the keys once"
OPTIONS: Mapping[str, str] = {
    "array_cache": "a view keeps up to 256 MiB of decoded chunks",
    "arrays": "view=arrays shows NAME.npy; its items begin after a header, which is 128 bytes for most arrays",
    "ca_bundle": "set SSL_CERT_FILE in the environment",
    "compat": "a file of an archive whose size is larger than its data cannot be read",
    "document_limit": "documents may have up to 4 GiB",
    "index_dir": "compiled documents are in the user's cache directory: set XDG_CACHE_HOME",
    "missing_records": "`zarrfs check` counts missing record files; their chunks are absent, as for fsspec",
    "log_format": "lines of the log are text",
    "metrics": "`zarrfs stats --prometheus` prints all mounts, for the textfile collector",
    "cache": "leave cache_dir= out: then nothing but the indexes of documents is kept, in XDG_CACHE_HOME",
    "cache_min_free": "1GiB of the disk of cache_dir= stays free, or a tenth of a small one",
    "coalesce_gap": "ranges with at most 32KiB between them are fetched in one request",
    "coalesce_size": "neighbouring ranges are fetched in requests of up to 4MiB",
    "part_size": "values larger than 4MiB are fetched in parallel parts of that size",
    "request_timeout": "set read_timeout=: one request may take a fifth of it",
    "client": "leave it out; zarrfs reads buckets by itself",
    "cache_validity": "a server is asked after an hour whether a file has changed, or by `zarrfs refresh --force`",
    "host_bytes": "set host_requests= to bound what one server sends",
    "stale": "reading a target that has changed fails; `zarrfs refresh`, or another mount, shows its new content",
    "gen_limit": "a set expands to 50 million entries at most; write larger ones without gen, or as Parquet",
    "conflict": "where a key is a file and a directory, the directory is shown and the file is left out",
    "netcdf": "view=netcdf shows one file with all groups",
    "grid": "a listing shows the chunks that the server has, with one request for each",
    "links": "read-only Zarr stores and views follow symbolic links, other directories show them",
    "record": "nothing is recorded; set cache_dir= and read the keys once",
    "transcode": "an array whose chunks readers cannot decode is left out of view=v2 and v3; view=arrays shows it",
    "storage_options": "write -o s3.anon=true, or a section [storage.s3] in zarrfs.toml",
    "strict": "a bad entry fails when it is read, and `zarrfs check` lists all of them",
    "warm": "set cache_dir= and read the keys once",
    "workers": "chunks are decoded by threads of one process; for more, let several mounts share one cache_dir=",
    "auto_unmount": "leave it out; a dead mount is an error to its readers, and mounting again replaces it",
    "dir_mode": "umask= removes permission bits",
    "dmask": "umask= removes permission bits",
    "entry_timeout": "attr_timeout= is for names, too",
    "file_mode": "umask= removes permission bits",
    "fmask": "umask= removes permission bits",
    "idle_timeout": "use autofs or x-systemd.automount, which unmount what is not used",
    "mount_timeout": "leave it out; a mount waits for up to 5 minutes",
    "negative_timeout": "leave it out; the kernel remembers absent names for a second",
    "nice": "start zarrfs with nice(1)",
    "notify_pipe": "zarrfs mount returns when the mount answers",
    "on_exit": "leave it out; on SIGTERM a mount in use stays and the log names its users",
    "pid_file": "pgrep -f, or systemctl show -p MainPID, has the daemon",
    "read_ahead": "leave it out; write /sys/class/bdi/MAJOR:MINOR/read_ahead_kb as root",
    "remount": "unmount and mount again",
}
# a command, or an option of a command, as typed: "refs merge", "check --merge"
COMMANDS: Mapping[str, str] = {
    "check --merge": "each share writes a report of its own",
    "check --report": "redirect the output of --json",
    "check --twice": "check once; reads compare the versions of a target",
    "commit --record-size": "write JSON, or Parquet with kerchunk",
    "completion": "click makes the script: _ZARRFS_COMPLETE=bash_source zarrfs",
    "config": "zarrfs mount -d logs each option and where it is set",
    "discard": "unmount, and remove the upper directory: rm -r",
    "top": "use `zarrfs stats --every 2s MNT`",
    "tree": "use `zarrfs ls -R`",
    "archive extract": "use `zarrfs copy ARCHIVE DIR`",
    "archive list": "use `zarrfs ls -lR`",
    "archive verify": "use `zarrfs check`",
    "archive create -o": "options of mounts have no effect there: set -O FILE, --blobs DIR or -q",
    "archive diff": "copy the archive, and compare the directories: diff -r",
    "refs": "kerchunk and VirtualiZarr make, convert and merge reference sets; `zarrfs check` lists bad entries",
    "refresh --set": "unmount, and mount again with the new options",
    "doctor --json": "its lines are for people; with a source, use `zarrfs check SOURCE`",
    "doctor --timeout": "doctor opens no source: use `zarrfs check SOURCE`",
    "index": "the first mount or command compiles a document; its index is in the cache of the user",
    "cache": "a cache directory may be removed at any time (rm -r), and keeps to cache_size= by itself",
    "warm": "mount with cache_dir= and read the keys once",
    "stage": "use `zarrfs mount -o hold`, `zarrfs run`, or `zarrfs copy` for files on a disk",
    "unstage": "use `zarrfs umount MNT` or `zarrfs umount --below DIR`, and rm -r for copies",
    "stage-out": "copy the files of the upper directory, with rclone to a URL, or use `zarrfs commit`",
}


def removed_option(name: str) -> str:
    """Return the error message for a removed option; "" for any other name."""
    return f"option {name} was removed: {OPTIONS[name]}" if name in OPTIONS else ""


def removed_command(name: str) -> str:
    """Return the error message for a removed command; "" for any other name."""
    return f"`zarrfs {name}` was removed: {COMMANDS[name]}" if name in COMMANDS else ""
