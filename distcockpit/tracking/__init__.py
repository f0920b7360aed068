"""One run, step by step: what is tracked when, the exchanges between ranks, and the way of the sums to the store.

May import: store, gradients, capture, curvature, quantities.
"""
