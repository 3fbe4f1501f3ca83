"""Options of a line in fstab that a remount finds unchanged, and changes that it refuses."""

from __future__ import annotations

import pytest

from zarrfs.config.options import parse
from zarrfs.daemon.live_options import changed
from zarrfs.errors import UsageError
from zarrfs.sources import absolute_options


@pytest.mark.parametrize(
    ("line", "another"),
    [
        (["base=/data/"], "base=/other"),
        (["base=file:///data/sets"], "base=https://example.org/sets"),
        (["blobs=/srv//blobs", "blobs=file:///srv/more/"], "blobs=/srv/others"),
        (["index_dir=/var//indexes/"], "index_dir=/var"),
        (["log_file=/var/log/../log/zarrfs"], "log_file=/var/log/other"),
        (["pid_file=//run/./zarrfs"], "pid_file=/run/other"),
        (
            ['storage_options={"s3": {"anon": true}}', 'storage_options={"gs": {"token": "anon"}}'],
            'storage_options={"s3": {"anon": false}}',
        ),
    ],
)
def test_a_remount_with_the_same_line_changes_nothing(line: list[str], another: str) -> None:
    mounted = absolute_options(parse(line).options)
    assert changed(mounted, line) == {}
    with pytest.raises(UsageError, match=f"option {another.partition('=')[0]}: cannot change while mounted"):
        changed(mounted, [another])
