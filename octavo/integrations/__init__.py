"""Octavo in the training loops of other packages: a file for each, which imports that package and no other.

    hugging_face    OctavoCallback, for transformers' Trainer
    accelerate      register, for an Accelerator
    lightning       OctavoCallback, for Lightning's Trainer
    torchtitan      convert, an override of torchtitan's config
    recipe_file     the state of recipes, as a file beside what the package saves
    weights_file    whether a trainer that loads weights by name has loaded all of them

    optimizer.step -> a hook of the package -> octavo.step
    save and load  -> a hook of the package -> recipe_file, or octavo's own checkpoints

Each ends Octavo's step when the optimizer steps, and saves and loads the state of recipes with the package's own
checkpoints, so that a run resumes bit for bit. `import octavo` imports none of them.

This room may import rooms up to `inspection`.
"""
