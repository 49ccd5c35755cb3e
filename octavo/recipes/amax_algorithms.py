"""The settings of delayed scaling that a recipe names and `octavo.scaling` carries out."""

from octavo.errors import UnsupportedConfig

ALGORITHMS = ("max", "most_recent")
COLD_STARTS = ("one", "current")


def check_margin(margin: object, *, what: str) -> None:
    if type(margin) is not int or abs(margin) > 64:
        raise UnsupportedConfig(f"{what} is an int from -64 to 64, got {margin!r}.")
