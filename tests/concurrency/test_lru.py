"""LRU and SizedLRU compared with simple models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zarrfs.concurrency.lru import LRU, SizedLRU

STEPS = st.lists(st.tuples(st.sampled_from(["put", "use", "get"]), st.integers(0, 5)), max_size=60)


@given(bound=st.integers(1, 4), steps=STEPS)
def test_the_most_recently_used_values_are_kept(bound: int, steps: list[tuple[str, int]]) -> None:
    dropped: list[int] = []
    tested: LRU[int, int] = LRU(bound, dropped.append)
    model: list[int] = []  # keys; the most recently used one is last
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


SIZED = st.lists(
    st.tuples(st.sampled_from(["put", "use", "peek", "drop", "age", "evict"]), st.integers(0, 5)), max_size=60
)


@given(steps=SIZED)
def test_bytes_are_evicted_in_the_order_of_their_last_use(steps: list[tuple[str, int]]) -> None:
    tested: SizedLRU[int, bytes] = SizedLRU(len)
    model: dict[int, bytes] = {}  # the most recently used item is last
    for step, key in steps:
        value = bytes(key + 1)
        if step == "put":
            tested.put(key, value)
            model.pop(key, None)
            model[key] = value
        elif step == "use":
            assert tested.use(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        elif step == "peek":
            assert tested.peek(key) == model.get(key)
        elif step == "drop":
            tested.drop(key)
            model.pop(key, None)
        elif step == "age":
            tested.age(key)
            if key in model:
                model = {key: model[key], **model}
        else:
            tested.evict(3 * key, keep=1)
            while len(model) > 1 and sum(map(len, model.values())) > 3 * key:
                del model[next(iter(model))]
        assert (len(tested), tested.bytes) == (len(model), sum(map(len, model.values())))
        assert [number for number in range(6) if number in tested] == sorted(model)
