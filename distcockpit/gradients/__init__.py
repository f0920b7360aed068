"""Individual gradients of calls: closed forms, reruns of any other function, and sums over samples in one walk.

May import: replay.
"""
