"""Modules inside of another package's module that read it through a weak reference: one that is not would keep a
deleted model in memory until Python's garbage collector runs."""

import copy
import weakref
from typing import Any, Self

OWNER = "_owner"


class Owned:
    """A module with a weak reference `_owner`, which copies and pickles with what it refers to."""

    _owner: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = {name: value for name, value in self.__dict__.items() if name != OWNER}
        owner = self._owner()  # a copy of the owner is on record before its parts are copied
        new.__setstate__({**copy.deepcopy(state, memo), OWNER: memo.get(id(owner), owner)})
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, OWNER: self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        owner = state[OWNER]
        rest: Any = super()
        rest.__setstate__({**state, OWNER: (lambda: None) if owner is None else weakref.ref(owner)})
