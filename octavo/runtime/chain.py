"""A sequence of layers as one layer: each stage takes the output y of the stage before as its x.

The fuser makes such a chain of a run of operations: it is one node forward and one backward, saves once, and the driver
runs it as it runs any layer. A chain's inputs are x, then each stage's inputs but for its x; its buffers are the
stages' buffers; its outputs are the last y, then the side outputs of its stages: outputs besides y, such as a fork's
(`octavo.ops.fork_layer`). A later stage may take a side output as an input: a residual.

A *step* is one stage, or several at once: a fused operation (`FusedStep`). Forward and backward are cut into steps
independently. A fused forward returns what each of its stages would have returned, but for values between them that no
stage keeps; a fused backward takes what each stage has saved and returns what each would have returned. Where forward
and backward are fused together, the stages' own configs say what is saved instead.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from octavo.memory import overlap, refuse_dgrad_out, refuse_shared_memory
from octavo.quant.proto import TensorProto
from octavo.runtime.chain_config import ChainStep
from octavo.runtime.chain_config import Config as Config
from octavo.runtime.contract import LAYERS, Deferral, ForwardResult, Layer, Tensors
from octavo.runtime.dry_run import Miscounted
from octavo.runtime.gradient_targets import Writes
from octavo.runtime.named_gradients import in_order


class Fields(tuple[Any, ...]):
    """Inputs or buffers of a chain, as many as its stages have."""

    _make: Any = classmethod(tuple.__new__)


def stage_inputs(config: Config, inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of each stage, without its x."""
    return [make((None, *inputs[span])) for make, span in zip(config.named_inputs, config.input_spans, strict=True)]


