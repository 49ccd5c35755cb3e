"""Views in recorded calls: they are made straight from the tensor that they are views of, and only where something uses
them. One that leaves the call, or that an operator writes to, stays torch's own view."""

import torch

from octavo.runtime import call_cache as calls
from octavo.runtime.replay import source

VIEWS = ("reinterpret", ".t(", "view", "transpose", "as_strided", "permute")


def replays(work, make, times=4):
    """Compare calls, of which the later ones are replays, with work itself; return the source of the replay, with the
    names of the functions that it calls."""
    for _ in range(times):
        given = make()
        twins = [t.clone() for t in given]
        found = calls.run(("work",), [*given], work)[1]
        for a, b in zip((*found, *given), (*work(twins)[1], *twins), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a._version == b._version
    (kind,) = [kind for kind in calls._recordings.values() if kind.replay is not None]
    text = kind.replay.source
    for name, value in sorted(kind.replay.__globals__.items(), reverse=True):
        if callable(value):
            text = text.replace(f"{name}(", f"{getattr(value, '__name__', value)}(")
    return text


def matrix(device, *shape):
    return torch.arange(float(torch.Size(shape).numel()), device=device).view(shape)


def test_a_view_of_a_view_that_is_the_tensor_again_is_not_made(device):
    text = replays(lambda given: (None, [given[0].t().t() + 1]), lambda: [matrix(device, 4, 6)])
    assert not any(word in text for word in VIEWS)


def test_views_are_made_straight_from_the_tensor(device):
    def work(given):
        x = given[0]
        return None, [x.t()[1:, 2:].mm(x[2:]), x.unsqueeze(0)[:, 1:, ::2].sum()]

    text = replays(work, lambda: [matrix(device, 6, 4)])
    assert text.count("reinterpret") == 3
    assert "slice" not in text and "unsqueeze" not in text


def test_views_of_other_dtypes_and_of_nothing_stay(device):
    def work(given):
        x = given[0]
        return None, [x.view(torch.int32)[1:] + 1, x[:0].t() + 1, x.unbind()[1] + 1]

    replays(work, lambda: [matrix(device, 4, 6)])


def test_a_view_that_is_returned_stays_a_view(device):
    def work(given):
        turned = given[0].t()
        return None, [turned[1:], turned * 2]

    text = replays(work, lambda: [matrix(device, 4, 6)])
    assert "reinterpret" not in text
    x = matrix(device, 4, 6).clone()
    views = calls.run(("work",), [x], work)[1]
    assert views[0]._is_view() and views[0]._base is x


def test_a_view_that_is_written_to_counts_the_versions_of_its_tensor(device):
    def work(given):
        x = given[0]
        x.view(-1)[3:].add_(1)
        torch.maximum(x[0], x[1], out=x.t()[:, 2])
        return None, [x.t() * 2]

    text = replays(work, lambda: [matrix(device, 4, 6).t()[:4].contiguous()])
    assert text.count("reinterpret") == 1, "of the view that is only read"


def test_views_of_what_is_allocated_in_their_form(device):
    """The allocation takes the form of the view, and further views are of that."""

    def work(given):
        room = torch.empty(6, 4, device=device)
        turned = room.t()
        turned.copy_(given[0])
        return None, [turned[1:] + 1, turned.sum()]

    replays(work, lambda: [matrix(device, 4, 6)])


def test_an_address_is_asked_for_once():
    lines = [
        source.Line("t = make()", (), ("t",)),
        source.Line("launch(i0.data_ptr(), t.data_ptr())", (), (), ("i0", "t")),
        source.Line("launch(t.data_ptr() + 8, i1.data_ptr())", (), (), ("t", "i1")),
    ]
    found = list(source.with_deletions(source.with_addresses_once(lines, {"i0", "i1"}), set()))
    assert found == [
        "t = make()", "t_at = t.data_ptr()", "launch(i0.data_ptr(), t_at)", "launch(t_at + 8, i1.data_ptr())", "del t",
    ]  # fmt: skip
