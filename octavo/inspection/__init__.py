"""What torch.compile made of a model: `octavo.explain`."""
