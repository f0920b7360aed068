"""One run, step by step: what is tracked when, what ranks exchange, and how the sums reach the store.

May import: replay, store, gradients, losses, capture, curvature, quantities.
"""
