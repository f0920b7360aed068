"""What it takes to run something again and leave no trace: random states, attributes of modules, tensors in trees.

Imports no other folder.
"""
