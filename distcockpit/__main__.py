"""``python -m distcockpit``."""

from distcockpit.cli import main

main()
