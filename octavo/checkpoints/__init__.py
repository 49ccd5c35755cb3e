"""Checkpoints of training runs: files of tensors that are checked before they are loaded, in folders that are whole.

    checkpoint          save_checkpoint and load_checkpoint: everything that a resumed run needs
    folder              a folder for each step, complete or not there
    tensor_file         safetensors files
    structure           dicts and lists of tensors as JSON and a flat dict
    layer_recipes       the recipe of each layer, compared with a model that loads it
    optimizer_state     the state of an optimizer, and the parameters that it is of
    random_state        the generators
    undo                a run as it was, after a load that failed
    published           codes as servers read them: load_fp8, save_fp8
    te_checkpoint       weights and scales that were written for Transformer Engine
    inert_pickle        a pickle's tensors, without what it would execute

    model, optimizer -> checkpoint -> structure -> tensor_file -> folder, renamed when it is whole

This room may import rooms up to `model`.
"""
