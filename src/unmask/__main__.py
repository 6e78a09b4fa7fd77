"""`python -m unmask`, and `torchrun -m unmask`."""

from unmask.cli import main

main()
