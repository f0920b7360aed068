"""From the hooks and calls of a step to checked micro-batches: what was called, and what serves each parameter.

May import: replay, gradients, losses.
"""
