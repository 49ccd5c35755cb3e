"""Settings of operations: attributes from which other values are made, anew whenever one of them is set."""

from typing import Any


class Settings:
    """Mixin for modules that make values from attributes, such as a part of their config's key.

    The values are made when an attribute is set, not in each call. A key is a string for another reason too: a compiler
    guards on it, where it may turn a float attribute into a symbol. A constructor sets the attributes of
    `_setting_names` and then calls `_derive_from_settings`.
    """

    _setting_names: tuple[str, ...] = ()
    _settings_complete = False  # whether the constructor has set all settings

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._setting_names:
            super().__setattr__(name, value)
            return
        super().__setattr__(name, self._checked_setting(name, value))
        if self._settings_complete:
            self._derive_from_settings()

    def _checked_setting(self, name: str, value: Any) -> Any:
        """Return a setting's value as it is kept; raise if it has no meaning, and the old value stays."""
        return value

    def _derive_from_settings(self) -> None:
        """Make what follows from the settings."""
        self._settings_complete = True
