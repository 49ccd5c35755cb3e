"""Nested tuples, lists and dicts of tensors, which have no public module up to torch 2.15."""

from torch.utils import _pytree

register_pytree_node = _pytree.register_pytree_node  # graphs take and return QTensors as their tensors
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
