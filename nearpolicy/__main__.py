"""`python -m nearpolicy`: the command line, also for torchrun -m."""

from nearpolicy.cli import main

if __name__ == "__main__":
    main()
