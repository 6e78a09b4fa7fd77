"""`python -m unmask`, and `torchrun -m unmask`."""

from unmask.cli import main

if __name__ == "__main__":  # a worker of a server imports this module, too
    main()
