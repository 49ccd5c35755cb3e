"""Octavo in the training loops of other packages: a file for each, which imports that package and no other.

    octavo.integrations.hugging_face    OctavoCallback, for transformers' Trainer
    octavo.integrations.accelerate      register, for an Accelerator
    octavo.integrations.lightning       OctavoCallback, for Lightning's Trainer

Each ends Octavo's step when the optimizer steps, and saves and loads the state of recipes with the package's own
checkpoints, so that a run resumes bit for bit. `import octavo` imports none of them.
"""
