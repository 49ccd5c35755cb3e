"""Short runs of the demo's training."""

from octavo.demo import training
from octavo.recipes import recipe


def trained(name, shape, *, seed=0, steps=4):
    """Trains a model of that shape in the recipe of that name, or in plain torch for None."""
    return training.train(training.Plan(steps, 2, seed, shape=shape), recipe(name) if name else None)
