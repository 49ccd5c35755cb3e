"""Collectives around a layer that is split over ranks: what is sent, and which scales the ranks share.

    groups              process groups by name: a graph with a group object in it cannot be cached
    collectives         gathers, sums and scatters that carry gradients; gathers of codes
    all_to_all          rows that change ranks
    peer_memory         memory of each rank that all of a group address
    tensor_parallel     column and row parallel layers, with sequence parallelism: the collectives before and after
    gathered_rows       rows of x that a column layer gathers, as codes where these are those of one process
    shared_rows         rows of x that sibling layers share: q, k and v; gate and up
    scattered_sum       the sum of a row layer's y, whose gradient is gathered as codes
    amax_reduction      each rank measures its part, and the maximum over ranks counts
    all_reduced_amaxes  a cast by such amaxes, so that x and w have the codes of one process
    sharded_weights     weights that FSDP2 gathers as codes
    rank_checks         what must be equal on all ranks, compared once

    x of this rank -> gathered_rows.gathered -> codes of all ranks -> the layer's node -> y -> a sum or a scatter

A layer's own functions run between two collectives and know nothing of ranks. torch's styles are in
`octavo.distributed`.

This room may import rooms up to `optim`.
"""
