"""`python -m flatout` is `flatout`."""

from flatout.cli import main

if __name__ == "__main__":
    main()
