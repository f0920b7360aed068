"""User-facing output: the terminal, the page, summaries, and exports to other tools' formats.

May import: store, instruments, findings.
"""
