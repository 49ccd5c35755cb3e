"""Destinations of a weight's gradient: `main_grad`, or a mailbox until `backward_dw()`."""
