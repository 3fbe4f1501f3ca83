"""ValidatedOverlay: an Overlay of a store behind a URL."""

from __future__ import annotations

from zarrfs.store.api import ValidatedStore, Validator
from zarrfs.store.overlay import Overlay
from zarrfs.system.buffers import Buffer


class ValidatedOverlay(Overlay):
    """An Overlay of a lower store whose values may become others; a file of the upper is read as it is."""

    async def validator(self, key: str) -> Validator:
        """As ValidatedStore.validator."""
        found = await self.find(key)
        if found.status is not None:
            return Validator(None, await self.info(key), False)
        assert isinstance(self.lower, ValidatedStore)
        return await self.lower.validator(key)

    async def get_same(self, key: str, validator: Validator, start: int = 0, length: int | None = None) -> Buffer:
        """As ValidatedStore.get_same."""
        if validator.value is None:
            return await self.get(key, start, length)
        assert isinstance(self.lower, ValidatedStore)
        return await self.lower.get_same(key, validator, start, length)
