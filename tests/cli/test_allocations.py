"""The large allocations of a step, from the events of torch's allocator."""

from octavo.cli.bench import allocations

LARGE = allocations.LARGE
HERE = [
    {"filename": "/site/torch/x.py", "line": 3, "name": "empty"},
    {"filename": "/site/octavo/ops/matmul.py", "line": 210, "name": "input_gradient"},
    {"filename": "/site/octavo/runtime/eager.py", "line": 5, "name": "_backward"},
]


def event(action, addr, size, frames=()):
    return {"action": action, "addr": addr, "size": size, "frames": list(frames)}


def test_large_allocations_are_listed_with_their_lives_and_the_peak():
    found = allocations.of_events([
        event("alloc", 1, LARGE, HERE),
        event("alloc", 2, LARGE - 1),  # counts, and is not listed
        event("free_requested", 9, LARGE),  # was there before: gradients that a step drops
        event("free_completed", 9, LARGE),
        event("alloc", 3, 2 * LARGE, [{"filename": "<octavo replay>", "line": 7, "name": "replay"}]),
        event("free_requested", 1, LARGE),
        event("alloc", 1, LARGE, [{"filename": "/home/model.py", "line": 1, "name": "loss"}]),  # the same address
        event("free_requested", 3, 2 * LARGE),
    ])  # fmt: skip
    assert [one[1:] for one in found] == [
        (0, 5, True, "ops/matmul.py:210 input_gradient"),
        (4, 7, True, "<octavo replay>:7 replay"),
        (6, None, False, "/home/model.py:1 loss"),
    ]
    assert [one.mib for one in found] == [64.0, 128.0, 64.0]


def test_the_table_names_the_case():
    rows = [one._asdict() for one in allocations.of_events([event("alloc", 1, LARGE)])]
    assert allocations.render(rows, "octavo fp8-block, codes").splitlines() == [
        "MiB, octavo fp8-block, codes  from event  to event  at peak  made at",
        "----------------------------  ----------  --------  -------  -------",
        "64                            0           -         yes      unknown",
    ]
