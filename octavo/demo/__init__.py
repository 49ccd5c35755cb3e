"""The small models, the corpus and the training loop behind `octavo train`, and the page that it writes.

Examples to read as much as to run: `gpt`, `llama` and `moe_gpt` are plain nn.Modules that `octavo.convert` takes.
"""
