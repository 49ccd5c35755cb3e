"""A digest of the package's sources, which leads the string of every node's call."""

import hashlib
from pathlib import Path

# rooms on which no node's result depends; every other file is part of the digest, that of a new room too
NOT_IN_GRAPHS = ("checkpoints", "cli", "demo", "distributed", "integrations", "model")


def digest(root: Path) -> str:
    """Return eight hex digits of every source file of the package that a node's result may depend on."""
    hashed = hashlib.sha256()
    for room in NOT_IN_GRAPHS:
        if not (root / room).is_dir():
            raise FileNotFoundError(
                f"octavo.runtime.digest leaves the room {room!r} out of the digest of its graphs, and there is "
                "none. Rename it in NOT_IN_GRAPHS too."
            )
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in NOT_IN_GRAPHS:
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:8]


DIGEST = digest(Path(__file__).parent.parent)
