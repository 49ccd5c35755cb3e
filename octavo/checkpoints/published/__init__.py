"""Checkpoints as they are published: weights that are codes with scales, in the layouts that servers read.

    layouts             `LAYOUTS`: a row for each layout
    tensor_parts        codes and scales of one weight, between a file and memory: shapes, dtypes, bytes
    layout_choice       which layout a folder's config.json names, for which modules; and that entry when one is written
    shards              the tensors of a folder, from its headers; new folders
    published_names     the names that a parameter of a model has in a file, alone or by experts
    loading_plan        what goes where, checked before a byte is loaded
    loading             `octavo.load_fp8`
    saving              `octavo.save_fp8`, `octavo.fp8_state_dict`
    rewriting           from one folder to another, without a model

    folder -> shards, layout_choice -> loading_plan -> tensor_parts -> weights of the model

`octavo.checkpoints` has the checkpoints of training runs.
"""
