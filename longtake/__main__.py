"""`python -m longtake` and `torchrun -m longtake` are the `longtake` command."""

from longtake.cli import main

if __name__ == "__main__":
    main()
