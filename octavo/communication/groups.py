"""Process groups, known by their names.

A module, a config and a graph hold a group's name alone: a name can be copied, pickled and cached. The group itself is
looked up at each call, so that one that was destroyed and made again, under the same name, serves.
"""

from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet, ref

import torch.distributed as dist

from octavo._torch.functional_collectives import default_group, is_live, resolve_process_group
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT = ""  # the name of the default group, whatever torch calls it
ALONE = "alone"  # in place of a group's name: no other rank has the layer
# a group, its name, a mesh of one dim or (mesh, dim); None: the default group
Group: TypeAlias = "ProcessGroup | DeviceMesh | tuple[DeviceMesh, str] | str | None"


@while_tracing
def name_of(group: Any) -> str:
    """Return the name of a group; "" for None, the default group. Raise if torch knows no group of that name. While a
    compiler traces, this and the next ones are constants of the graph."""
    if group is None:
        return DEFAULT
    if isinstance(group, tuple) and len(group) == 2:
        group = _of_mesh(*group)
    elif _is_mesh(group):
        group = _of_mesh(group, None)
    if isinstance(group, str):
        if group != DEFAULT:
            process_group(group)
        return group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedConfig(
            "This process is not in the group: torch.distributed.new_group returns a number to ranks that it leaves "
            "out. Give each rank the group that it is in: init_device_mesh makes one for each set of ranks."
        )
    name = getattr(group, "group_name", None)
    if not isinstance(name, str) or not _is_registered(name, group):
        raise UnsupportedConfig(
            f"A group is a ProcessGroup that torch.distributed has registered, its name, a DeviceMesh of one dim or "
            f"(mesh, dim); got {_described(group)}, which graphs could not find by name. Make it with "
            "torch.distributed.new_group or init_device_mesh."
        )
    return name


def process_group(name: str) -> Any:
    """Return the group of this name as it is now."""
    if not _is_initialized():
        raise UnsupportedConfig(
            f"The process group {name!r} does not exist: torch.distributed is not initialized. Call "
            "torch.distributed.init_process_group first, or leave the group out for a single process."
        )
    if name == DEFAULT:
        return dist.group.WORLD
    try:
        return resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str
    except (RuntimeError, ValueError) as error:
        raise UnsupportedConfig(
            f"torch.distributed has no process group named {name!r}. It was destroyed, or made in another program: "
            "make it again in the same order on all ranks, or give the layer another group."
        ) from error


_SIZES: dict[str, tuple["ref[Any]", int]] = {}  # of groups by name, with the group that had this size


@while_tracing
def size_of(name: str) -> int:
    """Return the number of ranks; 1 for the default group where torch.distributed is not initialized. A group that is
    still the same one is not asked again: layers ask at every call."""
    known = _SIZES.get(name)
    if name == DEFAULT:
        group = default_group()
        if group is None:
            return 1
        if known is not None and known[0]() is group:
            return known[1]
    elif known is not None and is_live(known[0]()):
        return known[1]
    group = process_group(name)
    size = int(group.size())
    _SIZES[name] = ref(group), size
    return size


@while_tracing
def rank_of(name: str) -> int:
    """Return this process's rank in the group."""
    if name == DEFAULT and not _is_initialized():
        return 0
    return int(process_group(name).rank())


def ranks_in(name: str) -> list[int]:
    """Return the ranks of the group, by their numbers in the default group."""
    return list(dist.get_process_group_ranks(process_group(name)))


_split: "WeakSet[Any]" = WeakSet()  # layers that are split over ranks


def note_split(layer: Any) -> None:
    """Note a layer that may be split over ranks, which then compute parts of the same rows."""
    _split.add(layer)


def replica() -> int:
    """Return a number that the ranks with this process's rows have in common, and other ranks have not: the lowest of
    their ranks. Layers that all of them have must then round alike; 0 in a single process."""
    if not _is_initialized():
        return 0
    names = {layer.parallel.group for layer in list(_split) if layer.parallel is not None}
    groups = [group for name in names if (group := _found(name)) is not None]
    return min([int(dist.get_rank()), *[min(dist.get_process_group_ranks(group)) for group in groups]])


def _found(name: str) -> Any:
    """Return the group of this name; None if it was destroyed."""
    try:
        return process_group(name)
    except UnsupportedConfig:
        return None


@while_tracing
def registered_name(name: str) -> str:
    """Return the name by which torch's operators find the group: that of the default group too."""
    return str(process_group(name).group_name)


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_registered(name: str, group: Any) -> bool:
    try:
        return bool(process_group(name) == group)
    except UnsupportedConfig:
        return False


def _is_mesh(group: Any) -> bool:
    return hasattr(group, "get_group") and hasattr(group, "mesh_dim_names")


def _of_mesh(mesh: Any, dim: Any) -> Any:
    if not _is_mesh(mesh):
        raise UnsupportedConfig(f"A group given as a pair is (DeviceMesh, dim), got {_described(mesh)} and {dim!r}.")
    try:
        return mesh.get_group(dim)
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        names = mesh.mesh_dim_names
        raise UnsupportedConfig(
            f"A DeviceMesh of {mesh.ndim} dims, named {names}, has no single group for dim {dim!r}. Pass one of its "
            "dims: tp_group=mesh['tp'], or (mesh, 'tp')."
        ) from error


def _described(group: Any) -> str:
    return f"a {type(group).__name__}"