class ChainLayer(Layer):
    """A sequence of layers, run as one layer."""

    def has_backward(self, config: Config) -> bool:
        return any(config.active)

    def out_place(self, config: Config) -> int | None:
        return config.out_place

    def gradients_in_buffers(self, config: Config) -> dict[int, int]:
        return config.gradients_in_buffers

    def deferrable_gradients(self, config: Config) -> dict[int, Deferral]:
        return {
            inputs.start + place - 1: Deferral(buffers.start + places.queue, buffers.start + places.target)
            for layer, stage, inputs, buffers in zip(
                config.layers, config.stages, config.input_spans, config.buffer_spans, strict=True
            )
            for place, places in layer.deferrable_gradients(stage).items()
        }

    def auxiliary(self, config: Config) -> int:
        return sum(config.auxiliary_sizes)

    def intermediates_size(self, config: Config) -> int:
        return int(config.kept_count + sum(config.intermediates_sizes))

    def saved_size(self, config: Config) -> int:
        return sum(config.saved_sizes)

    def buffers_size(self, config: Config) -> int:
        return sum(config.buffers_sizes)

    def graph_buffers(self, config: Config, *fields: Any) -> tuple[Any, ...]:
        buffers: list[Any] = []
        for layer, stage, span in zip(config.layers, config.stages, config.buffer_spans, strict=True):
            buffers += layer.graph_buffers(stage, *fields[span])
        return tuple(buffers)

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return config.decided_by_layout[side]

    def fills(self, config: Config) -> bool:
        return any(layer.fills(stage) for layer, stage in config.pairs)

    def flat_places(self, config: Config) -> tuple[int, ...]:
        return tuple(
            span.start + i
            for layer, stage, span in zip(config.layers, config.stages, config.intermediates_spans, strict=True)
            for i in layer.flat_places(stage)
        )

    def forward(self, config: Config, inputs: Sequence[Any]) -> ForwardResult:
        return _joined(config, *_run(config, inputs))

    def forward_and_save(self, config: Config, inputs: Sequence[Any], saving: bool) -> tuple[ForwardResult, Tensors]:
        """Run forward and save. A value that no stage keeps is freed when the next stage has taken it."""
        place = config.out_place
        out = None if place is None else inputs[place]
        if out is not None:
            _refuse_out_over(out, [t for i, t in enumerate(inputs) if i not in (0, place)], "takes")
        stages, made = stage_inputs(config, inputs), list[Any]()
        x, producers = inputs[0], {producer for _, _, producer, _ in config.routes}
        sides: list[Any] = []
        auxiliary: list[Any] = []
        saved: list[Any] = []
        for step in config.steps:
            first, last = step.first, step.last
            stages[first] = stages[first]._replace(x=x)
            # this frame's name would keep x until the step is done
            del x
            made += _run_step(config, step, stages, made)
            for i in range(first, last):
                named = stages[i] if i == first else stages[i]._replace(x=made[i - 1].outputs[0])
                sides += [made[i].outputs[1 + k] for k in config.chain_outputs[i]]
                auxiliary += made[i].auxiliary
                saved += config.layers[i].save(config.stages[i], named, made[i])
            x = made[-1].outputs[0]
            # what a stage was given and made is freed, unless a later stage takes it
            for i in range(first, last):
                stages[i] = None
                if i not in producers:
                    made[i] = None
        if saving and out is not None:
            # y was written to this memory already: backward would read it in the place of what was saved
            _refuse_out_over(out, saved, "needs in backward")
        return ForwardResult((x, *sides), tuple(auxiliary), ()), tuple(saved)

    def abstract(self, config: Config, inputs: Sequence[Any]) -> ForwardResult:
        return _joined(config, *abstract_stages(config, inputs))

    def save(self, config: Config, inputs: Sequence[Any], made: ForwardResult) -> Tensors:
        stages = stage_inputs(config, inputs)
        values, sides = _stage_values(config, inputs[0], made), _sides(config, made)
        for consumer, field, producer, k in config.routes:
            value = values[producer] if config.forks[producer] else sides[producer][k]
            stages[consumer] = _with(stages[consumer], field, value)
        auxiliary, intermediates = config.auxiliary_spans, config.intermediates_spans
        saved: list[Tensor | None] = []
        for i, (layer, stage) in enumerate(config.pairs):
            part = ForwardResult(
                (values[i + 1], *sides[i]), made.auxiliary[auxiliary[i]], made.intermediates[intermediates[i]]
            )
            saved += layer.save(stage, stages[i]._replace(x=values[i]), part)
        return tuple(saved)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return (
            config.wanted[0][0],
            *[
                w and (i, at) not in config.inside
                for i, stage in enumerate(config.wanted)
                for at, w in enumerate(stage[1:], 1)
            ],
        )

    def gradient_aliases(self, config: Config) -> dict[int, int]:
        """Return gradients that stages pass on unchanged: those of inputs that are added to the chain's value, and x's
        if all stages pass it on."""
        # the holder of the gradient that arrives at a stage: an output (-1), an input, or none yet
        holder: int | None = -1
        passed: dict[int, int] = {}
        for i in reversed(range(len(config.stages))):
            layer, wanted, before = config.layers[i], config.wanted[i], config.input_spans[i].start - 1
            # no gradient goes further back than here
            if not any(wanted):
                return passed
            of_stage = layer.gradient_aliases(config.stages[i])
            # the holders of the gradient that the stage calls -1, and of those of its inputs that are returned
            holders = {j: before + j for j in range(1, len(wanted)) if (i, j) not in config.inside} | {-1: holder}
            for j, other in sorted(of_stage.items()):
                if j == 0 or (i, j) in config.inside:
                    continue
                has = holders.get(other)
                if has is None:
                    holders[other] = before + j
                else:
                    passed[before + j] = has
            holder = holders.get(of_stage[0]) if 0 in of_stage else None
        if config.wanted[0][0] and holder is not None:
            passed[0] = holder
        return passed

    def abstract_gradients(self, config: Config, saved: Any, *grads: Any) -> tuple[TensorProto | None, ...]:
        found = _no_gradients(config)
        for i, parts, dys in _dry_backward(config, saved, grads, found):
            try:
                found[i] = config.layers[i].abstract_gradients(config.stages[i], parts, *dys)
            except Miscounted as error:
                raise _of_operation(config, i, error) from error
        return _returned(config, found)

    def backward(
        self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None
    ) -> Tensors:
        """Run the stages' backwards. They defer their writes to buffers until all of them are done; if this chain is
        a stage of an outer chain, which passes `writes`, until all stages of that chain are. Each step gets the
        chain's own references to what its stages saved, so that it can free that early."""
        outer, writes = writes, Writes() if writes is None else writes
        found, g = _no_gradients(config), grads[0]
        spans = zip(config.layers, config.buffer_spans, strict=True)
        stage_buffers = [layer.Buffers._make(buffers[span]) for layer, span in spans]
        parts = [tuple(saved[span]) for span in config.saved_spans]
        if isinstance(saved, list):  # otherwise the caller would keep what a step frees
            saved.clear()
        for place in config.gradients_in_buffers.values():
            refuse_dgrad_out(buffers[place], grads)
        for step in config.back_steps:
            first, last = step.first, step.last
            counts = config.side_counts
            dys = [(None, *(_side_gradients(config, grads, i, found) if counts[i] else ())) for i in range(first, last)]
            dys[-1] = (g, *dys[-1][1:])
            if not any([t is not None for stage_dys in dys for t in stage_dys]):
                continue  # nothing that depends on these stages has a gradient, and neither have they
            # the list gives up its references: the step holds the only ones, and frees them as it goes
            own, parts[first:last] = parts[first:last], [()] * (last - first)
            found[first:last] = _step_back(config, step, own, stage_buffers[first:last], dys, writes)
            g = found[first][0]
            if first:
                found[first] = (None, *found[first][1:])  # dropped here, so that the stages before can free it
        returned = _returned(config, found)
        if outer is None:
            writes.do()
        return returned

    def flops(self, config: Config, inputs: Sequence[Any]) -> int:
        stages, _ = abstract_stages(config, inputs)
        return sum(layer.flops(stage, own) for (layer, stage), own in zip(config.pairs, stages, strict=True))

    def gradient_flops(self, config: Config, saved: Any, *grads: Any) -> int:
        found, total = _no_gradients(config), 0
        for i, parts, dys in _dry_backward(config, saved, grads, found):
            layer, stage = config.layers[i], config.stages[i]
            total += layer.gradient_flops(stage, parts, *dys)
            found[i] = layer.abstract_gradients(stage, parts, *dys)
        return total


