"""Work on a GPU: steps captured as CUDA graphs, and the kernels that a call launches."""

import gc

import torch


def captured(*steps):
    """(graph, what the step gave) of each of several steps, warmed up beside the current stream."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for step in steps:
            step()
    torch.cuda.synchronize()
    gc.collect()  # a graph of an earlier test that is destroyed meanwhile would end the capture
    made = []
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            found = step()
        made.append((graph, found))
    return made


def kernels_of(call, *, warm=True):
    """The names of all kernels of a call, copies and fills included; `warm`: of the second."""
    if warm:
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
