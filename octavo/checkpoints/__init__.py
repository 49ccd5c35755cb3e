"""Checkpoints of training runs: files of tensors that are checked before they are loaded, in folders that are whole."""
