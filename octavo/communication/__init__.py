"""Process groups by name, and collectives over them that carry gradients."""
