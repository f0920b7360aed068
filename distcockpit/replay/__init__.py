"""Running something again without leaving a trace: random states, attributes of modules, tensors in trees.

Imports no other folder.
"""
