"""`python -m fxc`."""

from fxc.cli.main import main

main()