layer = ChainLayer(Config, Fields, buffers=Fields)


# -- forward ---------------------------------------------------------------------------------------------------------


def _run_step(config: Config, step: ChainStep, stages: list[Any], made: list[Any]) -> list[ForwardResult]:
    """Return the results of the stages of one step, from their inputs and the results of the stages before."""
    name, first, last = step
    if config.routes:
        _connect(config, stages, made, first, last)
    if name:
        return LAYERS[name].step_forward(config.stages[first:last], stages[first:last])
    try:
        return [config.layers[first].forward(config.stages[first], stages[first])]
    except Miscounted as error:
        raise _of_operation(config, first, error) from error


def _run(config: Config, inputs: Sequence[Any]) -> tuple[list[Any], list[ForwardResult]]:
    """Return the inputs of each stage, and its results."""
    stages, made = stage_inputs(config, inputs), list[ForwardResult]()
    x = inputs[0]
    for step in config.steps:
        stages[step.first] = stages[step.first]._replace(x=x)
        made += _run_step(config, step, stages, made)
        x = made[-1].outputs[0]
    return stages, made


def abstract_stages(config: Config, inputs: Sequence[Any]) -> tuple[list[Any], list[ForwardResult]]:
    """Return the inputs of each stage, and its results, without data."""
    stages, made = stage_inputs(config, inputs), list[ForwardResult]()
    x = inputs[0]
    for i, (layer, stage) in enumerate(config.pairs):
        stages[i] = stages[i]._replace(x=x)
        _connect(config, stages, made, i, i + 1)
        try:
            made.append(layer.abstract(stage, stages[i]))
        except Miscounted as error:
            raise _of_operation(config, i, error) from error
        x = made[-1].outputs[0]
    return stages, made


def _of_operation(config: Config, stage: int, error: Miscounted) -> RuntimeError:
    """Return the error, with the number of the operation that it is about."""
    return RuntimeError(f"Operation {config.begin + stage}: {error}")


def _connect(config: Config, stages: list[Any], made: list[ForwardResult], first: int, last: int) -> None:
    """Give side outputs to the stages first … last - 1 that take them."""
    for consumer, field, producer, k in config.routes:
        if first <= consumer < last and producer < first:
            value = side_output(config, made[producer].outputs, producer, k)
            stages[consumer] = _with(stages[consumer], field, value)


def side_output(config: Config, outputs: Sequence[Any], stage: int, k: int) -> Any:
    """Return a side output of a stage. For a fork it is x, since the output itself may be an anchor."""
    return outputs[0] if config.forks[stage] else outputs[1 + k]


def _with(inputs: Any, field: int, value: Any) -> Any:
    return inputs._make((*inputs[:field], value, *inputs[field + 1 :]))


def _joined(config: Config, stages: list[Any], made: list[ForwardResult]) -> ForwardResult:
    """Join the results of all stages into the chain's: y and side outputs; auxiliary outputs; values between
    stages that one of them keeps, then intermediates."""
    for i in range(1, len(stages)):
        stages[i] = stages[i]._replace(x=made[i - 1].outputs[0])
    sides = [m.outputs[1 + k] for m, places in zip(made, config.chain_outputs, strict=True) for k in places]
    outputs = (made[-1].outputs[0], *sides)
    saved = [
        t for layer, stage, inputs, m in zip(config.layers, config.stages, stages, made, strict=True)
        for t in layer.save(stage, inputs, m) if t is not None
    ]  # fmt: skip
    # a fork's value is x itself, which is an input or an earlier value already
    between = [None if config.forks[i] else made[i].outputs[0] for i in range(len(made) - 1)]
    between += [made[i].outputs[1 + k] for i, k in config.loose]
    kept = [
        # a node returns no tensor twice, and no value that nothing saved
        t if t is not None and any(t is s for s in saved) and not any(t is o for o in outputs) else None
        for t in between
    ]
    return ForwardResult(
        outputs,
        tuple([t for m in made for t in m.auxiliary]),
        (*kept, *[t for m in made for t in m.intermediates]),
    )


