"""concurrency/lru.py beside a plain list of what was used last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zarrfs.concurrency.lru import LRU

STEPS = st.lists(st.tuples(st.sampled_from(["put", "use", "get"]), st.integers(0, 5)), max_size=60)


@given(bound=st.integers(1, 4), steps=STEPS)
def test_it_keeps_what_was_used_last(bound: int, steps: list[tuple[str, int]]) -> None:
    dropped: list[int] = []
    tested: LRU[int, int] = LRU(bound, dropped.append)
    model: list[int] = []  # keys, the one used last at the end
    gone: list[int] = []
    for step, key in steps:
        if step == "put":
            assert tested.put(key, 10 * key) == 10 * key
            model = [one for one in model if one != key] + [key]
            while len(model) > bound:
                gone.append(10 * model.pop(0))
        else:
            value = tested.use(key) if step == "use" else tested.get(key)
            assert value == (10 * key if key in model else None)
            if step == "use" and key in model:
                model = [one for one in model if one != key] + [key]
        assert list(tested) == model
    assert dropped == gone
