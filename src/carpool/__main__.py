"""`python -m carpool`."""

from carpool.cli import main

main()
