"""The small models, the corpus and the training loop behind `octavo train`, and the page that it writes.

    gpt             a byte-level GPT
    moe_gpt         its mixtures of experts
    llama           blocks with the proportions of Llama's
    transformer     the parts of these models
    corpus          the text to train on
    training        one run
    split_model     a run on several ranks
    pipeline_stages  its blocks, and microbatches, over the ranks of a pipeline
    saves           the folder of a run
    numerics        what a recipe does to tensors at sampled steps
    progress        the progress bar
    headline        the answer of a report, in a sentence
    train_text      a report as text
    page            a report as a page

    corpus, gpt -> octavo.convert -> training, a recipe at a time -> headline -> train_text, page

Examples to read as much as to run: `gpt`, `llama` and `moe_gpt` are plain nn.Modules that `octavo.convert` takes.

This room may import rooms up to `integrations`.
"""
