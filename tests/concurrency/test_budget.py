"""MemoryBudget: a bound on the bytes that tasks hold; requests are served in order of arrival."""

from __future__ import annotations

import trio
import trio.testing

from zarrfs.concurrency.budget import MemoryBudget


def test_requests_are_served_in_order_of_arrival() -> None:
    """A small request does not overtake a larger one that waits; a waiter that is cancelled delays no other."""

    async def check() -> None:
        budget, served = MemoryBudget(100), []

        async def take(count: int, scope: trio.CancelScope) -> None:
            with scope:
                await budget.take(count)
                served.append(count)

        await budget.take(60)
        scopes = {count: trio.CancelScope() for count in (50, 70, 10, 20)}
        async with trio.open_nursery() as nursery:
            for count, scope in scopes.items():
                nursery.start_soon(take, count, scope)
                await trio.testing.wait_all_tasks_blocked()
            assert (served, budget.held, budget.take_now(1)) == ([], 60, False)
            scopes[50].cancel()  # the first waiter
            scopes[10].cancel()  # a waiter behind others
            await trio.testing.wait_all_tasks_blocked()
            assert (served, budget.held) == ([], 60)
            budget.give(60)
            await trio.testing.wait_all_tasks_blocked()
            assert (served, budget.held) == ([70, 20], 90)
            assert (budget.take_now(11), budget.take_now(10), budget.held) == (False, True, 100)

    trio.run(check)


def test_a_request_for_more_than_the_whole_budget_is_served_alone() -> None:
    async def check() -> None:
        budget = MemoryBudget(100)
        await budget.take(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(budget.take, 150)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(budget.take, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert budget.held == 1
            budget.give(1)
            await trio.testing.wait_all_tasks_blocked()
            assert budget.held == 150
            budget.give(150)
        assert budget.held == 1

    trio.run(check)


def test_a_larger_size_wakes_a_waiter_and_a_smaller_one_keeps_what_is_held() -> None:
    async def check() -> None:
        budget = MemoryBudget(10)
        await budget.take(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(budget.take, 10)
            await trio.testing.wait_all_tasks_blocked()
            budget.resize(20)
        assert budget.held == 20
        budget.resize(10)
        budget.give(10)
        assert (budget.held, budget.take_now(1)) == (10, False)

    trio.run(check)


def test_bytes_that_fit_are_taken_without_a_checkpoint() -> None:
    async def check() -> None:
        budget = MemoryBudget(10)
        with trio.CancelScope() as scope:
            scope.cancel()
            await budget.take(10)
        assert (budget.held, scope.cancelled_caught) == (10, False)

    trio.run(check)
