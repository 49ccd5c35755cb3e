"""A weight as codes, and where its gradient goes.

Codes of a weight:

    weight_codes            decides for each call: plain, cached, or the weight itself is codes
    cache                   codes that are kept from microbatch to microbatch, and when they are stale
    weight_state            marks by which a cache notices that its weight has changed
    optimizer_hooks         a step of any torch optimizer makes cached codes stale
    code_memory             memory for a weight's codes, and the cast into it
    quantized_weight        a weight that is its codes (`octavo.quantize_weights`), as a tensor subclass
    weight_operators        operators of torch on such a weight: copies of codes, views, or its values
    gradient_anchor         the plain tensor in its place that receives its gradient
    quantized_parameters    such weights as parameters: made of values or of codes, moved with a module
    given_codes             codes that a program brings
    loaded_codes            codes that arrive piece by piece
    saved_codes             codes in `octavo.state_dict`
    master_values           float32 values of trained codes, for optimizers that know nothing of codes
    stochastic_write        writes to such weights with stochastic rounding

The gradient:

    wgrad_delivery          where dw goes
    main_grad               the caller's buffer for dw, checked; `store` in `octavo.ops.operands` writes it
    wgrad_queue             dw that waits for `backward_dw()`
    unsupported_wgrad       weights and graphs for which neither works, with the reason

    weight -> weight_codes.supply -+- "plain": the layer casts it
                                   +- "codes": cache, filled or refreshed
                                   +- "quantized": the weight's own codes

Layers compute codes and gradients (`octavo.ops`); this room keeps them between calls.

This room may import rooms up to `runtime`.
"""
