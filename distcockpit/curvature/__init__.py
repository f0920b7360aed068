"""Diagonals, traces and eigenvalues of the pooled curvature.

May import: replay, losses, capture.
"""
