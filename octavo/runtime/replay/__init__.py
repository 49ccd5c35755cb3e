"""Calls of layers, recorded once and replayed as lists of launches.

    recorder    watches one call: its operators and launches, and what cannot be recorded
    source      turns them into the source of a function: late allocations, early deletions, one zero fill

    a call -> recorder -> lines -> source -> a function of the call's tensors, in `octavo.runtime.call_cache`

`octavo.runtime.call_cache` decides which calls are recorded.
"""
