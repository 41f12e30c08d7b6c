"""`python -m spt` is the command `spt`."""

from spt_cli import main

if __name__ == "__main__":
    main()
