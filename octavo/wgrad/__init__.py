"""Where a weight's gradient goes: `main_grad`, or a mailbox until `backward_dw()`."""
