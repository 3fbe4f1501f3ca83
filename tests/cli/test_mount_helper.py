"""mount.zarrfs: the options that mount(8) adds."""

from __future__ import annotations

import pytest

from zarrfs.cli import mount_helper
from zarrfs.config.options import Parsed


@pytest.mark.parametrize(
    ("typed", "read_only"), [([], True), (["noatime"], True), (["rw"], False), (None, False)], ids=str
)
def test_an_rw_added_by_mount_8_does_not_override_ro_in_the_configuration(
    typed: list[str] | None, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mount(8) adds rw whenever ro is absent. `typed`: options given to mount(8), None for another caller."""
    mounted: list[Parsed] = []
    monkeypatch.setenv("ZARRFS_RO", "true")
    monkeypatch.setattr(mount_helper, "_typed_to_mount", lambda: typed)
    monkeypatch.setattr(mount_helper, "_mount", lambda source, place, parsed, verbose: mounted.append(parsed))
    assert mount_helper.main(["set", "/mnt", "-o", "rw,noatime"]) == 0
    assert [parsed.options.ro for parsed in mounted] == [read_only]
    assert mounted[0].kernel == ["noatime"]
