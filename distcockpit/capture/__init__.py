"""From the hooks and calls of a step to checked micro-batches: what was called, which loss, divided by what.

May import: replay, gradients.
"""
