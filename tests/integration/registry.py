"""Models of transformers that no list names: types drawn from its registry, in the common sizes of the zoo.

The rule of docs/models.md is tried with them: a model needs no code in Octavo unless it has experts of unknown layout.
A type is passed over if its config has no place for the common sizes, or if the model does not train unconverted.
"""

import importlib
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.integration.model_trials import trained
from tests.integration.zoo import Batch, Entry, classified, entries, images, text, transformers_entry

LARGEST = 30_000_000  # parameters of a model that is tried
LONGEST = 30  # seconds that a few steps may take unconverted
KINDS: tuple[tuple[str, str, Callable[[int], Batch]], ...] = (
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", text),
    ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", text),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", classified),
    ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", text),
    ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", images),
)


def candidates() -> dict[str, Entry]:
    """Return an entry of each type of the registry that the zoo does not name."""
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    known = {name for name, _ in entries()}
    found: dict[str, Entry] = {}
    for auto, mapping, batch in KINDS:
        for kind in getattr(names, mapping):
            if kind not in known and kind not in found:
                found[kind] = transformers_entry(kind, auto, batch)
    return found


def sampled(count: int, seed: int) -> Iterator[tuple[str, Entry]]:
    """Yield so many types that train unconverted, in random order, and print why others are passed over."""
    every = candidates()
    for kind in random.Random(seed).sample(sorted(every), len(every)):
        if count == 0:
            return
        if why := unfit(every[kind]):
            print(f"{kind}: passed over, {why}", flush=True)
            continue
        count -= 1
        yield kind, every[kind]


def unfit(entry: Entry) -> str:
    """Return why a model cannot be tried in the common sizes; empty if it can."""
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LONGEST)
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in entry.build().parameters())
        if size > LARGEST:
            return f"{size:,} parameters in the common sizes"
        torch.manual_seed(0)
        trained(entry, entry.build().train())
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    finally:
        signal.alarm(0)
    return ""


def _late(*_: Any) -> None:
    raise TimeoutError(f"longer than {LONGEST} s")
