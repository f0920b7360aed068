"""What people look at: the terminal, the page, summaries, and other tools' formats.

May import: store, instruments, findings.
"""
