"""Every private or version-gated API of torch that Octavo uses, and nothing else."""
