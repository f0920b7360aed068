"""What a step differentiates: forward passes, the losses computed from them, their terms, samples and divisors.

May import: replay, gradients.
"""
