"""A weight as codes, and where its gradient goes.

    code_memory           memory for a weight's codes, and the cast into it
    cache                 codes that are kept from microbatch to microbatch, and when they are stale
    weight_codes          decides for each call: plain, cached, or the weight itself is codes
    quantized_weight      a weight that is its codes (`octavo.quantize_weights`), as a tensor subclass
    weight_operators      operators of torch on such a weight: copies of codes, views, or its values
    gradient_anchor       the plain tensor in its place that receives its gradient
    quantized_parameters  such weights as parameters: made of values or of codes, moved with a module
    master_values         float32 values of trained codes, for optimizers that know nothing of codes
    optimizer_hooks       a step of any torch optimizer makes cached codes stale
    main_grad             dw added to a buffer of the caller
    wgrad_queue           dw that waits for `backward_dw()`; wgrad_delivery computes it
    unsupported_wgrad     weights and graphs for which neither works, with the reason

Layers compute codes and gradients (`octavo.ops`); this room keeps them between calls.
"""