def _sides(config: Config, made: ForwardResult) -> list[list[Any]]:
    """Return the side outputs of each stage, from the chain's results. None for one that was not kept."""
    loose = dict(zip(config.loose, made.intermediates[len(config.stages) - 1 :], strict=False))
    sides = []
    for i, span in enumerate(config.chain_output_spans):
        outputs = dict(zip(config.chain_outputs[i], made.outputs[span], strict=True))
        sides.append([outputs[k] if k in outputs else loose.get((i, k)) for k in range(config.side_counts[i])])
    return sides


def _stage_values(config: Config, x: Any, made: ForwardResult) -> list[Any]:
    """Return x of each stage, and then y, from the chain's results. None for one that was not kept."""
    values = [x]
    for i in range(len(config.stages) - 1):
        if config.forks[i]:
            values.append(values[-1])
        else:
            kept, after = made.intermediates[i], made.outputs[config.chain_output_spans[i + 1]]
            # then the value left the node as that output, and was not returned a second time
            is_output = config.forks[i + 1] and len(after) > 0  # the next stage returned it
            values.append(after[0] if kept is None and is_output else kept)
    return [*values, made.outputs[0]]


def _refuse_out_over(out: Tensor, tensors: Sequence[Any], what: str) -> None:
    """Refuse a caller's memory for y that overlaps an input of a stage besides x, such as a weight, or a tensor that a
    stage keeps for backward."""
    for t in tensors:
        if isinstance(t, Tensor) and overlap(out, t):
            refuse_shared_memory("out", f"{t.dtype} {tuple(t.shape)}, which an operation of the run {what}")


# -- backward --------------------------------------------------------------------------------------------------------


def _step_back(
    config: Config, step: ChainStep, saved: list[Any], buffers: list[Any], dys: list[Any], writes: Writes
) -> list[Tensors]:
    """Return the gradients of the stages of one step."""
    name, first, last = step
    if name:
        grads: list[Any] = LAYERS[name].step_backward(config.stages[first:last], saved, buffers, dys, writes)
        if dict in map(type, grads):  # Octavo's own steps return tuples, which need no more than this look
            names = [layer.Inputs._fields for layer in config.layers[first:last]]
            grads = in_order(f"{LAYERS[name].title}.step_backward", grads, names)
        return grads
    try:
        return [config.layers[first].backward(config.stages[first], saved.pop(), buffers[0], dys[0], writes)]
    except Miscounted as error:
        raise _of_operation(config, first, error) from error


def _dry_backward(config: Config, saved: Any, grads: Any, found: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield each stage that backward reaches, its saved tensors, and its outputs' gradients without data. The consumer
    puts the stage's own gradients into `found` before it asks for the next."""
    g = grads[0]
    for i in reversed(range(len(config.stages))):
        if not config.active[i]:
            return
        sides = [next((t for t in terms if t is not None), None) for terms in _side_terms(config, grads, i, found)]
        if g is not None or any(t is not None for t in sides):
            yield i, saved[config.saved_spans[i]], (g, *sides)
        g = found[i][0]


def _no_gradients(config: Config) -> list[tuple[Any, ...]]:
    """Return None for each input of each stage."""
    return [(None,) * (1 + n) for n in config.fields]


def _returned(config: Config, found: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return one gradient for each input of the chain."""
    for consumer, field in config.inside:
        own = found[consumer]
        found[consumer] = (*own[:field], None, *own[field + 1 :])
    return (found[0][0], *[t for stage in found for t in stage[1:]])


def _side_gradients(config: Config, grads: Sequence[Any], stage: int, found: list[tuple[Any, ...]]) -> list[Any]:
    """Return the gradients of a stage's side outputs."""
    sums = []
    for terms in _side_terms(config, grads, stage, found):
        # in the order of `config.sums`, in which autograd would add them: the bits depend on it
        here = [g for g in terms if g is not None]
        sums.append(None if not here else here[0] if len(here) == 1 else sum(here[1:], here[0]))
    return sums


def _side_terms(config: Config, grads: Sequence[Any], stage: int, found: list[tuple[Any, ...]]) -> list[list[Any]]:
    """Return the terms of each side output's gradient: the one from outside of the chain, then those from inside."""
    from_outside = dict(zip(config.chain_outputs[stage], grads[config.chain_output_spans[stage]], strict=True))
    return [
        [from_outside.get(k), *[found[c][field] for c, field, p, which in config.sums if (p, which) == (stage, k)]]
        for k in range(config.side_counts[stage])
    ]
