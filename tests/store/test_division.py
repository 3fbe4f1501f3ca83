"""The division of keys into shares: disjoint, complete, balanced, and the same in every process."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zarrfs.config.shares import Share
from zarrfs.store.division import RUN, Division, Listing, weight

SIZES = st.lists(st.none() | st.integers(0, 10_000) | st.integers(0, 64 << 20), max_size=200)


def divided(sizes: list[int | None], count: int) -> tuple[list[list[int]], set[Listing]]:
    """Return the numbers of the keys in each share, and the listings, with a separate Division for each share."""
    found, listings = [], set()
    for index in range(count):
        division = Division(Share(index, count))
        found.append([number for number, size in enumerate(sizes) if division.mine(f"k/{number}", size)])
        listings.add(division.listing)
    return found, listings


@settings(deadline=None, max_examples=60)
@given(SIZES, st.integers(1, 12))
@example([1 << 20] * 2000, 3)
@example([100] * 5000, 4)
@example([100] * 500 + [64 << 20] + [100] * 500, 2)
def test_each_key_is_in_one_share_and_shares_are_balanced(sizes: list[int | None], count: int) -> None:
    shares, listings = divided(sizes, count)
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(weight(sizes[number]) for number in share) for share in shares]
    run = min(RUN, sum(loads) // (16 * count))
    assert max(loads) - min(loads) <= run + max(map(weight, sizes), default=0)
    assert len(listings) == 1
    assert listings.pop()[:2] == (len(sizes), sum(size or 0 for size in sizes))


def test_neighbours_stay_together() -> None:
    """Otherwise each process would fetch the blocks of all others; here a block holds 128 values."""
    shares, _ = divided([4096] * 25_000, 4)
    runs = sum(after != before + 1 for share in shares for before, after in itertools.pairwise(share))
    assert runs < 600


def test_other_keys_or_sizes_change_the_digest_of_a_listing() -> None:
    listings = set()
    for key, size in (("a", 1), ("a", 2), ("b", 1), ("a", None), ("a", -1)):
        division = Division(Share(0, 2))
        division.mine(key, size)
        listings.add(division.listing)
    assert len({one.digest for one in listings}) == 4  # -1 means an unknown size, as None does


def test_without_sizes_each_share_has_the_same_number_of_values() -> None:
    counts = []
    for index in range(2):
        division = Division(Share(index, 2), sizes=False)
        counts.append(sum(division.mine(str(number), number) for number in range(100)))
    assert counts == [50, 50]
