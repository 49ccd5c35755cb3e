"""Layers of other packages that `octavo.convert` runs in a recipe without replacing them: a module keeps its parameters
and its state dict, and stays an instance of its class.

    third_party_linear      subclasses of nn.Linear
    linear_trial            whether the forward of one computes F.linear, tried on random tensors
    known_experts           KNOWN: the kinds of experts that are taken, a row each
    forwards                the forwards of converted modules
    third_party_experts     recognises, refuses, converts and reverts experts by their row
    third_party_layers      the submodule of converted experts, on their owner's parameters
    split_experts           experts over ranks
    owned                   modules that read the module around them
    expert_activation       finds Octavo's activation for experts
    derived_class           classes that derive from one of Octavo's and one of theirs
"""
