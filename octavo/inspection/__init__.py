"""`octavo.explain`: reports what torch.compile makes of a model."""
