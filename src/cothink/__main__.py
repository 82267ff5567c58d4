"""`python -m cothink`: the same as the command `cothink`."""

from cothink.cli import main

main()
